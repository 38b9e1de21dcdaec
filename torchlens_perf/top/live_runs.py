"""The runs in a folder: which are live, which one to show."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from torchlens_perf.errors import RunStoreError
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.words.run_state import DIED

if TYPE_CHECKING:
    from torchlens_perf.top.lettering import Lettering

_RECENT_S = 900.0  # without anything new, nothing of a run is read: a folder may hold hundreds
_MOST = 50


@dataclasses.dataclass(frozen=True)
class RunRow:
    """A run directory, the newest first."""

    path: Path
    changed_unix_s: float
    program: str = ""
    ranks: int = 0
    steps: int | None = None
    died: bool = False
    """Whether the run has ended and a rank did not close its watch."""
    live: bool | None = None
    """None: not known; nothing is there yet, or nothing new for a quarter of an hour, and so it is not looked at."""
    problem: str = ""

    @property
    def is_recent(self) -> bool:
        return time.time() - self.changed_unix_s < _RECENT_S


def default_folder() -> Path:
    """Where runs are, if nobody says another place."""
    from torchlens_perf.config import Config

    return Path(os.environ.get("TORCHLENS_PERF_DIR", Config.dir))


def runs_in(folder: Path) -> list[RunRow]:
    """The newest runs in a folder; none where there is none. Raises nothing that a folder can cause."""
    found: list[tuple[float, Path]] = []
    try:
        for path in folder.iterdir():
            if not path.is_symlink() and (changed := _changed(path)) is not None:
                found.append((changed, path))
    except OSError:
        return []
    rows = [RunRow(path, changed) for changed, path in sorted(found, reverse=True)[:_MOST]]
    return [_looked_at(row) if row.is_recent else row for row in rows]


def _changed(path: Path) -> float | None:
    """When a node last wrote; None for what is no run directory."""
    try:
        with os.scandir(path / "nodes") as entries:
            times = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return max([*times, os.stat(path / "nodes").st_mtime])
    except OSError:
        return None


def _looked_at(row: RunRow) -> RunRow:
    """With what one node's file says: of a job of many, the others say the same."""
    paths = sorted(RunDirectory(row.path).nodes.glob("*.json"))
    if not paths:
        return row
    try:
        state = node_state.load(paths[0])
    except (OSError, RunStoreError) as error:
        return dataclasses.replace(row, problem=str(error))
    processes = state.processes.values()
    identities = [process.identity for process in processes]
    made = [process.statistics.last_step for process in processes]
    return dataclasses.replace(
        row,
        program=next((each.program for each in identities), ""),
        ranks=max((each.world_size for each in identities), default=0),
        steps=max((step + 1 for step in made if step is not None), default=None),
        live=any(not process.ended for process in processes),
        died=any(process.ended == DIED for process in processes) and all(process.ended for process in processes),
    )


def live(rows: list[RunRow]) -> list[RunRow]:
    return [row for row in rows if row.live]


def run_lines(rows: list[RunRow], chosen: int, width: int, lettering: Lettering) -> list[Text]:
    """A line a run, of which one is marked."""
    if not rows:
        return [Text("no run here yet; looking again each second", style="dim")]
    lines = []
    for index, row in enumerate(rows):
        state, style = {True: ("live", "bold green"), False: ("ended", ""), None: ("old", "dim")}[row.live]
        if row.died:
            state, style = DIED, "bold magenta"
        if row.live is None and row.is_recent:
            state, style = "begins", "green"  # no sidecar has written yet
        if row.problem:
            state, style = "damaged", "bold yellow"
        changed = time.strftime("%m-%d %H:%M", time.localtime(row.changed_unix_s))
        about = f"{row.ranks:>5} ranks" if row.ranks else " " * 11
        steps = f"{row.steps:>9,} steps" if row.steps is not None else " " * 15
        room = max(8, width - 48)
        line = Text(f"{'>' if index == chosen else ' '} {changed} ")
        line.append(f"{state:<8}", style=style).append(f"{about}{steps}  ")
        line.append(lettering.fitted(f"{row.path.name}  {row.problem or row.program}", room))
        if index == chosen:
            line.stylize("reverse")
        lines.append(line)
    return lines
