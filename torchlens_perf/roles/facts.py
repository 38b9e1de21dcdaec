"""The part of a report on a job with several roles, and the names of its parts. Pure."""

from __future__ import annotations

from typing import cast

from msgspec import Struct

from torchlens_perf.roles.causes import Cause
from torchlens_perf.roles.iterations import COLLECTING, OTHER, SENDING, STEPS, WEIGHTS
from torchlens_perf.roles.what_if import IterationChange
from torchlens_perf.verdicts.words.report import Report

PARTS = {
    SENDING: "sending samples",
    "generation wait": "waiting for an engine",
    "generation": "generation",
    "tool wait": "waiting for the tool",
    "tool": "tool",
    "logprobs wait": "waiting for log-probabilities",
    "logprobs": "log-probabilities",
    "reward wait": "waiting for the reward",
    "reward": "reward",
    COLLECTING: "collecting the batch",
    STEPS: "optimizer steps",
    WEIGHTS: "sending weights",
    OTHER: "other",
}
"""The parts of an iteration, in their order, and what they are called. The ones before STEPS are the
stages of the sample that the trainer waited for."""


class Engine(Struct, frozen=True):
    """One process that generates samples."""

    name: str
    samples: int
    tokens: int | None
    s_per_token: float | None
    """None if tokens are not known."""


class Iterations(Struct, frozen=True):
    """Iterations of a job with several roles, without the first one."""

    count: int
    mean_s: float
    parts: dict[str, float]
    """Seconds per iteration of each of PARTS that occurs. They add up to mean_s."""
    engines: list[Engine]
    causes: list[Cause]
    roles: dict[str, int]
    """Number of processes by role."""
    lost_events: int
    what_if: list[IterationChange]
    """Predicted gains of changes that the record can answer."""
    lanes: list[IterationLanes]
    measures_ranks: bool
    """True if the trainer's ranks were compared: there are several, each with several steps in an
    iteration."""


class Span(Struct, frozen=True):
    """Work of a process, in seconds since the begin of the iteration."""

    what: str
    """In a lane, "busy" or "weights"; on the critical path, one of PARTS."""
    process: str
    begin_s: float
    end_s: float


class Lane(Struct, frozen=True):
    """One process in one iteration."""

    process: str
    role: str
    busy_s: float
    """Time in which it did something."""
    spans: list[Span]


class IterationLanes(Struct, frozen=True):
    """The work of all processes of a job in one iteration."""

    kind: str
    """"typical" or "slowest"."""
    batch: str
    seconds: float
    lanes: list[Lane]
    """The processes on the critical path, and the most and the least busy ones of each role."""
    path: list[Span]
    """The critical path."""
    others: dict[str, int]
    """Number of processes without a lane, by role."""


class RoleReport(Report, total=False):
    """A report with the iterations of a job with several roles."""

    iterations: Iterations


def find_iterations(report: Report) -> Iterations | None:
    """Return the iterations of a report; None for a job without roles."""
    return cast(RoleReport, report).get("iterations")
