"""Tell a reader process that waits for the disk from one that needs CPU time."""

from __future__ import annotations

import contextlib
import time

from torchlens_perf.run.processes import (
    process_cpu_time_s,
    process_state_and_start,
    read_kernel_bytes,
    thread_ids,
)

# A reader that waits for a disk can also use some CPU time.
_MIN_CPU_SHARE = 0.1
# If the server itself was stopped or had no CPU, the reader may have an answer already.
_MAX_INTERVAL_S = 1.0


class ReaderActivity:
    """Samples of the activity of a reader process during one call."""

    def __init__(self) -> None:
        self.pid = 0
        """The process; 0 until it has started."""
        self.cpu_s = 0.0
        """CPU time of the call."""
        self.blocked_s = 0.0
        """Time since the reader last used a CPU, was ready to use one or completed a read."""
        self._runnable_s = self._disk_s = 0.0
        self._began_cpu_s, self._reads = 0.0, 0
        self._updated_s = time.monotonic()

    def begin(self, pid: int) -> None:
        """Begin to sample a process."""
        self.pid, self._began_cpu_s = pid, process_cpu_time_s(pid)
        self._reads, self._updated_s = _count_reads(pid), time.monotonic()

    def update(self) -> None:
        """Sample the process."""
        if not self.pid:
            return
        now_s, cpu_s = time.monotonic(), process_cpu_time_s(self.pid) - self._began_cpu_s
        interval_s = min(now_s - self._updated_s, _MAX_INTERVAL_S)
        runs = cpu_s - self.cpu_s > _MIN_CPU_SHARE * interval_s or any(
            # A thread runs, or waits for a CPU.
            process_state_and_start(self.pid, thread)[0] == "R"
            for thread in thread_ids(self.pid)
        )
        reads = _count_reads(self.pid)
        if runs:
            self._runnable_s += interval_s
        else:
            self._disk_s += interval_s
        self.blocked_s = 0.0 if runs or reads != self._reads else self.blocked_s + interval_s
        self.cpu_s, self._reads, self._updated_s = cpu_s, reads, now_s

    def describe(self) -> str:
        """Return what takes the time of the call."""
        total_s = self._runnable_s + self._disk_s
        if not self.pid or total_s < 0.5:
            return "still reading" if self.pid else "a reader process is being started"
        if self._disk_s > self._runnable_s:
            return f"still reading: waited {self._disk_s:.0f} of {total_s:.0f} s for the disk"
        is_contended = self.cpu_s < self._runnable_s / 2
        return (
            f"still reading: needed {self.cpu_s:.1f} s of CPU time in {total_s:.0f} s"
            f"{', because other processes use the CPUs' if is_contended else ''}"
        )


def _count_reads(pid: int) -> int:
    """Return the number of read calls of a process; 0 if the kernel does not count them."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(read_kernel_bytes(f"/proc/{pid}/io").partition(b"syscr:")[2].split()[0])
    return 0
