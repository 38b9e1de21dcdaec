"""A rank's memory in the report: a row of the JSON, and notes on memory that needs attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torchlens_perf.analysis.statistics.memory import MemoryStatistics
from torchlens_perf.analysis.statistics.quantities import format_bytes, format_percent
from torchlens_perf.verdicts.node_state import ProcessState
from torchlens_perf.verdicts.words.report import Rank
from torchlens_perf.verdicts.words.report_memory import DeviceMemory, Memory, Retries

_LAST_STEPS = 1000
"""Number of last steps whose allocator retries are reported."""


def memory_row(process: ProcessState) -> Memory:
    """Return a rank's memory: resident memory on a CPU, allocator memory on a device."""
    statistics = process.statistics
    return {
        "last_bytes": statistics.memory_bytes or None,
        "max_bytes": statistics.memory_max_bytes or None,
        "source": process.facts.memory_source or None,
        "device": _device_memory_row(statistics.memory, statistics.last_step),
        "growth": statistics.memory.estimate_growth(),
    }


def _device_memory_row(memory: MemoryStatistics, last_step: int | None) -> DeviceMemory | None:
    last = memory.last_reading
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
        "retries_in": _recent_retries(memory),
    }
    return cast("DeviceMemory", row)


def _recent_retries(memory: MemoryStatistics) -> Retries | None:
    """Return the allocator retries of the last steps; None without retries or counts."""
    counted = [
        (each.step, each.alloc_retries)
        for each in memory.readings
        if each.alloc_retries is not None
    ]
    recent = [each for each in counted if each[0] >= counted[-1][0] - _LAST_STEPS]
    if len(recent) < 2 or recent[-1][1] == recent[0][1]:
        return None
    return {"count": recent[-1][1] - recent[0][1], "steps": recent[-1][0] - recent[0][0]}


def memory_notes(rank: Rank) -> Iterator[str]:
    """Yield notes on memory problems of a rank that a user can act on.

    rank: a row of the report.
    """
    device, growth = rank["memory"]["device"], rank["memory"]["growth"]
    if device is not None and device["retries_in"] is not None:
        retries = device["retries_in"]
        yield (
            f"rank {rank['rank']}: {retries['count']} cudaMalloc retries in the last"
            f" {retries['steps']} steps. At each retry, the allocator frees its cache and waits for"
            " the device. Next: set PYTORCH_ALLOC_CONF=expandable_segments:True, or use a smaller"
            " batch"
        )
    if growth is not None:
        above = growth["above_bytes"]
        peak = f"peaks {format_bytes(above, 'B')} higher within steps, " if above else ""
        yield (
            f"rank {rank['rank']}: allocated memory grows by"
            f" {format_bytes(growth['bytes_per_step'], 'B')} a step over steps {growth['since_step']} to"
            f" {growth['until_step']}{_share_of_device_text(device)}, {peak}and would fill the"
            f" device at step {growth['full_at_step']}. Next: look for tensors that are kept from"
            " step to step, such as losses without .item() or .detach()"
        )


def _share_of_device_text(device: DeviceMemory | None) -> str:
    if device is None or device["allocated_bytes"] is None or not device["limit_bytes"]:
        # The newest reading of the memory may be incomplete.
        return ""
    return (
        f" ({format_percent(device['allocated_bytes'] / device['limit_bytes'])} of the device now)"
    )
