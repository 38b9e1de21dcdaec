"""Real backends, each in its own environment, started on loopback and stopped with the test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.otlp_receiver import wait_for
from tests.support.processes import ROOT

ENVIRONMENTS = ROOT / ".venv-backends"
_LONGEST_S = 900
"""Longest life of a backend, in case that the test process is killed."""


def environment(name: str) -> Path:
    """Return the folder where a backend is installed. Skip the test if the folder is missing."""
    folder = ENVIRONMENTS / name
    if not (folder / "ready").exists():
        failed = folder / "failed"
        why = failed.read_text().strip() if failed.exists() else "make test-backends installs it"
        pytest.skip(f"{name} is not installed in {folder.relative_to(ROOT)}: {why}")
    return folder


class Server:
    """The process of a backend and its children."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        answers: Callable[[], object],
        told: Mapping[str, str] | None = None,
    ) -> None:
        """Start the backend in `folder` and wait until `answers` is true. told: further variables.

        The backend's log is in `folder` too.
        """
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OTEL_", "DD_", "MLFLOW_", "PHOENIX_", "ROTEL_", "PYTHON"))
        }
        self.log = folder / "server.log"
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                ["timeout", str(_LONGEST_S), *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder,
                env={**inherited, **(told or {})}, start_new_session=True,
            )  # fmt: skip
        try:
            wait_for(lambda: self._process.poll() is not None or _quietly(answers), 120)
            assert _quietly(answers), self.log.read_text()[-4000:]
            assert self._process.poll() is None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the backend and all its children. A second call has no effect."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            if not _signalled(self._process.pid, how):
                break
            wait_for(self._ended, 10)
        self._process.wait(5)

    def _ended(self) -> bool:
        self._process.poll()
        return not _signalled(self._process.pid, 0)


def _signalled(group: int, how: int) -> bool:
    try:
        os.killpg(group, how)
    except ProcessLookupError:
        return False
    return True


def _quietly(answers: Callable[[], object]) -> bool:
    try:
        return bool(answers())
    except OSError:
        return False


def get(address: str, body: Mapping[str, Any] | None = None) -> Any:
    """Send a request, and return the JSON of the response. body: posted as JSON."""
    request = urllib.request.Request(address)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def status_of(address: str, body: bytes = b"", **headers: str) -> int:
    """Return the status of the response to an OTLP request."""
    request = urllib.request.Request(
        address, body, {"Content-Type": "application/x-protobuf", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: int = answer.status
    except urllib.error.HTTPError as error:
        found = error.code
    return found


def is_up(address: str) -> bool:
    """Return True if the server responds at all."""
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(address, timeout=5).close()
    return True
