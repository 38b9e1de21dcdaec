"""Modules and user sections in the report: rows of the JSON."""

from __future__ import annotations

from torchlens_perf.diagnosis.facts.distribution import summarize_sketch
from torchlens_perf.diagnosis.facts.module_times import (
    ModuleTime,
    count_device_samples,
    estimate_device_self_times,
)
from torchlens_perf.diagnosis.facts.step_classes import build_typical_step
from torchlens_perf.run.sketch import Sketch, merge_sketches
from torchlens_perf.verdicts.node_state import ProcessState
from torchlens_perf.verdicts.words.report import DeviceModuleTime, Module, Section


def module_rows(processes: dict[int, ProcessState]) -> list[Module]:
    """Return all timed modules by own time, largest first. Device time is preferred to forward
    time.

    `by_rank`: each rank's own time in a typical step. `backward_by_rank`: each rank's median
    backward time in the sampled steps, with the modules inside it. `device_own_by_rank`: each
    rank's own device time in a typical step, if there are enough samples.
    """
    rows: list[Module] = []
    own_s = {rank: _own_time_by_module(process) for rank, process in processes.items()}
    on_device = {rank: estimate_device_self_times(each) for rank, each in processes.items()}
    samples = [count_device_samples(each) for each in processes.values()]
    for name in _all_names(processes, "modules"):
        calls = _sketches_by_rank(processes, "modules", name)
        backwards = _sketches_by_rank(processes, "module_backwards", name)
        whole, backward = merge_sketches(calls.values()), merge_sketches(backwards.values())
        device = merge_sketches(
            process.statistics.device.modules.get(name, Sketch()) for process in processes.values()
        )
        by_rank = {str(rank): own_s[rank].get(name, 0.0) for rank in calls}
        times = {str(rank): own[name] for rank, own in on_device.items() if name in own}
        rows.append(
            {
                "name": name,
                "is_root": any(
                    name in process.facts.root_modules for process in processes.values()
                ),
                "has_untimed": any(
                    name in process.facts.unopened_modules for process in processes.values()
                ),
                "calls": whole.count,
                "calls_per_step": whole.count
                / max(1, sum(processes[rank].statistics.module_steps for rank in calls)),
                "own_s": summarize_sketch(whole),
                "own_s_per_step": sum(by_rank.values()) / len(by_rank),
                "by_rank": by_rank,
                "backward_s": summarize_sketch(backward) if backward.count else None,
                "backward_by_rank": {
                    str(rank): each.quantile_ns(0.5) / 1e9 for rank, each in backwards.items()
                },
                "device_s": summarize_sketch(device) if device.count else None,
                "device_own_by_rank": {rank: each.value for rank, each in times.items()},
                **_summarize_device_times(
                    list(times.values()), max((each.get(name, 0) for each in samples), default=0)
                ),
            }
        )
    return sorted(
        rows, key=lambda row: (-(row["device_own_s_per_step"] or 0.0), -row["own_s_per_step"])
    )


def _summarize_device_times(times: list[ModuleTime], samples: int) -> DeviceModuleTime:
    """Return the mean over the ranks. samples: what there is if it is not enough for a time."""
    if not times:
        return {
            "device_own_s_per_step": None, "device_own_low_s": None, "device_own_high_s": None,
            "device_samples": samples, "device_equal": "",
        }  # fmt: skip
    return {
        "device_own_s_per_step": sum(each.value for each in times) / len(times),
        "device_own_low_s": sum(each.low for each in times) / len(times),
        "device_own_high_s": sum(each.high for each in times) / len(times),
        "device_samples": min(each.samples for each in times),
        "device_equal": times[0].equal if len({each.equal for each in times}) == 1 else "",
    }


def _own_time_by_module(process: ProcessState) -> dict[str, float]:
    typical = build_typical_step(process.statistics)
    forward_s = typical["parts"].get("forward", 0.0) if typical is not None else 0.0
    alike = process.statistics.sums_of_typical_steps()
    if not alike.forward_ns:
        # No step of typical duration was timed.
        mean_ns = process.statistics.mean_module_times_ns()
        return {name: own_ns / 1e9 for name, own_ns in mean_ns.items()}
    return {name: sum_ns / alike.forward_ns * forward_s for name, sum_ns in alike.modules.items()}


def section_rows(processes: dict[int, ProcessState]) -> list[Section]:
    """Return all sections by time per typical step, then by total time, largest first."""
    rows: list[Section] = []
    alike = {
        rank: process.statistics.sums_of_typical_steps() for rank, process in processes.items()
    }
    whole_ns: dict[str, int] = {}
    for name in _all_names(processes, "sections"):
        calls = _sketches_by_rank(processes, "sections", name)
        whole = merge_sketches(calls.values())
        whole_ns[name] = whole.sum_ns
        device = merge_sketches(
            process.statistics.device.sections.get(name, Sketch()) for process in processes.values()
        )
        by_rank = {
            str(rank): alike[rank].sections.get(name, 0) / 1e9 / max(1, alike[rank].steps)
            for rank in calls
        }
        counted = [each.statistics for each in processes.values() if each.statistics.usual_steps]
        host_s = [each.median_section_host_ns(name) / 1e9 for each in counted]
        rows.append(
            {
                "name": name,
                "calls": whole.count,
                "total_s": summarize_sketch(whole),
                "s_per_step": sum(by_rank.values()) / len(by_rank),
                "by_rank": by_rank,
                "host_s_per_typical_step": sum(host_s) / len(host_s) if host_s else None,
                "device_s": summarize_sketch(device) if device.count else None,
            }
        )
    return sorted(rows, key=lambda row: (-row["s_per_step"], -whole_ns[row["name"]]))


def _sketches_by_rank(
    processes: dict[int, ProcessState], table: str, name: str
) -> dict[int, Sketch]:
    tables = {rank: getattr(process.statistics, table) for rank, process in processes.items()}
    return {rank: of_rank[name] for rank, of_rank in tables.items() if name in of_rank}


def _all_names(processes: dict[int, ProcessState], table: str) -> list[str]:
    return list(
        dict.fromkeys(
            name for each in processes.values() for name in getattr(each.statistics, table)
        )
    )
