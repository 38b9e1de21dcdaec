"""Measure whether the job keeps all of the sidecar's CPUs busy.

This module has few imports, because start/wait.py uses it in the sidecar's first seconds.
"""

from __future__ import annotations

import os

ASSUME_IDLE = "_TORCHLENS_PERF_ASSUME_IDLE"
"""Environment variable with which CPUs never count as busy. For tests of live results: tests that
run in parallel keep all CPUs busy.
"""
# With fewer idle CPUs than this, the sidecar's work takes time from the job.
_MIN_IDLE_CPUS = 0.5
# The kernel counts time in ticks of 10 ms, so shorter periods are not accurate.
_MIN_PERIOD_S = 0.5


class BusyCpus:
    """Sampler of the idle time of the CPUs that this process may use. Not thread-safe."""

    def __init__(self, stat: str = "/proc/stat") -> None:
        """stat: file in the format of /proc/stat."""
        self._stat = stat
        self._before: tuple[float, int] | None = None
        self._is_busy: bool | None = None

    def poll(self, now_s: float) -> bool | None:
        """Return True if the CPUs were busy in the period that ended last. now_s: CLOCK_MONOTONIC.

        The result is None in the first half second, and False if the kernel reports no idle time.
        """
        if ASSUME_IDLE in os.environ:
            return False
        if self._before is None or now_s - self._before[0] >= _MIN_PERIOD_S:
            ticks = self._read_idle_ticks()
            if self._before is not None and ticks is not None:
                idle_s = (ticks - self._before[1]) / os.sysconf("SC_CLK_TCK")
                self._is_busy = idle_s < _MIN_IDLE_CPUS * (now_s - self._before[0])
            elif ticks is None:
                self._is_busy = False
            self._before = None if ticks is None else (now_s, ticks)
        return self._is_busy

    def _read_idle_ticks(self) -> int | None:
        """Return the idle time of all CPUs of this process; None if it is not known."""
        own = {b"cpu%d" % cpu for cpu in os.sched_getaffinity(0)}
        ticks = 0
        try:
            with open(self._stat, "rb") as file:
                # The lines of the CPUs come first. The kernel needs long to count the interrupts of
                # the later lines.
                for line in file:
                    name, *fields = line.split()
                    if not name.startswith(b"cpu"):
                        break
                    if name in own:
                        own.remove(name)
                        ticks += int(fields[3]) + int(fields[4])
        except (OSError, ValueError, IndexError):
            return None
        return None if own else ticks
