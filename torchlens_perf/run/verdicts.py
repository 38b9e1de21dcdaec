"""Alerts and verdicts of a run, and the summary of its report.

The sidecar creates these values and the training process receives them.
"""

from __future__ import annotations

import dataclasses
import math

STARTED, UPDATED, ENDED = "started", "updated", "ended"
_ACTION = " Next: "


def range_end(until_step: int | None) -> float:
    """Return the end of a range of steps; infinity if it is None, because the range lasts."""
    return math.inf if until_step is None else until_step


def format_step_range(since_step: int, until_step: int | None) -> str:
    """Format a range of steps: "since step 40", "from step 40 to 79" or "in step 40"."""
    end = range_end(until_step)
    if end == math.inf:
        return f"since step {since_step}"
    return (
        f"in step {since_step}"
        if end - 1 == since_step
        else f"from step {since_step} to {end - 1:.0f}"
    )


class _TextWithAction:
    text: str
    next: str

    @property
    def sentence(self) -> str:
        """The finding and the action to take, as one text."""
        return f"{self.text}{_ACTION}{self.next}" if self.next else self.text


@dataclasses.dataclass(frozen=True)
class Alert(_TextWithAction):
    """A finding that started, changed or ended. Fields that do not apply are None, () or ""."""

    id: str
    """Id of 32 hexadecimal digits. All nodes that send an alert, and all repetitions, use the same
    id.
    """
    about: str
    """Id of the finding: equal for all alerts about it, from `started` to `ended`."""
    kind: str
    """Kind of the finding, as in the report: straggler, hang, imbalance or slow_link."""
    change: str
    """One of started, updated and ended."""
    text: str
    """The finding in a sentence, with its numbers."""
    next: str
    """The action to take; "" if not applicable."""
    unix_ns: int
    """Time of the finding in nanoseconds since the Unix epoch."""
    attempt: int
    """Attempt of the job: the number of restarts before it, starting with 0."""
    since_step: int | None = None
    """First step of the finding."""
    until_step: int | None = None
    """First step after the end of the finding; None while it lasts."""
    rank: int | None = None
    """The suspected rank. If several ranks are suspected, the one to examine first."""
    ranks: tuple[int, ...] = ()
    """All suspected ranks, including all ranks that are slow together."""
    host: str = ""
    """Host name of `rank`."""
    phase: str | None = None
    cause: str = ""
    """Class of the cause.

    For a straggler: slow_compute, slow_data, slow_host or more_work. For a hang: the kind of hang,
    such as dead or missing.
    """
    because: tuple[str, ...] = ()
    """Kinds of the causes found for a straggler, most likely first; empty if none was found."""
    scope: str = ""
    """What is slow: "rank", "node" (all ranks of a node), or "position" (a position in the device
    mesh).
    """
    cost_s_per_step: float | None = None
    """Seconds per step that the job would save without the slow ranks; None if not known."""
    cost_share: float | None = None
    duration_s: float | None = None
    """Seconds without a step, for a hang; None for other kinds."""

    @property
    def urgent(self) -> bool:
        """True if the finding has started or changed, False if it has ended."""
        return self.change != ENDED

    def covers(self, step: int) -> bool:
        """Return True if the finding has a start and since_step <= step < until_step."""
        return self.since_step is not None and self.since_step <= step < range_end(self.until_step)


@dataclasses.dataclass(frozen=True)
class Verdict(_TextWithAction):
    """One verdict of the report. Fields that do not apply or are not known are None."""

    kind: str
    """Kind of the verdict, as in the report: straggler, hang, data, none, and others."""
    text: str
    """The verdict as a sentence with its numbers."""
    next: str
    """The action to take; "" if not applicable."""
    rank: int | None
    phase: str | None
    cost_s_per_step: float | None
    """Seconds per step that the job would save without the problem."""
    cost_share: float | None
    since_step: int | None


@dataclasses.dataclass(frozen=True)
class Summary:
    """Results of a run at one point in time. Values that are not known are None, never zero."""

    verdicts: tuple[Verdict, ...] = ()
    """The verdicts, most important first."""
    run_id: str | None = None
    run_dir: str | None = None
    running: bool | None = None
    ranks: int | None = None
    steps: int | None = None
    """Number of steps in the statistics. The step times below are those of all ranks without the
    warm-up.
    """
    step_p50_s: float | None = None
    step_p95_s: float | None = None
    step_p99_s: float | None = None
    step_max_s: float | None = None
    overhead_share: float | None = None
    """Time of this package on the training thread, as a fraction of the step time."""
    overhead_low: float | None = None
    """Lower end of the interval of 95 % of `overhead_share`."""
    overhead_high: float | None = None
    module_period: int | None = None
    """Calls of modules are timed in one of this many steps; the largest value of all ranks."""
    sidecar_cpu_s: float | None = None
    """CPU time of all sidecars in seconds."""
    records_lost: int | None = None
    as_of: str | None = None
    """Time of these results, in UTC."""
    missing: str = ""
    """Reason why there are no results; "" if there are results."""
    figures: str = dataclasses.field(default="", repr=False)
    """Step count, step times and overhead as text, in the words of the report."""
    html: str = dataclasses.field(default="", repr=False, compare=False)
    """HTML that a notebook shows for the summary."""

    def _repr_html_(self) -> str | None:
        return self.html or None

    def __str__(self) -> str:
        """Return the sentences of the verdicts and the line `figures`."""
        if self.missing:
            return f"torchlens_perf: {self.missing}"
        return "\n".join([*(each.sentence for each in self.verdicts), self.figures])
