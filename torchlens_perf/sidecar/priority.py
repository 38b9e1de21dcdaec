"""How little the sidecar asks of the processors and of memory. What the kernel refuses is left as it is.

A process without privileges cannot raise a nice value or leave SCHED_IDLE again, but both belong to a thread. So what
is done beside the job runs in a thread of low priority, and the main thread keeps the priority that the job has: it
does what a rank waits for when its training has ended.

Where the kernel groups processes by session (sched(7), autogroup), nice and policy compare a thread only with others of
its own session, and the sidecar has one of its own: among all others counts the group's nice value. A process without
privileges may raise that again, but neither its own nor what make_thread_idle() did.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time

NICE = 5
USUAL_GROUP, SLOW_GROUP, IDLE_GROUP = 0, 10, 19
"""Nice values of the session's group: while it works, while it prepares with a share of a processor that a job hardly
misses, and while a thread of it is idle (docs/internals/decisions/0028-sidecar-works-rarely.md)."""
_GROUP = "/proc/self/autogroup"  # not there where the kernel does not group by session
_TRIES, _REST_S = 3, 0.05  # the kernel takes one change in a tenth of a second, of all users together
_OOM_SCORE = "/proc/self/oom_score_adj"
_OOM_SCORE_ADDED, _HIGHEST_OOM_SCORE = 500, 1000
_thread = threading.local()
MEMORY_BYTES = 4 << 30  # of its data; node 0's of 16384 ranks has a tenth of it


def lower() -> None:
    """Give this thread, and the threads and children that it starts, low priority, and call spare_memory()."""
    lower_thread()
    spare_memory()


def lower_thread() -> None:
    """Lower the calling thread's priority for good. Again does nothing."""
    if not getattr(_thread, "is_low", False):
        _thread.is_low = True
        with contextlib.suppress(OSError):
            os.nice(NICE)


def spare_memory() -> None:
    """Have the kernel end this process before the job where memory runs out, and bound what it takes."""
    with contextlib.suppress(OSError, ValueError):
        with open(_OOM_SCORE) as file:
            score = int(file.read())
        with open(_OOM_SCORE, "w") as file:
            file.write(str(min(_HIGHEST_OOM_SCORE, score + _OOM_SCORE_ADDED)))
    bound_memory(MEMORY_BYTES)


def bound_memory(size_bytes: int) -> None:
    """What asks for more fails here (MemoryError, which a round survives), before the job's own memory is gone."""
    with contextlib.suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if soft == resource.RLIM_INFINITY or soft > size_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (size_bytes, hard))


def set_group(nice: int) -> None:
    """Sets the nice value of the session's group, unless others are in that session: started by hand, they are."""
    if os.getsid(0) != os.getpid():
        return
    for _ in range(_TRIES):
        try:
            with open(_GROUP, "w") as file:
                file.write(str(nice))
            return
        except BlockingIOError:
            time.sleep(_REST_S)
        except OSError:
            return


def make_thread_idle() -> None:
    """The calling thread runs only where nothing else wants the processor, for as long as it lives."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
