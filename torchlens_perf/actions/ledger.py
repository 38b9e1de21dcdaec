"""The record of sent reports: one line of JSON for each report of a node, in the run directory.

A line is written before something is sent, and another one after it. If the process dies between them,
it may have been sent, and is not sent again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchlens_perf.actions.nodes import DAY_S, NamedNode

NAME = "actions.jsonl"
SENDING, SENT, FAILED = "sending", "sent", "failed"


class Ledger:
    """The reports sent for one run. The lock is held, so that no other process sends at the same time."""

    def __init__(self, run: Path) -> None:
        self._path = run / NAME
        self._folder = run.absolute().parent

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder of runs. Raise OSError."""
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def is_sent(self, node: NamedNode, target: str) -> bool:
        """Return True if this finding was sent to this target, also in an earlier attempt of the job."""
        states = [
            each["state"]
            for each in read_lines(self._path)
            if (each["node"], each["kind"], each["target"]) == (node.host, node.kind, target)
        ]
        return bool(states) and states[-1] != FAILED

    def find_recent_nodes(self) -> set[str]:
        """Return the nodes that runs of this folder have sent in the last 24 hours."""
        since_s = time.time() - DAY_S
        found: dict[tuple[str, str, str], str] = {}
        for run in os.scandir(self._folder):
            path = os.path.join(run.path, NAME)
            with contextlib.suppress(OSError):
                if os.stat(path).st_mtime >= since_s:
                    found |= {
                        (run.name, each["node"], each["target"]): each["state"]
                        for each in read_lines(Path(path))
                        if each["unix_s"] >= since_s
                    }
        return {node for (_, node, _), state in found.items() if state != FAILED}

    def write(self, node: NamedNode, target: str, state: str, text: str) -> dict[str, Any]:
        """Append a line that survives a crash, and return it. Raise OSError."""
        line = {
            "unix_s": round(time.time(), 3),
            "state": state,
            "target": target,
            "node": node.host,
            "kind": node.kind,
            "ranks": node.ranks,
            "cost_share": node.cost_share,
            "why": node.reason,
            "text": text,
        }
        with self._path.open("a") as file:
            # A line that a crash has cut ends here.
            file.write(f"\n{json.dumps(line)}\n")
            file.flush()
            os.fsync(file.fileno())
        return line


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ledger, without those that a crash has cut."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found
