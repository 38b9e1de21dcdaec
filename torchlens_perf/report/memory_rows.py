"""What the report says of device memory: of each rank, and what of it asks for something to be done."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchlens_perf.memory_statistics import MemoryStatistics
from torchlens_perf.node_state import ProcessState
from torchlens_perf.report.quantities import amount, percent

_LAST_STEPS = 1000


def memory_of(process: ProcessState) -> dict[str, Any]:
    """A rank's memory: resident on a CPU; on a device the allocator's, whose numbers are in `device`."""
    statistics = process.statistics
    growth = statistics.memory.growth()
    return {
        "last_bytes": statistics.memory_bytes or None,
        "max_bytes": statistics.memory_most_bytes or None,
        "source": process.memory_source or None,
        "device": _device(statistics.memory, statistics.last_step),
        "growth": None if growth is None else dataclasses.asdict(growth),
    }


def _device(memory: MemoryStatistics, last_step: int | None) -> dict[str, Any] | None:
    last = memory.last
    if last is None:
        return None
    fragmentation = None
    if last.inactive_bytes is not None and last.reserved_bytes:
        fragmentation = last.inactive_bytes / last.reserved_bytes
    return {
        **last._asdict(),
        "age_steps": None if last_step is None else max(0, last_step - last.step),
        "fragmentation": fragmentation,
        "most_allocated_bytes": memory.most_allocated_bytes,
        "most_reserved_bytes": memory.most_reserved_bytes,
        "peak_resets": memory.peak_resets,
        "readings": memory.count,
        "retries_in": _retries(memory),
    }


def _retries(memory: MemoryStatistics) -> dict[str, int] | None:
    """Retries of the last steps; None where there was none, or where nothing tells."""
    counted = [(each.step, each.alloc_retries) for each in memory.readings if each.alloc_retries is not None]
    recent = [each for each in counted if each[0] >= counted[-1][0] - _LAST_STEPS]
    if len(recent) < 2 or recent[-1][1] == recent[0][1]:
        return None
    return {"count": recent[-1][1] - recent[0][1], "steps": recent[-1][0] - recent[0][0]}


def memory_notes(rank: dict[str, Any]) -> list[str]:
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
        notes.append(
            f"rank {rank['rank']}: allocated memory grows by {amount(growth['bytes_per_step'], 'B')} a step over steps "
            f"{growth['since_step']} to {growth['until_step']} "
            f"({percent(device['allocated_bytes'] / device['limit_bytes'])} of the device now), {_peak(growth)}"
            f"and would fill it at step {growth['full_at_step']}; next: look for tensors that are kept from step to "
            "step, such as losses without .item() or .detach()"
        )
    return notes


def _peak(growth: dict[str, Any]) -> str:
    above = growth["above_bytes"]
    return f"steps reach {amount(above, 'B')} more inside, " if above else ""
