"""Limits the memory of a process that reads run directories, in which anything may lie."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_MAX_BYTES = 8 << 30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def limit_memory() -> int:
    """Limit this process to half of the machine's or the container's memory, and to 8 GiB. Return the limit in bytes.

    More raises MemoryError. The limit counts what can be written (RLIMIT_DATA): libraries reserve far more addresses
    than they use. A lower limit of the user's stays.
    """
    limit = min(_MAX_BYTES, _memory_bytes() // 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = min([limit, *(each for each in (soft, hard) if each != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return limit


def _memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # "max", or no such file
        return total
