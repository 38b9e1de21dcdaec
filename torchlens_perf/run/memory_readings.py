"""The numbers of torch's allocator that are recorded, and their names. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Names of MEMORY records. Bytes: value0 is the current value, value1 the peak since the user last
# reset peaks. Counts: value0 is the count so far.
_BYTES = {
    "allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
    "inactive": "inactive_split_bytes",
}
_COUNTS = {
    "alloc_retries": "num_alloc_retries",
    "ooms": "num_ooms",
    "device_allocs": "num_device_alloc",
    "device_frees": "num_device_free",
}
# Memory that the process may use: the device's memory, or the configured fraction of it.
LIMIT = "limit"
# cudaMallocAsync leaves the other numbers at 0 (torch.cuda.memory_stats), so they are not read
# there.
_OF_BACKEND = {"native": (*_BYTES, *_COUNTS), "cudaMallocAsync": ("allocated", "reserved")}


def has_statistics(backend: str) -> bool:
    """Return True if the allocator has statistics. A user's own allocator has none.

    backend: value of torch.cuda.get_allocator_backend().
    """
    return backend in _OF_BACKEND


def read_quantities(stats: Mapping[str, Any], backend: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, value0 and value1 for each number in `stats`. Missing numbers are left out.

    stats: value of torch.cuda.memory_stats_as_nested_dict().
    """
    for name in _OF_BACKEND[backend]:
        if name in _BYTES and _BYTES[name] in stats:
            total = stats[_BYTES[name]]["all"]
            yield name, total["current"], total["peak"]
        elif name in _COUNTS and _COUNTS[name] in stats:
            yield name, stats[_COUNTS[name]], 0
