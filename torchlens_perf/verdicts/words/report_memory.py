"""The fields of `report --json` that are about a rank's memory. Types only; see report.py."""

from __future__ import annotations

from typing import TypedDict

from torchlens_perf.analysis.statistics.memory import Growth


class Retries(TypedDict):
    """cudaMalloc retries in the last steps."""

    count: int
    steps: int


class DeviceMemory(TypedDict):
    """The allocator's newest reading, and what there was over the run."""

    step: int
    allocated_bytes: int | None
    reserved_bytes: int | None
    inactive_bytes: int | None
    """In blocks that are free and cannot be given back."""
    peak_bytes: int | None
    """Most allocated since the job last reset the allocator's peaks."""
    limit_bytes: int | None
    """What the process may take of the device."""
    alloc_retries: int | None
    ooms: int | None
    age_steps: int | None
    fragmentation: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_resets: int
    readings: int
    retries_in: Retries | None


class Memory(TypedDict):
    """Of one rank: resident memory on a CPU, the allocator's on a device."""

    last_bytes: int | None
    max_bytes: int | None
    source: str | None
    device: DeviceMemory | None
    growth: Growth | None
