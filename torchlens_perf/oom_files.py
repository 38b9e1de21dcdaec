"""The tables that ranks have written when their device's memory ran out, as the sidecar finds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchlens_perf.node_state import ProcessState
from torchlens_perf.report.oom_words import oom_text
from torchlens_perf.run_directory import RunDirectory

_KEPT_ROWS = 10  # of a table in the node's state; its file has all


class OomFiles:
    """Hands each process its newest table, and writes it as text too."""

    def __init__(self, run: RunDirectory) -> None:
        self._folder = run.oom
        self._known: dict[Path, int] = {}  # when each was written, as far as they are taken over

    def look(self, processes: Mapping[str, ProcessState]) -> None:
        """Takes over what is new for these processes, by their keys. Raises OSError."""
        for path in self._folder.glob("rank*.json"):
            try:
                written_ns = path.stat().st_mtime_ns
                if self._known.get(path) == written_ns:
                    continue
                value = json.loads(path.read_text())
            except FileNotFoundError:  # its rank has a newer one
                continue
            self._known[path] = written_ns
            process = processes.get(value["process"])
            if process is None:
                continue  # another node's
            path.with_suffix(".txt").write_text(oom_text(value))
            before = process.out_of_memory
            if before is None or before["time_unix_ns"] <= value["time_unix_ns"]:
                process.out_of_memory = _kept(value, path)


def _kept(value: dict[str, Any], path: Path) -> dict[str, Any]:
    table = value["table"]
    if table is not None:
        table = {**table, "rows": table["rows"][:_KEPT_ROWS]}
    return {**value, "table": table, "file": f"{path.parent.name}/{path.name}"}
