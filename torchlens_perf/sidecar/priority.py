"""Lower the sidecar's priority for CPUs and its memory limits. Refusals of the kernel are ignored.

A process without privileges can lower its priority, but never raise it.
Priority belongs to a thread, so work during training runs in a thread of low priority. The main
thread keeps the job's priority for work that ranks wait for after their training.

If the kernel groups processes by session (sched(7), autogroup), a thread's nice value only applies
within its session. The sidecar has its own session, whose group keeps the usual nice value: with
10, a busy node's first results came after half a minute instead of 10 s.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading

NICE = 5
_OOM_SCORE = "/proc/self/oom_score_adj"
# The kernel adds this many thousandths of the memory limit to a process's memory, and ends the
# process with the largest sum. A smaller value would spare the sidecar if the job uses most of the
# memory of its control group.
_HIGHEST_OOM_SCORE = 1000
_thread = threading.local()
# Limit of the sidecar's memory. For 16384 ranks, node 0's sidecar needs a tenth of this limit.
MEMORY_BYTES = 4 << 30


def lower_priority() -> None:
    """Lower the priority of this thread, its later threads and children, and limit memory."""
    lower_thread_priority()
    lower_memory_priority()


def lower_thread_priority() -> None:
    """Lower the calling thread's priority permanently. Later calls have no effect."""
    if not getattr(_thread, "is_low", False):
        _thread.is_low = True
        with contextlib.suppress(OSError):
            os.nice(NICE)


def lower_memory_priority() -> None:
    """Limit this process's memory, and make it the kernel's first victim if memory runs out."""
    with contextlib.suppress(OSError, ValueError):
        with open(_OOM_SCORE, "w") as file:
            file.write(str(_HIGHEST_OOM_SCORE))
    set_memory_limit(MEMORY_BYTES)


def set_memory_limit(size_bytes: int) -> None:
    """Limit the data size of this process. Allocations beyond the limit raise MemoryError.

    The sidecar survives a MemoryError, but the job might not survive a lack of memory.
    """
    with contextlib.suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if soft == resource.RLIM_INFINITY or soft > size_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (size_bytes, hard))
