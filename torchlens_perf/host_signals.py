"""What the kernel tells of a rank's process: waits for CPUs and disks, memory pressure, neighbours. In the sidecar.

Read from /proc (proc(5)), control groups and, for clocks, psutil; nothing of it touches the training process. That a
thread waits for a disk is seen by looking at its state several times a second: the kernel's own account of it
(delayacct) is off by default since Linux 5.14.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from torchlens_perf.control_group import ControlGroup
from torchlens_perf.neighbours import Neighbours

_WAITS = 0.02  # share of the time without a CPU from which on it is looked who has it
_GROUP_EVERY_S = 2.0  # between two looks at which control group a process is in
_LEAST_S = 0.5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass
class _Counters:
    """What only grows, at one moment."""

    now_s: float
    wait_ns: int | None
    kernel_ticks: int
    major_faults: int
    gc_ns: int
    refaults: int | None
    quota_wait_ns: int | None
    memory_stall_us: int | None
    io_stall_us: int | None


@dataclasses.dataclass
class _Process:
    pid: int
    looks: int = 0
    in_disk_wait: int = 0
    before: _Counters | None = None
    group: ControlGroup | None = None
    group_s: float = float("-inf")
    newest: dict[str, float] = dataclasses.field(default_factory=dict)


class HostSignals:
    """Belongs to the sidecar's thread."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._processes: dict[int, _Process] = {}
        self._neighbours = Neighbours(proc)
        self._looking_for_neighbours = False
        self._clocks: list[tuple[float, float]] = []  # of each CPU: its clock and its highest one, in MHz

    def look(self, pids: Iterable[int]) -> None:
        """Whether these processes wait for a disk at this instant; to be called a few times a second."""
        for pid in pids:
            process = self._processes.setdefault(pid, _Process(pid))
            try:
                waits = self._waits_for_disk(pid)
            except (OSError, IndexError):
                continue  # it has ended
            process.looks += 1
            process.in_disk_wait += waits

    def sample(self, gc_ns: dict[int, int], now_s: float) -> dict[int, dict[str, float]]:
        """The signals since the last call, by process. gc_ns: of each process, how long it has collected garbage.

        Without those of a process that has ended or that was not sampled before.
        """
        knows_neighbours = self._looking_for_neighbours and self._neighbours.look(now_s)
        self._clocks = [(each.current, each.max) for each in psutil.cpu_freq(percpu=True) or []]
        waits = False
        found = {}
        for pid, collected_ns in gc_ns.items():
            process = self._processes.setdefault(pid, _Process(pid))
            if process.before is not None and now_s - process.before.now_s < _LEAST_S:
                found[pid] = process.newest
                continue
            try:
                counters = self._count(process, collected_ns, now_s)
            except (OSError, IndexError, ValueError):
                continue  # it has ended
            if process.before is not None:
                found[pid] = process.newest = self._signals(process, counters)
                waits |= process.newest.get("cpu_wait_share", 0.0) >= _WAITS
                if knows_neighbours:
                    cpus, own = self._cpus(pid), self._own(pid)
                    process.newest["neighbour_cpus"] = self._neighbours.busy_cpus(cpus, own)
                    self._neighbours.remember(cpus, own)
            process.before = counters
            process.looks = process.in_disk_wait = 0
        self._looking_for_neighbours = waits
        for pid in self._processes.keys() - gc_ns.keys():
            del self._processes[pid]
        return found

    def busiest_neighbour(self, pid: int, names: Mapping[int, str]) -> str:
        """The program that used most of this process's CPUs lately; "" if none is known. names: of other ranks."""
        try:
            return self._neighbours.busiest(self._cpus(pid), self._own(pid), names)
        except OSError:
            return ""

    def control_group(self, pid: int) -> str:
        """The name of its control group."""
        process = self._processes.get(pid)
        return process.group.path if process is not None and process.group is not None else ""

    # -- parts

    def _signals(self, process: _Process, now: _Counters) -> dict[str, float]:
        before = process.before
        assert before is not None
        assert process.group is not None
        elapsed_s = now.now_s - before.now_s
        signals = {
            "gc_share": (now.gc_ns - before.gc_ns) / 1e9 / elapsed_s,
            "kernel_share": (now.kernel_ticks - before.kernel_ticks) / _TICKS_PER_S / elapsed_s,
            "major_faults_per_s": max(0, now.major_faults - before.major_faults) / elapsed_s,
        }
        if process.looks:
            signals["disk_wait_share"] = process.in_disk_wait / process.looks
        grown = (
            ("cpu_wait_share", now.wait_ns, before.wait_ns, 1e9),
            ("cpu_quota_share", now.quota_wait_ns, before.quota_wait_ns, 1e9),
            ("refaults_per_s", now.refaults, before.refaults, 1.0),
            ("memory_stall_share", now.memory_stall_us, before.memory_stall_us, 1e6),
            ("io_stall_share", now.io_stall_us, before.io_stall_us, 1e6),
        )
        for name, after, earlier, unit in grown:
            if after is not None and earlier is not None:
                signals[name] = max(0, after - earlier) / unit / elapsed_s
        limit_share = process.group.memory_limit_share()
        if limit_share is not None:
            signals["memory_limit_share"] = limit_share
        clock_share = self._clock_share(process.pid)
        if clock_share is not None:
            signals["cpu_clock_share"] = clock_share
        return signals

    def _count(self, process: _Process, gc_ns: int, now_s: float) -> _Counters:
        if now_s - process.group_s > _GROUP_EVERY_S:
            process.group, process.group_s = ControlGroup(process.pid, proc=self._proc), now_s
        group = process.group
        assert group is not None
        tree = [process.pid, *self._children(process.pid)]
        return _Counters(
            now_s=now_s,
            wait_ns=self._wait_ns(process.pid),
            kernel_ticks=int(self._stat(f"{process.pid}/task/{process.pid}")[12]),
            major_faults=sum(self._major_faults(pid) for pid in tree),
            gc_ns=gc_ns,
            refaults=group.refaults(),
            quota_wait_ns=group.quota_wait_ns(),
            memory_stall_us=group.stall_us("memory"),
            io_stall_us=group.stall_us("io"),
        )

    def _waits_for_disk(self, pid: int) -> bool:
        """The main thread, or while it sleeps one of its loader's workers."""
        state = self._stat(pid)[0]
        return state == b"D" or (
            state == b"S" and any(self._stat(child)[0] == b"D" for child in self._children(pid) if self._is(child))
        )

    def _stat(self, pid: int | str) -> list[bytes]:
        """Fields of the stat file of a process or PID/task/TID, from the third on, the state."""
        return (self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()

    def _is(self, pid: int) -> bool:
        return (self._proc / str(pid)).exists()

    def _major_faults(self, pid: int) -> int:
        try:
            return int(self._stat(pid)[9])
        except (OSError, IndexError):
            return 0  # a worker that has just ended

    def _wait_ns(self, pid: int) -> int | None:
        """How long the main thread has been ready without a CPU (Documentation/scheduler/sched-stats.rst)."""
        try:
            return int((self._proc / str(pid) / "task" / str(pid) / "schedstat").read_text().split()[1])
        except FileNotFoundError:
            return None  # a kernel without CONFIG_SCHED_INFO

    def _children(self, pid: int) -> list[int]:
        """Those that the main thread has started: the loader's workers."""
        try:
            return [int(child) for child in (self._proc / f"{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []  # a kernel without CONFIG_PROC_CHILDREN

    def _own(self, pid: int) -> set[int]:
        return {pid, *self._children(pid)}

    def _cpus(self, pid: int) -> set[int]:
        return os.sched_getaffinity(pid)

    def _clock_share(self, pid: int) -> float | None:
        """Of the CPU that its main thread ran on last; None where the machine does not tell, as most virtual ones."""
        cpu = int(self._stat(pid)[36])
        current, highest = self._clocks[cpu] if cpu < len(self._clocks) else (0.0, 0.0)
        return current / highest if highest else None
