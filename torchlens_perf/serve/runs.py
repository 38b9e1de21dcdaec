"""The runs under a folder: which there are, and a line on each."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

from torchlens_perf.errors import RunStoreError, printable
from torchlens_perf.run import ownership

_LIVE_S = 60.0  # a sidecar writes its state every few seconds
_HEAD_BYTES = 4096
_MAX_LINE = 300


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory, by what is cheap to know of it."""

    name: str
    changed_s: float
    """When its state was written last, UNIX time."""


@dataclasses.dataclass(frozen=True)
class RunLine:
    """What the list says of it."""

    name: str
    changed_s: float
    is_live: bool
    nodes: int
    said: str
    """The first lines of its last report; why it cannot be read; "" where there is none yet."""


def is_run(path: Path) -> bool:
    return (path / "nodes").is_dir()


def find_runs(folder: Path, advanced: Callable[[int, int | None], object] = lambda done, total: None) -> list[Run]:
    """Those directly in the folder, the newest first; the folder itself where it is a run. Links are not followed.

    Raises RunStoreError for a folder that cannot be read.
    """
    if is_run(folder):
        return [Run(folder.name, _changed_s(folder))]
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise RunStoreError(f"{folder} cannot be read: {error.strerror or error}") from None
    found = []
    for done, name in enumerate(names):
        advanced(done, len(names))
        if is_run(folder / name):
            found.append(Run(name, _changed_s(folder / name)))
    return sorted(found, key=lambda run: (-run.changed_s, run.name))


def line_of(folder: Path, run: Run) -> RunLine:
    """Reads the head of its report, and lists its nodes."""
    path = folder if is_run(folder) else folder / run.name
    nodes, said = 0, ""
    try:
        nodes = sum(entry.name.endswith(".json") for entry in os.scandir(path / "nodes"))
        said = _head(path / "report.txt")
    except OSError as error:
        said = f"cannot be read: {error.strerror or error}"
    return RunLine(run.name, run.changed_s, time.time() - run.changed_s < _LIVE_S and not said, nodes, said)


def _changed_s(run: Path) -> float:
    try:
        return os.stat(run / "nodes").st_mtime
    except OSError:
        return 0.0


def _head(report: Path) -> str:
    """Its verdict: the lines up to the first "Next:"."""
    try:
        with open(ownership.open_to_read(report), "rb") as file:
            text = file.read(_HEAD_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = []
    for line in lines:
        if line.startswith("Next:"):
            break
        kept.append(line)
        if len(kept) == 3:
            break
    return printable(" ".join(kept))[:_MAX_LINE]
