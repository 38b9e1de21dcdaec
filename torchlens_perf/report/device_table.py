"""Device times and device memory in the report: rows of the JSON, notes on what is missing, and a terminal's tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

from torchlens_perf.analysis.statistics.memory import MemoryStatistics
from torchlens_perf.analysis.statistics.quantities import amount, duration, duration_or_dash, percent, printable
from torchlens_perf.analysis.statistics.step_mix import classify
from torchlens_perf.report.distribution import distribution
from torchlens_perf.report.tables import Column, FittingTable, in_bytes, note_on_rest, or_dash
from torchlens_perf.run.sketch import merged
from torchlens_perf.verdicts.node_state import ProcessState
from torchlens_perf.verdicts.words.oom import place

if TYPE_CHECKING:
    from torchlens_perf.run.oom_table import OutOfMemory
    from torchlens_perf.verdicts.words.report import (
        DeviceSection,
        DeviceTimes,
        Distribution,
        Rank,
    )
    from torchlens_perf.verdicts.words.report_memory import DeviceMemory, Memory, Retries

_MAX_RANKS = 16
_PHASES = ("forward", "recompute", "backward", "optimizer")
_PARTS = ("data", *_PHASES, "communication", "host")
_WORK, _WAIT = "work", "wait"
_HEADERS = {"communication": _WAIT, "recompute": "recomp."}
_BEHIND, _CAUGHT_UP = "behind", "caught up"
_MAX_PLACES = 5
_FRAGMENTED = "fragm."
_Bytes = Literal["allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "limit_bytes"]
_LAST_STEPS = 1000  # of which a rank's retries of the allocator are shown
# Why marks on the device are missing, by the counters of hooks/on_device/sections.py.
_NOT_TIMED = {
    "captured": "marks on the device were left out while a CUDA graph was captured; a replayed graph has no phases",
    "skipped": "marks on the device were left out, as it was too far behind, its clock could not be anchored, or it "
    "failed",
    "crowded": "marks on the device were left out, as too many before them had not been read: many waits a step, and a "
    "device that is some steps behind",
    "aside": "steps are not judged by the device, as their forward or backward pass ran on another stream than the one "
    "they begin and end on, and waited there",
    "open_ended": "stalls of the device are not known, as they were interrupted, or the backward pass did not say when "
    "its computation ended; compiled ones do not",
    "unread": "device times were not known when the watch ended",
}


def device_times(process: ProcessState) -> DeviceTimes | None:
    """Return a rank's times by the device's clock; None if there are none. `parts` are of a typical step."""
    device = process.statistics.device
    if not device.steps:
        return None
    error_ns, typical = process.device.get("error_ns"), classify([process.statistics.device_mix]).typical
    return {
        "clock": process.device.get("clock"),
        "error_s": None if error_ns is None else error_ns / 1e9,
        "steps": device.steps,
        "step_s": distribution(device.phases["step"]),
        "phases": {
            phase: {
                "p50_s": sketch.quantile_ns(0.5) / 1e9,
                "s_per_step": sketch.usual_mean_ns() / 1e9 * sketch.count / device.steps,
            }
            for phase, sketch in device.phases.items()
            if phase != "step"
        },
        "work_s": distribution(device.work) if device.judged.count else None,
        "parts": {} if typical is None else {part: typical.parts_ns[part] / 1e9 for part in device.parts},
        "behind_s": distribution(device.behind),
        "caught_up": device.caught_up_share,
    }


def own_device_times(process: ProcessState) -> dict[str, float]:
    """By module, seconds of a rank's device in a typical step without those of the modules inside of it.

    Modules that the device has not timed are left out. What it times is a whole call, in sampled steps. The calls are
    those of all usual steps.
    """
    statistics = process.statistics
    if not statistics.usual_steps:
        return {}
    whole_s = {
        name: sketch.usual_mean_ns() / 1e9 * statistics.modules[name].count / statistics.usual_steps
        for name, sketch in statistics.device.modules.items()
        if sketch.count and name in statistics.modules
    }
    only_root = process.root_modules[0] if len(process.root_modules) == 1 else None  # all others are inside of it
    own_s = {}
    for name, seconds in whole_s.items():
        inside = [each for each in whole_s if each != name and (name == only_root or each.startswith(f"{name}."))]
        nearest = [each for each in inside if not any(each.startswith(f"{other}.") for other in inside)]
        own_s[name] = max(0.0, seconds - sum(whole_s[each] for each in nearest))
    return own_s


def device_sections(processes: dict[int, ProcessState]) -> list[DeviceSection]:
    """Device sections by their time, most first; by_rank: mean seconds of one, of the ranks whose records are here;
    over_all_ranks: the last window of all ranks, where they were merged on the device."""
    rows: list[DeviceSection] = []
    for name in dict.fromkeys(name for process in processes.values() for name in process.statistics.device.stamped):
        stamped = {rank: process.statistics.device.stamped for rank, process in processes.items()}
        calls = {rank: sketches[name] for rank, sketches in stamped.items() if name in sketches}
        whole = merged(calls.values())
        over_all = next(
            (p.statistics.device.merged[name] for p in processes.values() if name in p.statistics.device.merged), None
        )
        rows.append(
            {
                "name": name,
                "calls": whole.count,
                "device_s": distribution(whole),
                "by_rank": {str(rank): sketch.mean_ns() / 1e9 for rank, sketch in calls.items()},
                "over_all_ranks": over_all,
            }
        )
    return sorted(rows, key=lambda row: -row["calls"] * (row["device_s"]["mean_s"] or 0.0))


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


def device_table(ranks: Sequence[Rank]) -> FittingTable:
    """Per rank; of many, those whose devices take longest for a step. ranks: the report's, some with device times."""
    timed = [(rank["rank"], rank["device"]) for rank in ranks if rank["device"] is not None]
    shown = sorted(timed, key=lambda row: -(row[1]["step_s"]["p50_s"] or 0.0))[:_MAX_RANKS]
    shown.sort(key=lambda row: row[0])
    devices = [device for _, device in shown]
    columns = [
        Column("rank", [str(rank) for rank, _ in shown], left=True),
        Column("step", [duration_or_dash(device["step_s"]["p50_s"]) for device in devices]),
    ]
    judged = any(device["parts"] for device in devices)
    if judged:
        columns.append(Column(_WORK, [_median(device["work_s"]) for device in devices], 0.95))
    for part in _PARTS if judged else _PHASES:
        times = [device["parts"].get(part) if judged else _phase_s(device, part) for device in devices]
        if any(times):
            columns.append(Column(_HEADERS.get(part, part), [or_dash(each, duration) for each in times], 0.5))
    behind = [duration_or_dash(device["behind_s"]["p50_s"]) for device in devices]
    columns.append(Column(_BEHIND, behind, 0.7))
    columns.append(Column(_CAUGHT_UP, [or_dash(device["caught_up"], percent) for device in devices], 0.8))

    def notes(headers: Sequence[str]) -> list[str]:
        lines = note_on_rest(shown, timed, "ranks whose devices take longest")
        clocks = " and ".join(sorted({str(device["clock"]) for device in devices}))
        lines.append(f"by {clocks}; step, work: median; parts: of a typical step")
        if _WORK in headers:
            lines.append(f"{_WORK}: without {_WAIT}, in which the device waited for other ranks, or for transfers;")
            lines.append("with its waits for the host, which other ranks' hosts may end while their devices wait")
        if {"data", "host"} & set(headers):
            lines.append("data, host: between the phases, where the device waited for the loader or other host code")
        if _BEHIND in headers:
            lines.append("behind: how long after the host the device ended a forward or backward pass, p50")
        if _CAUGHT_UP in headers:
            lines.append("caught up: passes at whose end the device had no work left, as it waits for launches")
        return lines

    return FittingTable("device time per step and rank", columns, notes)


