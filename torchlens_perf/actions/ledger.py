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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from torchlens_perf.actions.nodes import DAY_S, NamedNode
from torchlens_perf.errors import RunStoreError
from torchlens_perf.run import ownership

NAME = "actions.jsonl"
_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "unix_s": (int, float), "state": str, "target": str, "node": str, "kind": str,
}  # fmt: skip
_MOST_BYTES = 1 << 28
SENDING, SENT, FAILED = "sending", "sent", "failed"


class Ledger:
    """Reports that were sent for one run. Processes that send hold its lock in turn."""

    def __init__(self, run: Path) -> None:
        self._path = run / NAME
        self._folder = run.absolute().parent

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder of runs. Raise RunStoreError, also for an OSError meanwhile."""
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        except OSError as error:
            raise RunStoreError(f"{self._path} cannot be used: {error.strerror or error}") from None
        finally:
            os.close(folder)

    def is_sent(self, node: NamedNode, target: str) -> bool:
        """Return True if this finding was sent to this target, also in an earlier attempt of the job."""
        states = [
            each["state"]
            for each in read_lines(self._path, _FIELDS)
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
                        for each in read_lines(path, _FIELDS)
                        if each["unix_s"] >= since_s
                    }
        return {node for (_, node, _), state in found.items() if state != FAILED}

    def write(self, node: NamedNode, target: str, state: str, text: str) -> None:
        """Append a line that survives a crash. Raise OSError."""
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
        with open_to_append(self._path) as file:
            # A line that a crash has cut ends here.
            file.write(f"\n{json.dumps(line)}\n")
            file.flush()
            os.fsync(file.fileno())


def open_to_append(path: Path) -> IO[str]:
    """Open a file in a folder that other users may write to. Raise RunStoreError, also for a link or a FIFO."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return open(path, "a", opener=lambda name, usual: os.open(name, usual | flags, 0o666))
    except OSError as error:
        raise RunStoreError(f"{path} cannot be written: {error.strerror or error}") from None


def read_lines(
    path: str | Path, fields: Mapping[str, type | tuple[type, ...]]
) -> list[dict[str, Any]]:
    """Return the lines that have these fields, without those that a crash has cut. Raise OSError.

    Another user may have written the file.
    """
    found = []
    with contextlib.suppress(FileNotFoundError):
        content = ownership.read_regular_file(path, _MOST_BYTES).decode(errors="replace")
        for line in content.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                found.append(json.loads(line))
    return [
        each
        for each in found
        if isinstance(each, dict)
        and all(isinstance(each.get(name), kind) for name, kind in fields.items())
    ]
