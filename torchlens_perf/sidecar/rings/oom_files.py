"""Read the memory tables that ranks write when their device runs out of memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from torchlens_perf.run import ownership
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.oom_table import OutOfMemory
from torchlens_perf.verdicts.node_state import ProcessState, decode_json
from torchlens_perf.verdicts.words.oom import format_oom_table

_SCAN_INTERVAL_S = 10.0
_MAX_BYTES = 1 << 26
# The node's state contains only the first rows of a table, and the table's file all rows.
_ROWS_IN_STATE = 10


class OomTableReader:
    """Reader of the ranks' out-of-memory tables. Adds the newest table to each process's state."""

    def __init__(self, run: RunDirectory) -> None:
        self._folder = run.oom
        self._known: dict[Path, int] = {}  # modification times of the files read so far
        self._scanned_s = float("-inf")

    def add_new_tables(self, processes: Mapping[str, ProcessState], *, at_once: bool) -> None:
        """Add new tables to the state of their processes, and write each table as text.

        Raises OSError.

        processes: by Identity.key. at_once: scan now, because a process has ended and may have run
        out of memory. Otherwise the folder is scanned rarely, because nodes may share the disk.
        """
        if not at_once and time.monotonic() - self._scanned_s < _SCAN_INTERVAL_S:
            return
        self._scanned_s = time.monotonic()
        for path in self._folder.glob("rank*.json"):
            try:
                written_ns = path.stat().st_mtime_ns
                if self._known.get(path) == written_ns:
                    continue
                value = decode_json(ownership.read_regular_file(path, _MAX_BYTES), OutOfMemory)
            # The rank has just replaced the file, or another program has written it.
            except (FileNotFoundError, ownership.NotRegularFileError, ownership.TooLargeError):
                continue
            self._known[path] = written_ns
            process = processes.get(value["process"])
            if process is None:
                continue  # The process belongs to another node.
            ownership.write_private_file(path.with_suffix(".txt"), format_oom_table(value))
            before = process.out_of_memory
            if before is None or before["time_unix_ns"] <= value["time_unix_ns"]:
                process.out_of_memory = _trim_table(value, path)


def _trim_table(value: OutOfMemory, path: Path) -> OutOfMemory:
    table = value["table"]
    if table is not None:
        table = {**table, "rows": table["rows"][:_ROWS_IN_STATE]}
    return {**value, "table": table, "file": f"{path.parent.name}/{path.name}"}
