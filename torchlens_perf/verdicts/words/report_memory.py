"""Types for a rank's memory in `report --json`. See report.py."""

from __future__ import annotations

from typing import TypedDict

from torchlens_perf.analysis.statistics.memory import MemoryGrowth


class Retries(TypedDict):
    """Number of cudaMalloc retries in the last `steps` steps."""

    count: int
    steps: int


class DeviceMemory(TypedDict):
    """The newest values of the device allocator, and extremes over the run."""

    step: int
    allocated_bytes: int | None
    reserved_bytes: int | None
    inactive_bytes: int | None
    """Memory of free blocks that cannot be returned to the device."""
    peak_bytes: int | None
    """Highest allocated memory since the job last reset the allocator's peaks."""
    limit_bytes: int | None
    """Device memory that the process is allowed to use."""
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
    """Memory of one rank: resident memory on a CPU, allocator memory on a device."""

    last_bytes: int | None
    max_bytes: int | None
    source: str | None
    device: DeviceMemory | None
    growth: MemoryGrowth | None