def _median(distribution: Distribution | None) -> str:
    return "-" if distribution is None else duration_or_dash(distribution["p50_s"])


def _phase_s(device: DeviceTimes, phase: str) -> float | None:
    found = device["phases"].get(phase)
    return None if found is None else found["s_per_step"]


def memory_table(ranks: Sequence[Rank]) -> FittingTable:
    """Per rank; of many, those with most reserved. ranks: the report's, some with a device's memory."""
    memories = [(rank["rank"], rank["memory"]["device"]) for rank in ranks]
    measured = [(rank, device) for rank, device in memories if device is not None]
    shown = sorted(measured, key=lambda row: -(row[1]["reserved_bytes"] or 0))[:_MAX_RANKS]
    shown.sort(key=lambda row: row[0])
    devices = [device for _, device in shown]

    def column(header: str, field: _Bytes, worth: float) -> Column:
        return Column(header, [or_dash(device[field], in_bytes) for device in devices], worth)

    columns = [
        Column("rank", [str(rank) for rank, _ in shown], left=True),
        column("allocated", "allocated_bytes", 9),
        column("reserved", "reserved_bytes", 9),
        column("peak", "peak_allocated_bytes", 0.9),
        column("of", "limit_bytes", 0.6),
        Column(_FRAGMENTED, [or_dash(device["fragmentation"], percent) for device in devices], 0.8),
        Column("retries", [or_dash(device["alloc_retries"], str) for device in devices], 0.7),
    ]

    def notes(headers: Sequence[str]) -> list[str]:
        lines = note_on_rest(shown, measured, "ranks with most reserved")
        age = max((device["age_steps"] or 0 for device in devices), default=0)
        lines.append(
            f"at the end of a step, up to {age} steps ago; peak: most allocated at any time, as torch counts it"
        )
        if any(device["peak_resets"] for device in devices):
            lines.append("the job resets the allocator's peak: between readings there may have been a higher one")
        if _FRAGMENTED in headers:
            lines.append("fragm.: of what is reserved, free and not to be given back")
        return lines

    return FittingTable("device memory per rank", columns, notes)


