"""The critical path of steps over all ranks, as classes of time that add up to the step. Pure.

Ranks of a synchronous job wait for each other. The critical rank of a step is the rank that waits
least: what it does is on the critical path, and its own wait is communication that no rank can
avoid. What the critical rank computes longer than the median rank is imbalance, not computing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.diagnosis.step_times import USES, StepTimes
from torchlens_perf.verdicts.words.device_pace import COMPUTE
from torchlens_perf.verdicts.words.host_code import divide_host_code
from torchlens_perf.verdicts.words.report import PathClass, mean_per_step

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.diagnosis.step_times import Floats
    from torchlens_perf.verdicts.verdict import Verdict
    from torchlens_perf.verdicts.words.report import Collective, StepFacts, Steps

SLOW_RANK, IMBALANCE, BUBBLE = "slow rank", "imbalance", "pipeline bubble"
OTHER_SECTIONS = "other sections"
_SECTION = "section"
_MAX_SECTIONS = 4
_COMPUTE = [USES.index(use) for use in COMPUTE]


def find_critical_path(times: StepTimes) -> dict[str, float]:
    """Return the critical path by use and imbalance in ns, as the mean over all rows."""
    critical, _ = times.critical
    path = times.uses_ns[times.critical]
    median = np.empty_like(path)
    populations = np.array(times.populations)
    for population in set(times.populations):
        here = populations[critical] == population
        median[here] = _lower_median(times.uses_ns[populations == population][:, here])
    more_ns = np.clip(path - median, 0, None)[:, _COMPUTE]
    excess_ns = np.clip((path - median)[:, _COMPUTE].sum(axis=1), 0, None)
    # The excess is taken from the uses that are longer than on the median rank.
    scale = np.divide(
        excess_ns, more_ns.sum(axis=1), out=np.zeros_like(excess_ns), where=excess_ns > 0
    )
    path[:, _COMPUTE] -= more_ns * scale[:, None]
    return {
        **dict(zip(USES, path.mean(axis=0).tolist(), strict=True)),
        IMBALANCE: float(excess_ns.mean()),
    }


@dataclasses.dataclass(frozen=True)
class SlowRanks:
    """Ranks whose repair together shortens a step by the cost of current verdicts."""

    ranks: tuple[int, ...]
    cost_s: float
    share: float
    phase: str
    since_step: int


def find_slow_ranks(verdicts: Sequence[Verdict]) -> Iterator[SlowRanks]:
    """Yield the slow ranks of current verdicts. Verdicts that share one cost are joined."""
    now = [row for row in verdicts if row.kind == "straggler" and not row.is_over]
    for rows in join_shared_costs(now):
        first = max(rows, key=lambda row: row.cost_s_per_step or 0.0)
        ranks = tuple(sorted(set().union(*map(_ranks_of_cost, rows))))
        since_step = max(row.since_step or 0 for row in rows)
        cost_s, share = first.cost_s_per_step or 0.0, first.cost_share or 0.0
        yield SlowRanks(ranks, cost_s, share, first.phase or "", since_step)


def find_own_costs(verdicts: Sequence[Verdict]) -> list[SlowRanks]:
    """Return single ranks of current verdicts that share a cost, with the gain of their repair."""
    return [
        SlowRanks(
            row.ranks,
            own_s,
            (row.cost_share or 0.0) * own_s / row.cost_s_per_step,
            row.phase or "",
            row.since_step or 0,
        )
        for row in verdicts
        if row.cost_s_per_step and (own_s := row.evidence.own_cost_s) is not None
    ]


def join_shared_costs(verdicts: Sequence[Verdict]) -> list[list[Verdict]]:
    """Return verdicts on slow ranks that have a cost, in groups that share it in some steps."""
    groups: list[list[Verdict]] = []
    for row in verdicts:
        if row.kind.startswith("straggler") and row.cost_s_per_step:
            sharing = (each for each in groups if any(_share_cost(row, other) for other in each))
            group = next(sharing, [])
            if not group:
                groups.append(group)
            group.append(row)
    return groups


def _share_cost(*both: Verdict) -> bool:
    ends = [row.held.until_step for row in both if row.held is not None and row.has_ended]
    begin = max(row.since_step or 0 for row in both)
    overlap = begin < min(filter(None, ends), default=math.inf)
    return overlap and bool(set.intersection(*map(_ranks_of_cost, both)))


def _ranks_of_cost(row: Verdict) -> set[int]:
    return {*row.ranks, *row.evidence.slow_too}


def begin_of_present(verdicts: Sequence[Verdict]) -> int:
    """Return the first step in which all ranks that are slow now were slow; 0 without any."""
    return max((each.since_step for each in find_slow_ranks(verdicts)), default=0)


def mean_step_s(times: StepTimes, steps: Steps) -> float:
    """Return a mean of these usual steps, with what irregular steps add per step of the run."""
    path_ns = times.account.select(times.critical).wall_ns
    return float(path_ns.mean()) / 1e9 + sum(_find_irregular(steps).values())


def classify_time(
    times: StepTimes, facts: StepFacts, verdicts: Sequence[Verdict]
) -> list[PathClass]:
    """Return the classes of time of a mean step, the largest first. They add up to the mean step.

    Longer steps of a known kind, such as evaluation, are classes of their own. Slow ranks that a
    current verdict names have the cost and the share of this verdict. The other classes divide the
    rest.
    """
    irregular = _find_irregular(facts["steps"])
    step_s = mean_step_s(times, facts["steps"])
    uses_s = {name: used_ns / 1e9 for name, used_ns in find_critical_path(times).items()}
    transfer_s = sum_transfers(facts, facts["collectives"]) if times.pipelined else None
    if transfer_s is not None:
        uses_s[BUBBLE] = max(0.0, uses_s["communication"] - transfer_s)
        uses_s["communication"] -= uses_s[BUBBLE]
    sections = divide_host_code(facts["sections"], uses_s["host"])
    uses_s["host"] -= sum(sections.values())
    uses_s |= {f"{_SECTION} {name}": seconds for name, seconds in sections.items()}
    kinds: dict[str, tuple[str, ...]] = {
        **{f"{_SECTION} {name}": (_SECTION,) for name in sections},
        **{" and ".join(each): each for each in irregular},
    }
    found: list[PathClass] = []
    for slow in find_slow_ranks(verdicts):
        taken_s = _take_time(uses_s, slow.phase, slow.cost_s)
        share = slow.share * taken_s / slow.cost_s
        found.append(PathClass(SLOW_RANK, taken_s, share, ranks=list(slow.ranks)))
    for row in verdicts:
        if row.kind == "imbalance" and not row.is_over:
            taken_s = _take_time(uses_s, row.phase or "", row.cost_s_per_step or 0.0)
            found.append(PathClass(IMBALANCE, taken_s, taken_s / step_s))
    others_s = uses_s | {" and ".join(each): seconds for each, seconds in irregular.items()}
    rest_s, rest_share = sum(others_s.values()), 1.0 - sum(each.share for each in found)
    found += [
        PathClass(name, seconds, seconds / rest_s * max(0.0, rest_share), kinds.get(name, ()))
        for name, seconds in others_s.items()
        if seconds > 0
    ]
    return sorted(
        (each for each in found if each.s_per_step > 0), key=lambda each: -each.s_per_step
    )


def _find_irregular(steps: Steps) -> dict[tuple[str, ...], float]:
    """Return what longer steps of known kinds add to a mean step of the run, by their kinds."""
    found: dict[tuple[str, ...], float] = {}
    for each in steps["long"]:
        if each["kinds"]:
            kinds = tuple(each["kinds"])
            found[kinds] = found.get(kinds, 0.0) + mean_per_step(each["total_s"], steps)
    return found


def join_classes(classes: Sequence[PathClass]) -> dict[str, float]:
    """Return seconds per step by a bounded number of names.

    Slow ranks are joined, steps of several kinds belong to the first kind, and all but the largest
    sections are OTHER_SECTIONS.
    """
    found: dict[str, float] = {}
    sections = 0
    for each in classes:
        name = next(iter(each.kinds), each.name)
        if name == _SECTION:
            sections += 1
            name = each.name if sections <= _MAX_SECTIONS else OTHER_SECTIONS
        found[name] = found.get(name, 0.0) + each.s_per_step
    return found


def sum_transfers(facts: StepFacts, rows: Sequence[Collective]) -> float | None:
    """Return the time per step and rank in which these collectives transfer data.

    Return None without collectives, or if the time of one was not measured.
    """
    total_s = 0.0
    for row in rows:
        mean_s = row["transfer_s"]["mean_s"]
        if mean_s is None:
            return None
        total_s += mean_s * row["count"]
    steps = max(1, facts["steps"]["count"]) * max(1, len(facts["ranks"]))
    return total_s / steps if rows else None


def _take_time(uses_s: dict[str, float], phase: str, seconds: float) -> float:
    """Subtract time from the uses of a phase, then from the others. Return what was there."""
    first = {"compute": [IMBALANCE, "forward", "backward"], "gap": ["host", "data"]}.get(
        phase, [IMBALANCE, phase] if phase in COMPUTE else [phase]
    )
    left = seconds
    for use in dict.fromkeys([*first, IMBALANCE, *uses_s]):
        taken = min(left, uses_s.get(use, 0.0))
        if taken:
            uses_s[use] -= taken
            left -= taken
    return seconds - left


def _lower_median(values: npt.NDArray[np.float64]) -> Floats:
    """Return the median over the first axis; of two values in the middle, the smaller one."""
    return np.quantile(values, 0.5, axis=0, method="lower")
