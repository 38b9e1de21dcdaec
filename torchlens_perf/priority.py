"""How little the sidecar asks of the processors. What the kernel refuses is left as it is.

Where the kernel groups processes by session (sched(7), autogroup), nice compares a process only with others of its own
session, and the sidecar has one of its own: there the group has a nice value, too. A process without privileges may
raise the group's again, but neither its own nor what make_thread_idle() did.
"""

from __future__ import annotations

import contextlib
import os
import time

NICE = 5
"""While it works: added to what it inherits, and its group's."""
IDLE_NICE = 19
"""Its group's, while a thread of it is idle."""
_GROUP = "/proc/self/autogroup"  # not there where the kernel does not group by session
_TRIES, _REST_S = 3, 0.05  # the kernel takes one change in a tenth of a second, of all users together


def lower() -> None:
    """Lowers the process and its group by NICE."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    set_group(NICE)


def set_group(nice: int) -> None:
    """Sets the nice value of the session's group, unless that is a session of others, too: started by hand it is."""
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
