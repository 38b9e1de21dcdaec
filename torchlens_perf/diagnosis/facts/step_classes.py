"""Classes of steps, and the typical step of each rank (see statistics/step_mix.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS, RankStatistics
from torchlens_perf.analysis.statistics.step_mix import StepClass, classify_steps, sum_time
from torchlens_perf.analysis.statistics.time_account import CELLS, CPU
from torchlens_perf.diagnosis.facts.waited_for import MAX_STEPS, AwaitedRankFinder
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.verdicts.long_steps import LongSteps, join_long_steps
from torchlens_perf.verdicts.node_state import ProcessState
from torchlens_perf.verdicts.stragglers.findings import Findings
from torchlens_perf.verdicts.words.report import (
    OwnStepTime,
    Phase,
    StepAccount,
    StepClasses,
    TypicalStep,
)


def build_step_classes(processes: Sequence[ProcessState], *, by_device: bool) -> StepClasses:
    """Return the classes of all ranks' steps. by_device: use the devices' clocks.

    Counts and times are means over the ranks.
    """
    mixes = {
        each.identity.rank: each.statistics.device_mix if by_device else each.statistics.mix
        for each in processes
    }
    found = classify_steps(list(mixes.values()))
    waits = AwaitedRankFinder(mixes)
    warm_up = [min(WARM_UP_STEPS, each.statistics.counted_steps) for each in processes]

    def find_blamed_rank(each: StepClass) -> int | None:
        if each.is_awaited:
            return list(mixes)[each.doing[0]]
        if each.kinds or each.more_ns <= 0:
            return None
        return waits.find_awaited_rank(each.steps[-MAX_STEPS:], each.more_ns)

    def build_rows(classes: Iterable[StepClass]) -> list[LongSteps]:
        return [
            {
                "kinds": list(each.kinds),
                "ranks": [list(mixes)[mix] for mix in each.doing],
                "waited_for": (rank := find_blamed_rank(each)),
                "part": each.part
                if rank is None or each.is_awaited
                else waits.find_part(each.steps[-MAX_STEPS:], rank),
                "count": each.count,
                "steps": list(each.steps),
                "period": each.period,
                "mean_s": each.duration_ns / 1e9,
                "more_s": each.more_ns / 1e9,
                "total_s": each.total_ns / 1e9,
                "share": each.total_ns / found.total_ns,
            }
            for each in classes
        ]

    whole_s = found.total_ns / 1e9
    long = [_with_loss_of_job(each, whole_s) for each in _join_stalls(build_rows(found.long))]
    short = build_rows(found.short)
    alike = max(0, found.count - sum(each["count"] for each in (*long, *short)))
    return {
        "total_s": whole_s,
        "warm_up": max(warm_up, default=0),
        "alike": alike,
        "alike_mean_s": found.alike_mean_ns / 1e9 if alike else None,
        "long": long,
        "short": short,
    }


def _join_stalls(rows: list[LongSteps]) -> list[LongSteps]:
    """Join rows on the same stall, which has one row for the stalled rank and one for waiting
    ranks.

    Return the costliest row first.
    """
    found: list[LongSteps] = []
    for row in rows:
        place = next(
            (place for place, other in enumerate(found) if _are_same_stalls(row, other)), None
        )
        if place is None:
            found.append(row)
            continue
        other = found[place]
        both = join_long_steps([other, row])
        if max(len(row["steps"]), len(other["steps"])) <= MAX_STEPS:
            both["count"] = len(both["steps"])
        found[place] = {**both, "period": other["period"] or row["period"]}
    return sorted(found, key=lambda row: -row["total_s"])


def _with_loss_of_job(row: LongSteps, whole_s: float) -> LongSteps:
    """Return the row with the time that the whole job lost, since all ranks wait for a stalled
    rank.
    """
    if row["waited_for"] is None or row["kinds"]:
        return row
    total_s = max(row["total_s"], row["count"] * row["more_s"])
    return {**row, "total_s": total_s, "share": min(1.0, total_s / whole_s)}


def _are_same_stalls(row: LongSteps, other: LongSteps) -> bool:
    """Return True if both rows describe stalls of one rank in the same steps.

    Rows list only their newest steps.
    """
    if (
        row["waited_for"] is None
        or row["waited_for"] != other["waited_for"]
        or row["kinds"]
        or other["kinds"]
    ):
        return False
    steps, others = set(row["steps"]), set(other["steps"])
    return 2 * len(steps & others) > min(len(steps), len(others))


def build_typical_step(statistics: RankStatistics) -> TypicalStep | None:
    """Return a rank's typical step in seconds, and the CPU contention in each part.

    The parts add up to the step.

    Return None until there is a step after the warm-up.
    """
    typical = classify_steps([statistics.mix]).typical
    if typical is None:
        return None
    account = typical.account
    parts_s = {part: float(part_ns) / 1e9 for part, part_ns in account.parts_ns.items()}
    own_s = sum(parts_s[part] for part in OWN_PARTS)
    lack_s = None
    if account.is_measured:
        lack_s = {part: float(account.sum_ns([part], [CPU])) / 1e9 for part in OWN_PARTS}
    return {
        "s": typical.duration_ns / 1e9,
        "own_s": own_s,
        "work_s": None if lack_s is None else own_s - sum(lack_s.values()),
        "parts": {part: s for part, s in parts_s.items() if statistics.parts[part].max_ns > 0},
        "lack_of_cpu": lack_s,
    }


def build_step_account(statistics: RankStatistics) -> StepAccount | None:
    """Return the account of a rank's recorded steps after the warm-up; None without steps."""
    bins = list(statistics.mix.bins.values())
    if not bins or statistics.first_step is None or statistics.last_step is None:
        return None
    account = sum_time(bins)
    cells_ns: dict[str, dict[str, int]] = {}
    for (part, state), cell_ns in zip(CELLS, account.cells_ns.tolist(), strict=True):
        if cell_ns:
            cells_ns.setdefault(part, {})[state] = int(cell_ns)
    return {
        "first_step": statistics.first_step + WARM_UP_STEPS,
        "last_step": statistics.last_step,
        "steps": sum(each.count for each in bins),
        "wall_ns": int(account.wall_ns),
        "cells_ns": cells_ns,
        "cpu_measured_steps": sum(each.measured for each in bins),
    }


