"""Read data on processes from /proc.

This module imports almost nothing, because the sidecar must start fast (sidecar/start/wait.py).
"""

from __future__ import annotations

import os
import time

from torchlens_perf.interruption import ours

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
"""Number of clock ticks per second. /proc/PID/stat counts CPU time in these ticks."""


def process_start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks after boot; None if it does not exist.

    Zombies count as processes that do not exist. Source: proc_pid_stat(5), field 22.
    """
    state, started = process_state_and_start(pid)
    return None if state in ("", "Z", "X") else started


def process_age_s(started: int) -> float:
    """Return the age of a process in seconds. started: its start in clock ticks after boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / TICKS_PER_S


def process_state_and_start(pid: int, thread: int | None = None) -> tuple[str, int]:
    """Return a process's state letter, as in ps, and its start in clock ticks after boot.

    The state is "" if the process does not exist.

    thread: native id of a thread of the process, for which both are returned instead.
    """
    fields = read_stat_fields(
        f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    )
    return (fields[0].decode(), int(fields[19])) if fields else ("", 0)


def thread_ids(pid: int) -> list[int]:
    """Return the native ids of a process's threads; an empty list if it does not exist."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except ours(OSError):
        return []


def process_cpu_time_s(pid: int) -> float:
    """Return the CPU time of a process, including ended threads; 0 if it does not exist."""
    fields = read_stat_fields(f"/proc/{pid}/stat")
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def main_thread_cpu_wait_ns(pid: int, proc: str | os.PathLike[str] = "/proc") -> int | None:
    """Return the total time in ns that a process's main thread was runnable but had no CPU.

    Return None if the kernel does not count this time. Source:
    Documentation/scheduler/sched-stats.rst.
    """
    return _read_schedstat(f"{os.fspath(proc)}/{pid}/task/{pid}/schedstat", 1)


def thread_times_ns(pid: int) -> dict[str, int]:
    """Return the CPU time plus the run-queue wait of each thread in ns, by native id.

    Threads whose times the kernel does not count are left out.
    """
    paths = {thread: f"/proc/{pid}/task/{thread}/schedstat" for thread in thread_ids(pid)}
    times = {
        str(thread): (_read_schedstat(path, 0), _read_schedstat(path, 1))
        for thread, path in paths.items()
    }
    return {
        thread: cpu_ns + wait_ns
        for thread, (cpu_ns, wait_ns) in times.items()
        if cpu_ns is not None and wait_ns is not None
    }


def clock_without_cpu_wait_ns() -> int:
    """Return the time in ns of a clock that stops while this thread is runnable but has no CPU.

    The clock never stops if the kernel does not count this time.
    """
    return time.monotonic_ns() - (_read_schedstat("/proc/thread-self/schedstat", 1) or 0)


def _read_schedstat(path: str, field: int) -> int | None:
    try:
        return int(read_kernel_bytes(path).split()[field])
    except ours(OSError, ValueError, IndexError):
        return None


def is_signal_in_set(field: str, number: int, pid: int | str = "self") -> bool:
    """Return True if a signal is in a set of signals of a process (proc(5)).

    field: "SigCgt" for caught or "SigIgn" for ignored signals. number: of the signal. Raise OSError
    if the process does not exist.
    """
    with open(f"/proc/{pid}/status") as status:
        mask = next(line.partition(":")[2] for line in status if line.startswith(f"{field}:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def child_pids(pid: int, proc: str | os.PathLike[str] = "/proc") -> list[int]:
    """Return the pids of a process's children, such as data loader workers.

    Only the main thread's children are listed. The list is empty if the kernel was built without
    CONFIG_PROC_CHILDREN.
    """
    return [
        int(child)
        for child in read_kernel_text(f"{os.fspath(proc)}/{pid}/task/{pid}/children").split()
    ]


def read_command_line(pid: int) -> list[str]:
    """Return a process's arguments; [""] if they cannot be read."""
    return read_kernel_text(f"/proc/{pid}/cmdline").split("\0")


def read_kernel_text(path: str | os.PathLike[str]) -> str:
    """Return the stripped text of a small kernel file; "" if it cannot be read."""
    try:
        return read_kernel_bytes(path).decode(errors="replace").strip()
    except ours(OSError):
        return ""


def read_stat_fields(path: str) -> list[bytes]:
    """Return the fields of a stat file after the program's name; an empty list if it is missing.

    The program's name may contain spaces and parentheses. Field n of proc_pid_stat(5) has the index
    n - 3.
    """
    try:
        fields = read_kernel_bytes(path).rpartition(b")")[2].split()
    except ours(OSError):
        return []
    return fields if len(fields) > 19 else []


def read_kernel_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a small kernel file. Raise OSError.

    This takes half the time of a file object.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = text = os.read(descriptor, 1 << 16)
        while text:
            text = os.read(descriptor, 1 << 16)
            found += text
        return found
    finally:
        os.close(descriptor)
