"""Rates, floating-point operations and utilization of a job, its ranks and its modules. Pure.

Model FLOPs are those of the forward and backward pass. Hardware FLOPs add recomputation and the
optimizer's products. Utilization is the time that the operations would take at the device's dense
peak, each in the precision that it ran in, divided by the time of a step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from torchlens_perf.analysis.statistics.operators import OperatorStatistics
from torchlens_perf.diagnosis.device_peaks import find_device_peak
from torchlens_perf.run.grouping import group_values
from torchlens_perf.run.operators import Pass, Work
from torchlens_perf.run.rank_ranges import parse_ranges
from torchlens_perf.verdicts.latest_attempt import latest_processes
from torchlens_perf.verdicts.node_state import NodeState, ProcessState
from torchlens_perf.verdicts.words.report import Module
from torchlens_perf.verdicts.words.report_utilization import (
    ModuleUtilization,
    RankUtilization,
    UncountedOperator,
    Utilization,
)

CONVENTION = (
    "Attention is counted in full, as in PaLM: 12 x layers x hidden size x sequence length per"
    " token, also where it is causal."
)
_MAX_MODULES = 12
_MAX_UNCOUNTED = 8
_NEGLIGIBLE = 0.01
"""Share of FLOPs whose precision may have no known peak."""
_MODEL_PARALLEL = re.compile(r"(^|[^a-z])(tp|pp|cp|sp|tensor|pipeline|context)([^a-z]|$)")
_ATTENTION = (Work.ATTENTION, Work.CAUSAL_ATTENTION)


class _Peak(NamedTuple):
    """Peak rates of one rank."""

    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    source: str

    def seconds(self, flops: Mapping[str, float]) -> float | None:
        """Return the time of operations at the peak; None if the peak of a precision is unknown."""
        total = sum(flops.values())
        unknown = sum(count for name, count in flops.items() if name not in self.flops_per_s)
        if not total or unknown > _NEGLIGIBLE * total:
            return None
        known = sum(
            count / self.flops_per_s[name]
            for name, count in flops.items()
            if name in self.flops_per_s
        )
        return known * total / (total - unknown)


class _RankWork(NamedTuple):
    """Operations of one rank in a mean step, by precision."""

    model: Counter[str]
    hardware: Counter[str]
    attention: float
    causal: float
    step_s: float
    peak: _Peak | None


class StepFlops(NamedTuple):
    """Operations of a mean step of one rank, for exporters."""

    model: float
    at_peak_s: float | None
    """Time of these operations at the devices' peak; None if the peak is not known."""


def measure_step_flops(process: ProcessState) -> StepFlops | None:
    """Return the model's operations in a mean step so far; None before a step was counted."""
    work = (
        _measure_work(process, _find_peak(process)) if process.statistics.operators.steps else None
    )
    if work is None:
        return None
    return StepFlops(work.model.total(), work.peak and work.peak.seconds(work.model))


def build_utilization(nodes: list[NodeState], modules: list[Module]) -> Utilization:
    """Return rates and utilization. Values that are not measured are None.

    modules: the rows of the report.
    """
    processes = latest_processes(nodes)
    peaks = {rank: _find_peak(process) for rank, process in processes.items()}
    work = {
        rank: found
        for rank, process in processes.items()
        if (found := _measure_work(process, peaks[rank])) is not None
    }
    counted = [processes[rank].statistics.operators for rank in sorted(work)]
    step_s = max((_step_s(each) or 0.0 for each in processes.values()), default=0.0) or None
    complete = len(work) == len(processes) and bool(work)
    whole = _merge(work.values(), step_s or 0.0) if complete else None
    mfu = whole and _utilization(work, whole.step_s, lambda each: each.model)
    sources = sorted({peak.source for peak in peaks.values() if peak is not None})
    return Utilization(
        not_measured=None if complete else _why_not_counted(processes, work),
        convention=CONVENTION,
        counted_steps=min((each.steps for each in counted), default=0),
        step_s=step_s,
        tokens_per_s=_tokens_per_s(processes, step_s),
        samples_per_s=_samples_per_s(processes, step_s),
        model_flops=whole and whole.model.total(),
        hardware_flops=whole and whole.hardware.total(),
        attention_flops=whole and whole.attention,
        causal_attention_flops=whole and whole.causal,
        precisions=_shares(whole.hardware) if whole else {},
        mfu=mfu,
        hfu=whole and _utilization(work, whole.step_s, lambda each: each.hardware),
        mfu_causal_half=mfu * (1 - 0.5 * whole.causal / whole.model.total()) if whole and mfu else None,
        peak_flops_per_s=_peak_rate(work, whole) if whole and mfu else None,
        peak_source="; ".join(sources) or None,
        counted_share=_counted_share(counted),
        uncounted=_uncounted_operators(counted),
        ranks=[_rank_row(rank, processes[rank], work.get(rank)) for rank in sorted(processes)],
        modules=_module_rows(processes, work, modules),
    )  # fmt: skip


