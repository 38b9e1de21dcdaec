"""The tables that ranks write when their device's memory runs out, as the sidecar takes them over."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.run import ownership
from torchlens_perf.run.oom_table import OutOfMemory
from torchlens_perf.verdicts.node_state import ProcessState, decode
from torchlens_perf.verdicts.words.oom import oom_text

if TYPE_CHECKING:
    from torchlens_perf.run.directory import RunDirectory

_LOOK_FOR_OOM_S = 10.0
_MAX_BYTES = 1 << 26
_KEPT_ROWS = 10  # of an out-of-memory table in the node's state; its file has all


class OomFiles:
    """Of the tables that ranks write when their device's memory runs out: hands each process its newest one, and writes
    it as text too."""

    def __init__(self, run: RunDirectory) -> None:
        self._folder = run.oom
        self._known: dict[Path, int] = {}  # when each was written, as far as they are taken over
        self._looked_s = float("-inf")

    def update(self, processes: Mapping[str, ProcessState], *, at_once: bool) -> None:
        """Takes over what is new for these processes, by their keys. Raises OSError.

        Looks rarely, as nodes may share the disk; at once where a process has ended, which may be why.
        """
        if not at_once and time.monotonic() - self._looked_s < _LOOK_FOR_OOM_S:
            return
        self._looked_s = time.monotonic()
        for path in self._folder.glob("rank*.json"):
            try:
                written_ns = path.stat().st_mtime_ns
                if self._known.get(path) == written_ns:
                    continue
                value = decode(ownership.read_bytes(path, _MAX_BYTES), OutOfMemory)
            # Its rank has a newer one, or another program's file has its name.
            except (FileNotFoundError, ownership.NotRegularFileError, ownership.TooLargeError):
                continue
            self._known[path] = written_ns
            process = processes.get(value["process"])
            if process is None:
                continue  # another node's
            ownership.write(path.with_suffix(".txt"), oom_text(value))
            before = process.out_of_memory
            if before is None or before["time_unix_ns"] <= value["time_unix_ns"]:
                process.out_of_memory = _kept(value, path)


def _kept(value: OutOfMemory, path: Path) -> OutOfMemory:
    table = value["table"]
    if table is not None:
        table = {**table, "rows": table["rows"][:_KEPT_ROWS]}
    return {**value, "table": table, "file": f"{path.parent.name}/{path.name}"}