def oom_table(oom: OutOfMemory) -> FittingTable:
    """The largest groups of live blocks when memory ran out. oom: the evidence of the verdict, with a table."""
    held = oom["table"]
    assert held is not None
    rows, events = held["rows"][:_MAX_PLACES], held["history_events"]
    columns = [
        Column("asked for at", [printable(place(row)) for row in rows], left=True),
        Column("bytes", [in_bytes(row["bytes"]) for row in rows]),
        Column("blocks", [str(row["blocks"]) for row in rows]),
    ]
    notes = [f"{oom['file']} has all"]
    if events:
        columns.append(Column("new", [or_dash(row["new_blocks"], str) for row in rows]))
        notes.append(f"new: allocated within the last {events} allocations and frees")
    return FittingTable(f"what held the memory of rank {oom['rank']}", columns, lambda headers: notes)


def memory_of(process: ProcessState) -> Memory:
    """A rank's memory: resident on a CPU; on a device the allocator's, whose numbers are in `device`."""
    statistics = process.statistics
    return {
        "last_bytes": statistics.memory_bytes or None,
        "max_bytes": statistics.memory_max_bytes or None,
        "source": process.memory_source or None,
        "device": _device(statistics.memory, statistics.last_step),
        "growth": statistics.memory.growth(),
    }


def _device(memory: MemoryStatistics, last_step: int | None) -> DeviceMemory | None:
    last = memory.last
    if last is None:
        return None
    fragmentation = None
    if last.inactive_bytes is not None and last.reserved_bytes:
        fragmentation = last.inactive_bytes / last.reserved_bytes
    row = {
        **last._asdict(),
        "age_steps": None if last_step is None else max(0, last_step - last.step),
        "fragmentation": fragmentation,
        "peak_allocated_bytes": memory.peak_allocated_bytes,
        "peak_reserved_bytes": memory.peak_reserved_bytes,
        "peak_resets": memory.peak_resets,
        "readings": memory.count,
        "retries_in": _retries(memory),
    }
    return cast("DeviceMemory", row)


def _retries(memory: MemoryStatistics) -> Retries | None:
    """Retries of the last steps; None where there was none, or where nothing tells."""
    counted = [(each.step, each.alloc_retries) for each in memory.readings if each.alloc_retries is not None]
    recent = [each for each in counted if each[0] >= counted[-1][0] - _LAST_STEPS]
    if len(recent) < 2 or recent[-1][1] == recent[0][1]:
        return None
    return {"count": recent[-1][1] - recent[0][1], "steps": recent[-1][0] - recent[0][0]}


def memory_notes(rank: Rank) -> list[str]:
    """What a rank's memory says that is worth doing something about. rank: a row of the report."""
    notes: list[str] = []
    device, growth = rank["memory"]["device"], rank["memory"]["growth"]
    if device is not None and device["retries_in"] is not None:
        retries = device["retries_in"]
        notes.append(
            f"rank {rank['rank']}: {retries['count']} cudaMalloc retries in the last {retries['steps']} steps: at "
            "each, the allocator gives its cache back and waits for the device; next: "
            "PYTORCH_ALLOC_CONF=expandable_segments:True, or a smaller batch"
        )
    if growth is not None:
        above = growth["above_bytes"]
        peak = f"steps reach {amount(above, 'B')} more inside, " if above else ""
        notes.append(
            f"rank {rank['rank']}: allocated memory grows by {amount(growth['bytes_per_step'], 'B')} a step over steps "
            f"{growth['since_step']} to {growth['until_step']}{_share_now(device)}, {peak}"
            f"and would fill it at step {growth['full_at_step']}; next: look for tensors that are kept from step to "
            "step, such as losses without .item() or .detach()"
        )
    return notes


def _share_now(device: DeviceMemory | None) -> str:
    if device is None or device["allocated_bytes"] is None or not device["limit_bytes"]:
        return ""  # the newest reading was lost in part
    return f" ({percent(device['allocated_bytes'] / device['limit_bytes'])} of the device now)"