def _step_s(process: ProcessState) -> float | None:
    """Return the mean duration of the steps after the warm-up."""
    steps = process.statistics.step
    return steps.sum_ns / steps.count / 1e9 if steps.count else None


def _measure_work(process: ProcessState, peak: _Peak | None) -> _RankWork | None:
    operators, step_s = process.statistics.operators, _step_s(process)
    if not operators.counted or not operators.per_step or not step_s:
        return None
    model: Counter[str] = Counter()
    hardware: Counter[str] = Counter()
    attention = causal = 0.0
    for each in operators.iter_sums():
        flops = each.flops * operators.per_step
        hardware[each.key.precision] += flops  # type: ignore[assignment]
        if each.key.in_pass in (Pass.FORWARD, Pass.BACKWARD):
            model[each.key.precision] += flops  # type: ignore[assignment]
            attention += flops * (each.key.work in _ATTENTION)
            causal += flops * (each.key.work == Work.CAUSAL_ATTENTION)
    return _RankWork(model, hardware, attention, causal, step_s, peak)


def _merge(work: Iterable[_RankWork], step_s: float) -> _RankWork:
    each = list(work)
    return _RankWork(
        sum((one.model for one in each), Counter()),
        sum((one.hardware for one in each), Counter()),
        sum(one.attention for one in each),
        sum(one.causal for one in each),
        step_s,
        None,
    )


def _find_peak(process: ProcessState) -> _Peak | None:
    """Return the peak of a rank's devices. None for CPUs and for devices that are not listed."""
    names = {gpu["name"] for gpu in process.facts.gpus}
    if process.facts.compute_device == "cpu" or len(names) != 1:
        return None
    found = find_device_peak(names.pop())
    if found is None:
        return None
    devices = len(process.facts.gpus)
    rates = {precision: devices * rate for precision, rate in found.flops_per_s.items()}
    return _Peak(rates, devices * found.bytes_per_s, f"{found.name}, dense ({found.source})")


def _utilization(
    work: Mapping[int, _RankWork], step_s: float, flops: Callable[[_RankWork], Counter[str]]
) -> float | None:
    """Return the mean share of a step that the ranks would need at their peaks."""
    seconds = [each.peak and each.peak.seconds(flops(each)) for each in work.values()]
    known = [each for each in seconds if each is not None]
    return sum(known) / len(known) / step_s if len(known) == len(seconds) else None


def _peak_rate(work: Mapping[int, _RankWork], whole: _RankWork) -> float | None:
    """Return the peak of the job, as a mean over its precisions that is weighted by FLOPs."""
    seconds = _utilization(work, 1.0, lambda each: each.model)
    return whole.model.total() / seconds if seconds else None


def _shares(flops: Counter[str]) -> dict[str, float]:
    total = flops.total()
    return {name: count / total for name, count in flops.most_common()} if total else {}


def _rank_row(rank: int, process: ProcessState, work: _RankWork | None) -> RankUtilization:
    operators, step_s = process.statistics.operators, _step_s(process)
    each = {rank: work} if work else {}
    workload = operators.mean_workload if operators.has_tokens else None
    return RankUtilization(
        rank=rank,
        tokens_per_s=workload / step_s if workload is not None and step_s else None,
        model_flops=work and work.model.total(),
        hardware_flops=work and work.hardware.total(),
        mfu=work and _utilization(each, work.step_s, lambda one: one.model),
        hfu=work and _utilization(each, work.step_s, lambda one: one.hardware),
        counted_share=_counted_share([operators]) if work else None,
        not_measured=None if work else _why_not_counted({rank: process}, {}),
    )


def _why_not_counted(
    processes: Mapping[int, ProcessState], work: Mapping[int, _RankWork]
) -> str | None:
    missing = [process for rank, process in processes.items() if rank not in work]
    if not missing:
        return "no rank was recorded"
    reasons = [each.facts.operators_missing for each in missing if each.facts.operators_missing]
    if reasons:
        return reasons[0]
    if any(each.statistics.operators.steps for each in missing):
        return (
            "no operator with a formula was seen: CUDA graphs and kernels outside of torch's"
            " dispatcher are not visible"
        )
    return "no step was counted: the first is step backward_every / 2, after the warm-up"


