"""Steps of all ranks in the report."""

from __future__ import annotations

from collections import Counter

from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.diagnosis.facts.distribution import summarize_sketch
from torchlens_perf.diagnosis.facts.step_classes import (
    build_step_classes,
    largest_own_step_time,
    sampled_cpu_contention_share,
)
from torchlens_perf.run.ring import Flag
from torchlens_perf.run.sketch import merge_sketches
from torchlens_perf.verdicts.node_state import ProcessState
from torchlens_perf.verdicts.stragglers.findings import Findings
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE, HOST
from torchlens_perf.verdicts.verdict import RunLength
from torchlens_perf.verdicts.words.report import Steps


def build_steps(processes: dict[int, ProcessState], findings: Findings) -> Steps:
    """Return step times without the first WARM_UP_STEPS of each rank.

    They are by the clock that the ranks are judged by. If the host runs ahead of the device, host
    step times mislead: most steps last as long as issuing their kernels, and a step that
    synchronizes, for example to print a loss, includes the device time of all steps before it.
    """
    warm_up = merge_sketches(process.statistics.warm_up for process in processes.values())
    by_device = bool(processes) and all(
        process.judged_by == DEVICE for process in processes.values()
    )
    of_each = [
        each.statistics.device.judged if by_device else each.statistics.step
        for each in processes.values()
    ]
    return {
        "count": max(
            (process.statistics.counted_steps for process in processes.values()), default=0
        ),
        "by": DEVICE if by_device else HOST,
        **summarize_sketch(merge_sketches(of_each)),
        "warm_up_max_s": warm_up.max_ns / 1e9 if warm_up.count else None,
        "warm_up_parts": _warm_up_parts(processes),
        "made": max(map(count_made_steps, processes.values()), default=0),
        "trend": None,
        "inference": any(_is_inference(p) for p in processes.values()),
        "micro_steps": max((p.statistics.micro_steps for p in processes.values()), default=0),
        **build_step_classes(list(processes.values()), by_device=by_device),
        "sampled_lack_of_cpu": sampled_cpu_contention_share(processes.values()),
        "own_time": largest_own_step_time(findings) if by_device else None,
        "host_gaps": _mean_host_gaps([each.statistics for each in processes.values()]),
    }


def measure_run(steps: Steps, processes: dict[int, ProcessState]) -> RunLength:
    """Return the length of a run."""
    last = (each.statistics.last_step for each in processes.values())
    return RunLength(
        steps["count"],
        steps["alike"],
        max((step for step in last if step is not None), default=None),
    )


def _mean_host_gaps(ranks: list[RankStatistics]) -> dict[str, float]:
    """Return the mean over the ranks of each gap between phases in a typical step, largest first."""
    found = Counter[str]()
    for each in ranks:
        for gap, gap_s in each.sums_of_typical_steps().gaps_s_per_step.items():
            found[gap] += gap_s / len(ranks)  # type: ignore[assignment]
    return dict(found.most_common())


def count_made_steps(process: ProcessState) -> int:
    """Return the number of steps that a rank made, including steps that were not recorded."""
    newest = process.statistics.last_step
    return max(process.made_steps, 0 if newest is None else newest + 1)


def _warm_up_parts(processes: dict[int, ProcessState]) -> dict[str, float]:
    """Return each measured part's share of all ranks' warm-up steps, the largest first."""
    parts_ns = Counter[str]()
    for process in processes.values():
        parts_ns.update(process.statistics.warm_up_parts_ns)
    total_ns = sum(process.statistics.warm_up.sum_ns for process in processes.values())
    return {part: part_ns / total_ns for part, part_ns in parts_ns.most_common() if part_ns > 0}


def _is_inference(process: ProcessState) -> bool:
    """Return True if most steps of the process are forward passes."""
    kinds = process.statistics.mix.bins_by_flags()
    counts = {flags: sum(each.count for each in bins) for flags, bins in kinds.items()}
    inference = sum(count for flags, count in counts.items() if flags & Flag.INFERENCE)
    if not counts:
        return bool(process.statistics.flags_seen & Flag.INFERENCE)
    return 2 * inference > sum(counts.values())
