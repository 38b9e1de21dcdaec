"""Select and name the recorded statistics of torch's CUDA allocator. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Names of MEMORY records. In a record of bytes, value0 is the current value and value1 the peak
# since the user last reset peaks. In a record of a count, value0 is the current count.
_BYTES = {
    "allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
    "inactive": "inactive_split_bytes",
}
_COUNTS = {
    "alloc_retries": "num_alloc_retries",
    "ooms": "num_ooms",
}
# Name of the record for the memory limit: the device's memory, or the configured fraction of it.
LIMIT = "limit"
# With cudaMallocAsync, torch.cuda.memory_stats reports 0 for the other statistics.
_OF_BACKEND = {"native": (*_BYTES, *_COUNTS), "cudaMallocAsync": ("allocated", "reserved")}


def has_allocator_statistics(backend: str) -> bool:
    """Return True if an allocator has statistics. Custom allocators have none.

    backend: value of torch.cuda.get_allocator_backend().
    """
    return backend in _OF_BACKEND


def iter_memory_statistics(
    stats: Mapping[str, Any], backend: str
) -> Iterator[tuple[str, int, int]]:
    """Yield name, value0 and value1 of a MEMORY record for each recorded statistic.

    stats: value of torch.cuda.memory_stats_as_nested_dict(). Statistics that `stats` lacks are
    skipped.
    """
    for name in _OF_BACKEND[backend]:
        if name in _BYTES and _BYTES[name] in stats:
            total = stats[_BYTES[name]]["all"]
            yield name, total["current"], total["peak"]
        elif name in _COUNTS and _COUNTS[name] in stats:
            yield name, stats[_COUNTS[name]], 0
