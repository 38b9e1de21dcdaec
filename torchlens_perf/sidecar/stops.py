"""Observe the times in which processes are stopped, and do not run although nothing blocks them.

SIGSTOP, a debugger or a frozen control group stop a rank. The files of the kernel show this to a
sidecar that runs. A frozen container, or a scheduler that suspends a job, also stops the sidecar.
Then a sleep of the sidecar lasts too long, although none of its threads used a CPU or waited for one.

This module has few imports, because start/wait.py uses it in the sidecar's first seconds.
"""

from __future__ import annotations

import os
import time

from torchlens_perf.run.processes import (
    process_state_and_start,
    read_kernel_text,
    thread_times_ns,
)

SHORTEST_NS = 250_000_000
"""Shortest stop that is observed."""
# A state read within this time of the previous one belongs to the same stop.
_CHECK_INTERVAL_S = 0.05
_STOPPED = ("T", "t")
# States of processes in a frozen control group of version 2 and 1, and of processes that wait.
_FROZEN = ("S", "D")
# Files that show whether a control group is frozen, and their text, by the controllers.
_FREEZERS = {
    "freezer": (("/sys/fs/cgroup/freezer{}/freezer.state", "FROZEN"),),
    "": (
        ("/sys/fs/cgroup{}/cgroup.events", "frozen 1"),
        ("/sys/fs/cgroup/unified{}/cgroup.events", "frozen 1"),
    ),
}
_MAX_STOPS = 256

Stop = tuple[int, int]
"""Begin and end of a stop, on CLOCK_MONOTONIC in ns."""


def is_stopped(pid: int) -> bool:
    """Return True if a process is stopped by a signal or a debugger, or its group is frozen."""
    state = process_state_and_start(pid)[0]
    return state in _STOPPED or (state in _FROZEN and _is_group_frozen(pid))


def _is_group_frozen(pid: int) -> bool:
    """Return True if a process's control group, of version 1 or 2, is frozen."""
    for line in read_kernel_text(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for file, text in _FREEZERS.get(controllers, ()):
            if text in read_kernel_text(file.format(path)):
                return True
    return False


class StopObserver:
    """Observes whether one process is stopped."""

    def __init__(self, pid: int) -> None:
        self.stops: list[Stop] = []
        """From when to when the process was seen stopped. The stop may have lasted longer."""
        self._pid = pid
        self._is_stopped = False

    def poll(self, *, moves: bool) -> float:
        """Read the process's state. Return the time in seconds until the next poll is due.

        moves: the process has written records since the last poll, so its state is not read.
        """
        was_stopped = self._is_stopped
        self._is_stopped = not moves and is_stopped(self._pid)
        if not self._is_stopped:
            return float("inf")
        now_ns = time.monotonic_ns()
        begin_ns = self.stops.pop()[0] if was_stopped and self.stops else now_ns
        self.stops = [*self.stops[-_MAX_STOPS:], (begin_ns, now_ns)]
        return _CHECK_INTERVAL_S


class SleepObserver:
    """Observes stops of this process: sleeps that last too long."""

    def __init__(self) -> None:
        self.stops: list[Stop] = []
        self._begin_ns, self._threads = 0, dict[str, int]()

    def begin(self) -> None:
        self._begin_ns, self._threads = time.monotonic_ns(), thread_times_ns(os.getpid())

    def end(self, duration_s: float) -> None:
        """Add a stop if the sleep lasted longer than `duration_s`, and no thread explains this."""
        now_ns = time.monotonic_ns()
        longer_ns = now_ns - self._begin_ns - int(duration_s * 1e9)
        if longer_ns < SHORTEST_NS:
            return
        threads = thread_times_ns(os.getpid())
        if not threads or threads.keys() != self._threads.keys():
            return  # The times of a thread are not known, as it has started or ended.
        awake_ns = sum(threads[each] - self._threads[each] for each in threads)
        if longer_ns - awake_ns >= SHORTEST_NS:
            self.stops = [*self.stops[-_MAX_STOPS:], (now_ns - longer_ns + awake_ns, now_ns)]
