"""What /proc tells of a process. Imports next to nothing: a sidecar's first seconds need it (sidecar/start/wait.py)."""

from __future__ import annotations

import os
import time


def process_started(pid: int) -> int | None:
    """When a process began, in clock ticks after boot (proc_pid_stat(5), field 22); None if there is none such."""
    state, started = process_stat(pid)
    return None if state in ("", "Z", "X") else started


def age_s(started: int) -> float:
    """How long ago a process of this boot began. started: in clock ticks after boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def process_stat(pid: int, thread: int | None = None) -> tuple[str, int]:
    """A process's state, one letter as ps shows it, and when it began, in clock ticks after boot; "" if it is gone.

    thread: of that thread of it, by its native id.
    """
    fields = stat_fields(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat")
    return (fields[0].decode(), int(fields[19])) if fields else ("", 0)


def threads(pid: int) -> list[int]:
    """A process's threads, by their native ids; none if it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def process_cpu_time_s(pid: int) -> float:
    """How long all threads of a process have run so far, those that have ended too; 0 if it is gone."""
    fields = stat_fields(f"/proc/{pid}/stat")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def cpu_time_ns(pid: int, thread: int | None = None) -> int | None:
    """How long a thread has run so far (Documentation/scheduler/sched-stats.rst); None where the kernel does not tell.

    thread: its native id; without it, the main thread.
    """
    return _scheduled(f"/proc/{pid}/task/{thread or pid}/schedstat", 0)


def cpu_wait_ns(pid: int) -> int | None:
    """Return how long a process's main thread has been runnable without a CPU; None where the kernel has no such
    count."""
    return _scheduled(f"/proc/{pid}/task/{pid}/schedstat", 1)


def unstarved_ns() -> int:
    """A clock that stands while this thread could run and has no CPU; it always runs where the kernel does not tell."""
    return time.monotonic_ns() - (_scheduled("/proc/thread-self/schedstat", 1) or 0)


def _scheduled(path: str, field: int) -> int | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return int((file.read() or b"").split()[field])
    except (OSError, ValueError, IndexError):
        return None


def is_in(field: str, number: int, pid: int | str = "self") -> bool:
    """Whether a signal is in this set of a process's signals: "SigCgt" are caught, "SigIgn" ignored (proc(5)).

    Raises OSError where there is no such process.
    """
    with open(f"/proc/{pid}/status") as status:
        mask = next(line.partition(":")[2] for line in status if line.startswith(f"{field}:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def command_line(pid: int) -> list[str]:
    """A process's arguments; none if it is gone, or another user's."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
            return [argument.decode(errors="replace") for argument in (file.read() or b"").split(b"\0")]
    except OSError:
        return []


def text_of(path: str | os.PathLike[str]) -> str:
    """Of a small file of the kernel's, without the spaces around it; "" where it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def stat_fields(path: str) -> list[bytes]:
    """Those after the program's name, which may hold anything; that of field n is at n - 3. [] if it is gone."""
    try:
        with open(path, "rb", buffering=0) as file:
            fields = (file.read() or b"").rpartition(b")")[2].split()
    except OSError:
        return []
    return fields if len(fields) > 19 else []
