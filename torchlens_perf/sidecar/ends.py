"""Observe how processes end: by a signal, an exit code, or the kernel's OOM killer.

The sidecar is not the parent of its ranks. From Linux 6.15 on, a pidfd shows how any process ended.
Before, only a process that its parent has not reaped yet shows it.

This module has few imports, because start/wait.py uses it in the sidecar's first seconds.
"""

from __future__ import annotations

import fcntl
import os
import time

from torchlens_perf.run.processes import process_start_ticks, read_stat_fields
from torchlens_perf.sidecar.host.cgroup import ControlGroup

TYPE_CHECKING = False  # a copy of typing.TYPE_CHECKING, because importing typing takes long
if TYPE_CHECKING:
    from torchlens_perf.run.failure import ProcessEnd

# PIDFD_GET_INFO of linux/pidfd.h, with the first version of struct pidfd_info.
_GET_INFO, _INFO_BYTES, _INFO_EXIT, _EXIT_OFFSET = 0xC040FF0B, 64, 1 << 3, 60
# The OOM killer needs less time than this to end a process.
_OOM_INTERVAL_S = 10.0


class EndObserver:
    """Observes the end of one process. Create it while the process runs."""

    def __init__(self, pid: int, started: int) -> None:
        """started: start of the process in clock ticks after boot."""
        self._pid, self._started = pid, started
        self._descriptor, self._group = _open_pidfd(pid), _find_group(pid)
        if process_start_ticks(pid) != started:
            # The process has ended before, and another one may have its pid.
            self.close()
            self._group = None
        self._kills = [self._count_oom_kills()] * 2
        self._counted_s = time.monotonic()

    def poll(self, now_s: float) -> None:
        """Count the kills of the OOM killer so far. Earlier kills did not end the process.

        now_s: the monotonic clock.
        """
        if now_s - self._counted_s >= _OOM_INTERVAL_S:
            self._kills = [self._kills[1], self._count_oom_kills()]
            self._counted_s = now_s

    def read_end(self) -> ProcessEnd:
        """Return how the process has ended, as far as known."""
        status = self._read_status()
        code = None if status is None else os.waitstatus_to_exitcode(status)
        before, kills = self._kills[0], self._count_oom_kills()
        return {
            "signal": -code if code is not None and code < 0 else None,
            "exit_code": code if code is not None and code >= 0 else None,
            "oom_kills": 0 if before is None or kills is None else max(0, kills - before),
            "memory_limit_bytes": self._group.memory_limit_bytes() if self._group else None,
        }

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read_status(self) -> int | None:
        """Return the status of the process as from waitpid(); None while it runs, or if unknown."""
        if self._descriptor is not None and (status := _read_reaped(self._descriptor)) is not None:
            return status
        fields = read_stat_fields(f"/proc/{self._pid}/stat")
        is_zombie = len(fields) > 49 and fields[0] in (b"Z", b"X")
        # Zero may also mean that this process is not permitted to read the status.
        return (int(fields[49]) or None) if is_zombie and int(fields[19]) == self._started else None

    def _count_oom_kills(self) -> int | None:
        return self._group.oom_kill_count() if self._group is not None else None


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        # Python may have been built for a kernel without pidfd_open().
        return None


def _find_group(pid: int) -> ControlGroup | None:
    try:
        return ControlGroup(pid)
    except (OSError, ValueError):
        return None


def _read_reaped(descriptor: int) -> int | None:
    """Return the status of a process that its parent has reaped; None if not known."""
    info = bytearray(_INFO_EXIT.to_bytes(8, "little").ljust(_INFO_BYTES, b"\0"))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return None
    found = int.from_bytes(info[:8], "little") & _INFO_EXIT
    return int.from_bytes(info[_EXIT_OFFSET:], "little") if found else None