def largest_own_step_time(findings: Findings) -> OwnStepTime | None:
    """Return the largest own time of all populations; None if it is not known."""
    own = max(
        (each.own for each in findings.usual if each.own),
        key=lambda own: sum(own.parts_ns),
        default=None,
    )
    if own is None:
        return None
    parts = {part: part_ns / 1e9 for part, part_ns in zip(OWN_PARTS, own.parts_ns, strict=True)}
    return {
        "parts": parts,
        "hidden_share": own.hidden_share,
        "is_hidden": own.is_hidden,
    }


def other_thread_times(statistics: RankStatistics) -> dict[str, float]:
    """Return the seconds per step of phases that ran on threads other than the recorded one."""
    steps = max(1, statistics.step.count)
    return {
        phase: total_ns / 1e9 / steps for phase, total_ns in statistics.other_threads_ns.items()
    }


def build_phases(statistics: RankStatistics, typical: TypicalStep) -> dict[str, Phase]:
    """Return each part of a step: its time in the typical step, and median and mean of all
    steps.
    """
    return {
        part: {
            "typical_s": typical_s,
            "share": typical_s / typical["s"],
            "p50_s": statistics.parts[part].quantile_ns(0.5) / 1e9,
            "mean_s": statistics.parts[part].mean_ns() / 1e9,
        }
        for part, typical_s in typical["parts"].items()
    }


def sampled_cpu_contention_share(processes: Iterable[ProcessState]) -> float | None:
    """Return the share of time in which the ranks' main threads were runnable but not scheduled.

    The sidecar samples this state once a second. Return None without samples.
    """
    sums = [process.cpu_wait for process in processes if process.cpu_wait[1]]
    return sum(waited / samples for waited, samples in sums) / len(sums) if sums else None