# -- rates


def _tokens_per_s(processes: Mapping[int, ProcessState], step_s: float | None) -> float | None:
    operators = [each.statistics.operators for each in processes.values()]
    if not any(each.has_tokens for each in operators):
        return None
    return _sum_over_replicas(processes, lambda each: each.mean_workload, step_s)


def _samples_per_s(processes: Mapping[int, ProcessState], step_s: float | None) -> float | None:
    return _sum_over_replicas(
        processes,
        lambda each: each.samples / each.steps_with_samples if each.steps_with_samples else None,
        step_s,
    )


def _sum_over_replicas(
    processes: Mapping[int, ProcessState],
    value: Callable[[OperatorStatistics], float | None],
    step_s: float | None,
) -> float | None:
    """Return a rate of the job. Ranks that share one replica of the model load the same batch."""
    replica = {rank: rank for rank in processes}
    for process in processes.values():
        for group in process.facts.groups.values():
            if _MODEL_PARALLEL.search(group["description"].lower()):
                together = {
                    replica[rank] for rank in parse_ranges(group["ranks"]) if rank in replica
                }
                for rank, its in replica.items():
                    if its in together:
                        replica[rank] = min(together)
    found: dict[int, float] = {}
    for rank, process in processes.items():
        here = value(process.statistics.operators)
        if here is not None:
            found[replica[rank]] = max(found.get(replica[rank], 0.0), here)
    return sum(found.values()) / step_s if found and step_s else None


# -- coverage


def _counted_share(counted: list[OperatorStatistics]) -> float | None:
    """Return the share of the operators' host time in operators with a formula."""
    total = sum(each.duration_ns for each in counted)
    others = sum(ns for each in counted for _, ns in each.others.values())
    return max(0.0, 1 - others / total) if total else None


def _uncounted_operators(counted: list[OperatorStatistics]) -> list[UncountedOperator]:
    """Return operators without a formula by host time, largest first."""
    calls: Counter[str] = Counter()
    took_ns: Counter[str] = Counter()
    for each in counted:
        for name, (its_calls, ns) in each.others.items():
            calls[name] += its_calls
            took_ns[name] += ns
    steps, total_ns = sum(each.steps for each in counted), sum(each.duration_ns for each in counted)
    return [
        UncountedOperator(name, calls[name] / steps, ns / total_ns)
        for name, ns in took_ns.most_common(_MAX_UNCOUNTED)
        if steps and total_ns
    ]


# -- modules


def _module_rows(
    processes: Mapping[int, ProcessState], work: Mapping[int, _RankWork], modules: list[Module]
) -> list[ModuleUtilization]:
    """Return the modules with the most FLOPs of the first counted rank, with their roofline.

    The attained rate is that of the forward pass: its FLOPs over the module's own device time. It
    is None if the time is unknown, as on CPUs, or if the rate exceeds the limit.
    """
    if not work:
        return []
    rank = min(work)
    operators, peak = processes[rank].statistics.operators, work[rank].peak
    by_module = group_values((each.module, each) for each in operators.iter_sums())
    times = {each["name"]: each for each in modules}
    total = sum(each.flops for each in operators.iter_sums()) or 1
    rows: list[ModuleUtilization] = []
    for name, sums in by_module.items():
        forward = [each for each in sums if each.key.in_pass == Pass.FORWARD]
        flops, moved = sum(each.flops for each in forward), sum(each.bytes for each in forward)
        found = times.get(name)
        own_s = found and found["device_own_by_rank"].get(str(rank))
        by_precision = Counter({each.key.precision: 0 for each in forward})
        for each in forward:
            by_precision[each.key.precision] += each.flops
        least_s = peak.seconds(by_precision) if peak else None
        rate = flops * operators.per_step / own_s if own_s else None
        memory_s = moved / peak.bytes_per_s if peak else None
        bound = None
        if least_s is not None and memory_s is not None:
            bound = "memory" if memory_s > least_s else "compute"
        limit = flops / max(least_s, memory_s) if least_s and memory_s else None
        if rate and limit and rate > limit:
            rate = None  # The FLOPs or the time are wrong.
        rows.append(
            ModuleUtilization(
                name=name,
                flops=sum(each.flops for each in sums) * operators.per_step,
                share=sum(each.flops for each in sums) / total,
                flops_per_byte=flops / moved if moved else None,
                forward_flops_per_s=rate,
                roofline_flops_per_s=limit,
                bound=bound,
                roofline_share=rate / limit if rate and limit else None,
            )
        )
    return sorted(rows, key=lambda row: -row.flops)[:_MAX_MODULES]
