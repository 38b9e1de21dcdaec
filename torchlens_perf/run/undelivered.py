"""The cursor of an OTLP export: the data that no endpoint has accepted so far.

The data itself is in the run directory: spans are built from segments, metrics from statistics.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable

from torchlens_perf.run.records import TracedStep
from torchlens_perf.run.verdicts import Alert


@dataclasses.dataclass(frozen=True)
class UndeliveredStep:
    """A traced step of one process whose spans were not delivered."""

    process: str
    """Identity.key of the process."""
    step: int
    spans: int
    chosen: TracedStep | None = None
    """The ranks and spans to send; None for all."""


class WholeRun(enum.Enum):
    """Data that is built from all steps of a run."""

    METRICS = "metrics"
    """The newest values of cumulative metrics."""
    SPAN = "span"
    """The span of the run."""

    @property
    def signal(self) -> str:
        return "metrics" if self is WholeRun.METRICS else "traces"


@dataclasses.dataclass
class Undelivered:
    """The undelivered data of one node."""

    steps: list[UndeliveredStep] = dataclasses.field(default_factory=list)
    alerts: list[Alert] = dataclasses.field(default_factory=list)
    whole_run: list[WholeRun] = dataclasses.field(default_factory=list)

    @property
    def signals(self) -> frozenset[str]:
        """The signals with undelivered data: traces, metrics, logs."""
        parts = {"traces": self.steps, "logs": self.alerts}
        found = frozenset(signal for signal, undelivered in parts.items() if undelivered)
        return found | {part.signal for part in self.whole_run}

    def clear(self, signals: Collection[str]) -> None:
        """Remove the data of these signals."""
        self.steps = [] if "traces" in signals else self.steps
        self.alerts = [] if "logs" in signals else self.alerts
        self.whole_run = [part for part in self.whole_run if part.signal not in signals]


def join_undelivered(nodes: Iterable[Undelivered]) -> Undelivered:
    """Return the undelivered data of several nodes."""
    joined = Undelivered()
    for each in nodes:
        joined.steps += each.steps
        joined.alerts += each.alerts
        joined.whole_run += [part for part in each.whole_run if part not in joined.whole_run]
    return joined
