"""A Jupyter kernel and a minimal front end that runs cells one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, clean_environ


class Output:
    """The final output of a cell, as a front end shows it."""

    def __init__(self, messages: list[tuple[str, dict[str, Any]]]) -> None:
        self.messages = messages
        self.text = "".join(content["text"] for kind, content in messages if kind == "stream")
        self.errors = [content["ename"] for kind, content in messages if kind == "error"]
        self.shown: dict[str, dict[str, str]] = {}
        """MIME types and data by display id, or by number without an id."""
        self.updated: dict[str, dict[str, str]] = {}
        """Updates of other cells' displays."""
        for number, (kind, content) in enumerate(messages):
            name = content.get("transient", {}).get("display_id", str(number))
            if kind in ("display_data", "execute_result"):
                self.shown[name] = content["data"]
            elif kind == "update_display_data":
                (self.shown if name in self.shown else self.updated)[name] = content["data"]

    @property
    def reports(self) -> list[dict[str, str]]:
        """Return the displays with visible content."""
        return [data for data in self.shown.values() if data["text/plain"]]

    def only(self) -> dict[str, str]:
        """Return the output's only report as text and as HTML."""
        (data,) = self.reports
        assert set(data) == {"text/plain", "text/html"}
        return data


class Kernel:
    """A Jupyter kernel with a front end that runs cells in it, one after the other."""

    def __init__(self, folder: Path, **environment: str) -> None:
        from jupyter_client.manager import KernelManager

        self.folder = folder
        self.manager = KernelManager(kernel_name="python3")
        path = {"PYTHONPATH": str(ROOT)}
        self.manager.start_kernel(cwd=str(folder), env=clean_environ({**path, **environment}))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def run(self, code: str, interrupt_at: str = "", timeout_s: float = 120) -> Output:
        """Run a cell. Interrupt the cell once it has printed `interrupt_at`."""
        request = self.client.execute(code)
        messages: list[tuple[str, dict[str, Any]]] = []
        while True:
            message = self.client.get_iopub_msg(timeout=timeout_s)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            messages.append((kind, content))
            if interrupt_at and kind == "stream" and interrupt_at in content["text"]:
                self.manager.interrupt_kernel()
                interrupt_at = ""
            if kind == "status" and content["execution_state"] == "idle":
                return Output(messages)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)
