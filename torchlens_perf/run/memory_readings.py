"""One reading of the device's allocator: which of torch's numbers are kept, and under which names. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# What a MEMORY record may be about. Bytes: value0 is what there is now, value1 the most since the user last reset the
# allocator's peaks. Counts: value0 is how often so far.
_BYTES = {"allocated": "allocated_bytes", "reserved": "reserved_bytes", "inactive": "inactive_split_bytes"}
_COUNTS = {
    "alloc_retries": "num_alloc_retries",
    "ooms": "num_ooms",
    "device_allocs": "num_device_alloc",
    "device_frees": "num_device_free",
}
LIMIT = "limit"  # what the process may take: the device's memory, or its share of it
# cudaMallocAsync leaves the other numbers at 0 (torch.cuda.memory_stats): they are not measured there.
_OF_BACKEND = {"native": (*_BYTES, *_COUNTS), "cudaMallocAsync": ("allocated", "reserved")}


def can_be_read(backend: str) -> bool:
    """Whether an allocator of this kind (torch.cuda.get_allocator_backend()) has numbers; the user's own has none."""
    return backend in _OF_BACKEND


def quantities(stats: Mapping[str, Any], backend: str) -> Iterator[tuple[str, int, int]]:
    """Name, value0 and value1 of what torch.cuda.memory_stats_as_nested_dict() returned; what it lacks is left out."""
    for name in _OF_BACKEND[backend]:
        if name in _BYTES and _BYTES[name] in stats:
            total = stats[_BYTES[name]]["all"]
            yield name, total["current"], total["peak"]
        elif name in _COUNTS and _COUNTS[name] in stats:
            yield name, stats[_COUNTS[name]], 0
