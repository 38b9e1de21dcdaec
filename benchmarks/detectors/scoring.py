"""Scores of tools from their runs, with 95 % intervals: of Wilson for shares, by bootstrap for
medians.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.detectors.protocol import Named, Run
from benchmarks.measure import median_interval, share_interval
from benchmarks.planted_truth import Fault

WARM_UP_STEPS = 3
LEAST_SAMPLES = 6
"""Of fewer samples, not even the smallest and the largest enclose the median in 95 % of draws."""
# For each planted phase, the named phases that count as right. A compute fault slows both forward
# and backward.
RIGHT_PHASES = {
    "compute": ("compute", "forward", "backward"),
    "device": ("compute", "forward", "backward", "optimizer"),
}
TITLES = {
    "rank": "right rank",
    "phase": "right phase",
    "start": "start, steps off",
    "cost": "cost, relative error",
    "false_clean": "a name in a clean run",
    "false_faulty": "a healthy rank named next to a fault",
    "watching": "step time, watched / unwatched",
}
"""The figures of a tool, with their titles in the table."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """A share or a median with its 95 % interval."""

    value: float
    interval: tuple[float, float] | None
    """None for a median of too few samples."""
    samples: int
    hits: int | None = None
    """Hits of a share; None for a median."""

    @classmethod
    def share(cls, hits: Sequence[bool]) -> Figure | None:
        """None without samples."""
        if not hits:
            return None
        value, *interval = share_interval(sum(hits), len(hits))
        return cls(value, (interval[0], interval[1]), len(hits), sum(hits))

    @classmethod
    def median(cls, values: Sequence[float]) -> Figure | None:
        """None without samples."""
        if not values:
            return None
        value, *interval = median_interval(values)
        known = len(values) >= LEAST_SAMPLES
        return cls(value, (interval[0], interval[1]) if known else None, len(values))

    def overlaps(self, other: Figure) -> bool | None:
        """Return True if the intervals overlap, or None if an interval is not known."""
        if self.interval is None or other.interval is None:
            return None
        return self.interval[0] <= other.interval[1] and other.interval[0] <= self.interval[1]


Scores = dict[str, Figure | None]


def has_right_phase(fault: Fault, phase: str | None) -> bool:
    """Return True if this phase is a right name for the fault's."""
    return phase in RIGHT_PHASES.get(fault.phase, (fault.phase,))


def step_seconds(run: Run) -> list[float]:
    """Return the duration of each step: the median of the ranks."""
    return [statistics.median(each) for each in zip(*run.seconds, strict=True)]


def measured_cost_s(run: Run) -> float | None:
    """Return what the last fault costs per step from its start on, by the clock of the loop.

    This is the difference between the medians of slow and healthy steps of this run, times the share
    of slow steps. None if slow steps are no longer than healthy ones.
    """
    seconds, faults = step_seconds(run), run.truth.faults
    steps = range(WARM_UP_STEPS, len(seconds))
    slow = [seconds[step] for step in steps if faults[-1].slows(step)]
    healthy = [seconds[step] for step in steps if not any(one.slows(step) for one in faults)]
    more_s = statistics.median(slow) - statistics.median(healthy)
    share = len(slow) / (len(seconds) - faults[-1].first_step)
    return share * more_s if more_s > 0 else None


def score(runs: Sequence[Run], control: Mapping[str, Run]) -> Scores:
    """Return the figures of one tool.

    The first named rank is the answer. If the fault moved, its last rank is the right one. Start
    and cost are scored only in runs with the right rank. `control` has the unwatched runs of the
    same faults, by name.
    """
    right_rank, right_phase, starts, costs = [], [], [], []
    false: dict[bool, list[bool]] = {True: [], False: []}
    ratios = []
    for run in runs:
        truth, faults = run.truth, run.truth.faults
        healthy = {each.rank for each in run.named} - {fault.rank for fault in faults}
        false[bool(faults)].append(bool(healthy))
        if truth.name in control:
            ours, plain = step_seconds(run), step_seconds(control[truth.name])
            ratios.append(statistics.median(ours) / statistics.median(plain))
        if not faults:
            continue
        answer = run.named[0] if run.named else Named(-1)
        right_rank.append(answer.rank == faults[-1].rank)
        right_phase.append(right_rank[-1] and has_right_phase(faults[-1], answer.phase))
        if not right_rank[-1]:
            continue
        if answer.since_step is not None:
            starts.append(float(abs(answer.since_step - faults[-1].first_step)))
        cost_s = measured_cost_s(run)
        if answer.cost_s is not None and cost_s is not None:
            costs.append(abs(answer.cost_s - cost_s) / cost_s)
    return {
        "rank": Figure.share(right_rank),
        "phase": Figure.share(right_phase),
        "start": Figure.median(starts),
        "cost": Figure.median(costs),
        "false_clean": Figure.share(false[False]),
        "false_faulty": Figure.share(false[True]),
        "watching": Figure.median(ratios),
    }


def cell(name: str, figure: Figure | None) -> str:
    """Return a figure as a cell. A figure that the tool does not have is a dash."""
    if figure is None:
        return "-"
    percent = figure.hits is not None or name == "cost"
    number = ".0%" if percent else ".0f" if name == "start" else ".2f"
    value = f"{figure.value:{number}}" if figure.hits is None else f"{figure.hits}/{figure.samples}"
    if figure.interval is None:
        return f"{value} (samples: {figure.samples})"
    return f"{value} ({figure.interval[0]:{number}} to {figure.interval[1]:{number}})"


def differences(one: Mapping[str, Scores], other: Mapping[str, Scores]) -> Iterable[str]:
    """Yield a line for each figure whose intervals in two campaigns do not overlap."""
    for tool, scores in one.items():
        for name, figure in scores.items():
            again = other.get(tool, {}).get(name)
            if figure and again and figure.overlaps(again) is False:
                yield f"{tool}: {TITLES[name]}: {cell(name, figure)}, then {cell(name, again)}"
