"""Find the runs in a folder, and the live ones among them."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from torchlens_perf.errors import RunStoreError
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.store.run_folders import find_runs, is_run
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.words.run_state import DIED, FAILED, run_state
from torchlens_perf.view.specs import Column, Quantity, Table, sanitize_line

# Older runs are listed without reading their files, since a folder may have hundreds of runs.
_MAX_READ_AGE_S = 900.0
_MOST, _MAX_NAME, _MAX_ABOUT = 50, 32, 60
_OLD, _STARTING, _LIVE, _DAMAGED = "old", "starting", "live", "damaged"


@dataclasses.dataclass(frozen=True)
class RunRow:
    """A run directory."""

    path: Path
    changed_unix_s: float
    state: str = _OLD
    about: str = ""
    """The program, or the reason why the run cannot be read."""
    ranks: int | None = None
    steps: int | None = None


def list_runs(folder: Path) -> list[RunRow]:
    """Return the newest runs in a folder, newest first.

    Problems of the folder raise no exception.
    """
    try:
        found = [] if is_run(folder) else find_runs(folder)[:_MOST]
    except (OSError, RunStoreError):
        return []
    rows = [RunRow(folder / run.name, run.changed_ns / 1e9) for run in found]
    return [
        _read_run_state(row) if time.time() - row.changed_unix_s < _MAX_READ_AGE_S else row
        for row in rows
    ]


def select_live_runs(rows: list[RunRow]) -> list[RunRow]:
    """Return the live runs."""
    return [row for row in rows if row.state == _LIVE]


def build_run_table(rows: list[RunRow]) -> Table:
    """Return a row for each run; runs that died or are damaged are marked."""
    changed = [time.strftime("%m-%d %H:%M", time.localtime(row.changed_unix_s)) for row in rows]
    columns = [
        Column("changed", changed, Quantity.TEXT, 0.3),
        Column("state", [row.state for row in rows], Quantity.TEXT),
        Column("ranks", [row.ranks for row in rows], Quantity.NUMBER, 0.1),
        Column("steps", [row.steps for row in rows], Quantity.NUMBER, 0.4),
        Column("run", [sanitize_line(row.path.name)[:_MAX_NAME] for row in rows], Quantity.TEXT),
        Column(
            "program", [sanitize_line(row.about)[:_MAX_ABOUT] for row in rows], Quantity.TEXT, 0.5
        ),
    ]
    bad = frozenset(at for at, row in enumerate(rows) if row.state in (DIED, FAILED, _DAMAGED))
    return Table("runs", "Runs, the newest first", columns, bad, noun="run")


def _read_run_state(row: RunRow) -> RunRow:
    """Return the row with data from the first node's file."""
    paths = sorted(RunDirectory(row.path).nodes.glob("*.json"))
    if not paths:
        return dataclasses.replace(row, state=_STARTING)
    try:
        processes = node_state.load(paths[0]).processes.values()
    except (OSError, RunStoreError) as error:
        return dataclasses.replace(row, state=_DAMAGED, about=str(error))
    ends = [process.ended for process in processes]
    return dataclasses.replace(
        row,
        state=_LIVE if not all(ends) else run_state(False, DIED in ends, FAILED in ends),
        about=next((process.identity.program for process in processes), ""),
        ranks=max((process.identity.world_size for process in processes), default=None),
        steps=max(
            (last + 1 for each in processes if (last := each.statistics.last_step) is not None),
            default=None,
        ),
    )
