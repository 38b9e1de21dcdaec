"""What the report says of device times: of each rank, of device sections, and of what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchlens_perf.node_state import ProcessState
from torchlens_perf.report.distribution import distribution
from torchlens_perf.sketch import Sketch

# Why marks on the device are missing, by the counters of hooks/device.py.
_NOT_TIMED = {
    "captured": "marks on the device were left out while a CUDA graph was captured; a replayed graph has no phases",
    "skipped": "marks on the device were left out, as it was too far behind or its clock could not be anchored",
    "unread": "device times were not known when the watch ended",
}


def device_times(process: ProcessState) -> dict[str, Any] | None:
    """What the device's clock tells: device time a step of each phase; None where it tells nothing."""
    device = process.statistics.device
    if not device.steps:
        return None
    return {
        "clock": process.device.get("clock"),
        "error_s": process.device["error_ns"] / 1e9 if process.device.get("error_ns") is not None else None,
        "steps": device.steps,
        "step_s": distribution(device.phases["step"]),
        "phases": {
            phase: {"p50_s": sketch.quantile_ns(0.5) / 1e9, "s_per_step": sketch.sum_ns / 1e9 / device.steps}
            for phase, sketch in device.phases.items()
            if phase != "step"
        },
        "behind_s": distribution(device.behind),
        "caught_up": device.caught_up_share,
    }


def own_device_times(processes: dict[int, ProcessState], names: Sequence[str]) -> dict[str, float]:
    """By module, seconds of the device a typical step without those of the modules inside of it; the mean over the
    ranks. Only of modules that the device has timed.

    What it times is a whole call, in sampled steps: the calls are those of all usual steps.
    """
    found: dict[str, list[float]] = {}
    for process in processes.values():
        statistics = process.statistics
        if not statistics.usual_steps:
            continue
        whole_s = {
            name: sketch.mean_ns() / 1e9 * statistics.modules[name].count / statistics.usual_steps
            for name, sketch in statistics.device.modules.items()
            if sketch.count and name in statistics.modules
        }
        for name, seconds in whole_s.items():
            inside = [other for other in whole_s if other.startswith(f"{name}.")]
            nearest = [each for each in inside if not any(each.startswith(f"{other}.") for other in inside)]
            found.setdefault(name, []).append(max(0.0, seconds - sum(whole_s[each] for each in nearest)))
    return {name: sum(found[name]) / len(found[name]) for name in names if name in found}


def device_sections(processes: dict[int, ProcessState]) -> list[dict[str, Any]]:
    """Device sections by their time, most first; by_rank: mean seconds of one, of the ranks whose records are here;
    over_all_ranks: the last window of all ranks, where they were merged on the device."""
    rows = []
    for name in dict.fromkeys(name for process in processes.values() for name in process.statistics.device.stamped):
        merged, by_rank = Sketch(), {}
        for rank, process in processes.items():
            sketch = process.statistics.device.stamped.get(name)
            if sketch is not None:
                merged.merge(sketch)
                by_rank[str(rank)] = sketch.mean_ns() / 1e9
        over_all = next(
            (p.statistics.device.merged[name] for p in processes.values() if name in p.statistics.device.merged), None
        )
        rows.append(
            {
                "name": name,
                "calls": merged.count,
                "device_s": distribution(merged),
                "by_rank": by_rank,
                "over_all_ranks": over_all,
            }
        )
    return sorted(rows, key=lambda row: -row["calls"] * row["device_s"]["mean_s"])


def device_notes(process: ProcessState) -> list[str]:
    """What of a rank's device times is missing, and why."""
    rank, statistics = process.identity.rank, process.statistics
    notes: list[str] = []
    if statistics.device.stamped_lost:
        notes.append(f"rank {rank}: {statistics.device.stamped_lost} times of device sections were overwritten")
    stray = statistics.device.stray_records
    if stray:
        notes.append(f"rank {rank}: windows of device sections were lost: {stray} records are of none that is whole")
    for field, reason in _NOT_TIMED.items():
        count = process.device.get(field, 0)
        if count:
            notes.append(f"rank {rank}: {count} {reason}")
    return notes
