"""Device times in the report: rows of the JSON, and notes on missing times."""

from __future__ import annotations

from torchlens_perf.analysis.statistics.step_mix import classify_steps, sum_time
from torchlens_perf.diagnosis.facts.distribution import summarize_sketch
from torchlens_perf.run.sketch import merge_sketches
from torchlens_perf.verdicts.node_state import ProcessState
from torchlens_perf.verdicts.words.report import DeviceSection, DeviceTimes

# Reasons for missing device marks, by the names of the counters in cuda/device_times.py.
_NOT_TIMED = {
    "captured": (
        "device marks were left out while a CUDA graph was captured. Phases of graph replays are"
        " not timed"
    ),
    "skipped": (
        "device marks were left out, because the device was too far behind or failed, or its clock"
        " could not be anchored"
    ),
    "crowded": (
        "device marks were left out, because too many earlier marks were unread: the steps contain"
        " many waits, and the device is several steps behind the host"
    ),
    "aside": (
        "steps are not judged by device time, because their forward or backward pass ran and waited"
        " on another stream than the step's own"
    ),
    "open_ended": (
        "device stalls are unknown: their marking was interrupted, for example by an exception, or"
        " the backward pass (for example a compiled one) did not report its end"
    ),
    "unread": "device times were still unknown when the watch ended",
}


def build_device_times(process: ProcessState) -> DeviceTimes | None:
    """Return a rank's times by the device's clock; None if no step was timed.

    `parts` describe a typical step.
    """
    device = process.statistics.device
    if not device.timed_steps:
        return None
    error_ns, mix = process.facts.device.get("error_ns"), process.statistics.device_mix
    typical, seen = classify_steps([mix]).typical, sum_time(mix.bins.values())
    return {
        "clock": process.facts.device.get("clock"),
        "error_s": None if error_ns is None else error_ns / 1e9,
        "steps": device.timed_steps,
        "step_s": summarize_sketch(device.phases["step"]),
        "phases": {
            phase: {
                "p50_s": sketch.quantile_ns(0.5) / 1e9,
                "s_per_step": sketch.mean_without_outliers_ns()
                / 1e9
                * sketch.count
                / device.timed_steps,
            }
            for phase, sketch in device.phases.items()
            if phase != "step"
        },
        "work_s": summarize_sketch(device.work) if device.judged.count else None,
        "parts": (
            {}
            if typical is None
            else {
                part: float(part_ns) / 1e9
                for part, part_ns in typical.account.parts_ns.items()
                if seen.sum_ns([part]) > 0
            }
        ),
        "behind_s": summarize_sketch(device.behind),
        "caught_up": device.caught_up_share,
        "captured": process.facts.device.get("captured", 0),
    }


def device_section_rows(processes: dict[int, ProcessState]) -> list[DeviceSection]:
    """Return a row for each device section, longest total time first.

    `by_rank` has the mean seconds of one call on each known rank. `over_all_ranks` has the last
    window of all ranks if their times were merged on the device.
    """
    rows: list[DeviceSection] = []
    for name in dict.fromkeys(
        name for process in processes.values() for name in process.statistics.device.stamped
    ):
        stamped = {rank: process.statistics.device.stamped for rank, process in processes.items()}
        calls = {rank: sketches[name] for rank, sketches in stamped.items() if name in sketches}
        whole = merge_sketches(calls.values())
        over_all = next(
            (
                p.statistics.device.merged[name]
                for p in processes.values()
                if name in p.statistics.device.merged
            ),
            None,
        )
        rows.append(
            {
                "name": name,
                "calls": whole.count,
                "device_s": summarize_sketch(whole),
                "by_rank": {str(rank): sketch.mean_ns() / 1e9 for rank, sketch in calls.items()},
                "over_all_ranks": over_all,
            }
        )
    return sorted(rows, key=lambda row: -row["calls"] * (row["device_s"]["mean_s"] or 0.0))


def count_missing_device_times(process: ProcessState) -> list[tuple[object, str]]:
    """Return counts of a rank's missing device times, each with its reason."""
    device = process.statistics.device
    return [
        (device.stamped_lost, "times of device sections were overwritten"),
        (
            device.stray_records,
            "records of device sections belong to incomplete windows and were dropped",
        ),
        *((process.facts.device.get(field, 0), reason) for field, reason in _NOT_TIMED.items()),
    ]
