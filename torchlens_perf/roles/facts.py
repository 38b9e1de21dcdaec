"""The part of a report on a job with several roles, and the names of its parts. Pure."""

from __future__ import annotations

from msgspec import Struct

from torchlens_perf.roles.causes import Cause
from torchlens_perf.roles.iterations import COLLECTING, SENDING
from torchlens_perf.verdicts.words.report import Report

STEPS, WEIGHTS, OTHER = "steps", "weights", "other"
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
    measures_ranks: bool
    """True if the trainer's ranks were compared: there are several, each with several steps in an
    iteration."""


class RoleReport(Report, total=False):
    """A report with the iterations of a job with several roles."""

    iterations: Iterations
