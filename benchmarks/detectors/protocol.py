"""The files of one run, which any tool and any language can write: truth.json, times and
answer.json.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.planted_truth import Truth


@dataclasses.dataclass(frozen=True)
class Named:
    """A rank that a tool names. A field is None if the tool does not report it."""

    rank: int
    phase: str | None = None
    """data, forward, backward, optimizer, host or compute (forward and backward)."""
    since_step: int | None = None
    """The first slow step, from 0 on."""
    cost_s: float | None = None
    """The time by which a step would be shorter without the fault."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run under one tool: what was planted, what the tool named, and the loop's own times."""

    truth: Truth
    named: tuple[Named, ...]
    """Ranks that are slow at the end of the run come first, then those named before."""
    seconds: tuple[tuple[float, ...], ...]
    """Seconds of each step, by rank, by the clock of the loop."""


def write_json(path: Path, value: Any) -> None:
    """Write a file that appears complete."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value))
    partial.rename(path)


def write_answer(folder: Path, named: Sequence[Named]) -> None:
    write_json(folder / "answer.json", {"named": [dataclasses.asdict(each) for each in named]})


def times_path(folder: Path, rank: int) -> Path:
    return folder / f"times-{rank}.json"


def read_run(folder: Path) -> Run:
    """Read one run. Raises FileNotFoundError if the run is not complete."""
    truth = Truth.read(folder / "truth.json")
    answer = json.loads((folder / "answer.json").read_text())
    seconds = tuple(
        tuple(json.loads(times_path(folder, rank).read_text())) for rank in range(truth.ranks)
    )
    return Run(truth, tuple(Named(**each) for each in answer["named"]), seconds)
