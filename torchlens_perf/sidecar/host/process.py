"""Measure each rank's waits for CPUs and disks, its memory pressure and its CPU neighbours.

All data comes from /proc (proc(5)), /sys and control groups. The training process is not involved.
Disk waits are estimated by sampling the thread's state several times a second, because the kernel's
own accounting (delayacct) is off by default since Linux 5.14.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from torchlens_perf.run.cpu_programs import CHILD, RANK, SIDECAR, CpuProgram
from torchlens_perf.run.processes import (
    TICKS_PER_S,
    child_pids,
    main_thread_cpu_wait_ns,
    read_kernel_text,
    read_stat_fields,
)
from torchlens_perf.sidecar.host.cgroup import ControlGroup
from torchlens_perf.sidecar.host.neighbours import CpuNeighbours

# Neighbours are sampled only while a rank waits for a CPU for at least this share of the time.
_MIN_CPU_WAIT_SHARE = 0.02
_GROUP_PERIOD_S = 10.0
_MIN_INTERVAL_S = 0.5
# The command line of multiprocessing's resource tracker contains this word.
_TRACKER = "resource_tracker"
_DISK_WAIT_PERIOD_S = 0.15
# For each signal, a counter and the number of its units in a second or an event.
_RATES = {
    "gc_share": ("gc_ns", 1e9), "kernel_share": ("kernel_ticks", TICKS_PER_S), "cpu_wait_share": ("wait_ns", 1e9),
    "major_faults_per_s": ("major_faults", 1.0), "refaults_per_s": ("refaults", 1.0),
    "memory_stall_share": ("memory_stall_us", 1e6),
}  # fmt: skip
_CPUS = Path("/sys/devices/system/cpu")
_Counters: TypeAlias = dict[str, int | None]


@dataclasses.dataclass
class _SampledProcess:
    pid: int
    disk_wait_samples: int = 0
    in_disk_wait: int = 0
    sampled_s: float = float("-inf")
    counters: _Counters = dataclasses.field(default_factory=dict)
    """Values of the process's and its group's increasing counters at the last sample."""
    group: ControlGroup | None = None
    group_s: float = float("-inf")
    children: list[int] = dataclasses.field(default_factory=list)
    cpus: set[int] = dataclasses.field(default_factory=set)
    newest: dict[str, float] = dataclasses.field(default_factory=dict)


_UNKNOWN = _SampledProcess(-1)


class HostMetrics:
    """Sampler of the host signals of the ranks' processes. Not thread-safe."""

    def __init__(self, proc: Path = Path("/proc"), cpus: Path = _CPUS) -> None:
        self._proc = proc
        self._cpu_folder = cpus
        self._processes: dict[int, _SampledProcess] = {}
        self._neighbours = CpuNeighbours(proc)
        # The owners by pid of this process and of all ranks, also of those that have ended.
        self._owners = {os.getpid(): SIDECAR}
        self._samples_neighbours = False
        self._disk_wait_s = float("-inf")
        # Values of the control groups in the sample in progress, because ranks often share a group.
        self._groups: dict[object, tuple[_Counters, float | None]] = {}

    def sample_disk_waits(self, pids: Iterable[int], now_s: float) -> None:
        """Sample which processes wait for a disk, unless the last sample is too recent."""
        if now_s - self._disk_wait_s < _DISK_WAIT_PERIOD_S:
            return
        self._disk_wait_s = now_s
        for pid in pids:
            process = self._processes.setdefault(pid, _SampledProcess(pid))
            with contextlib.suppress(OSError, IndexError):  # The process may have ended.
                process.in_disk_wait += self._waits_for_disk(process)
                process.disk_wait_samples += 1

    def take_signals(self, gc_ns: Mapping[int, int], now_s: float) -> dict[int, dict[str, float]]:
        """Return the signals since the last call, by pid.

        gc_ns: total time of garbage collection by pid.

        Processes that have ended or that are sampled for the first time are left out.
        """
        for pid in self._processes.keys() - gc_ns.keys():
            del self._processes[pid]
        self._groups.clear()
        found, waits = {}, False
        for pid, collected_ns in gc_ns.items():
            process = self._processes.setdefault(pid, _SampledProcess(pid))
            if now_s - process.sampled_s >= _MIN_INTERVAL_S:
                try:
                    self._sample_process(process, collected_ns, now_s)
                except (OSError, IndexError, ValueError):
                    continue  # The process has ended.
            if process.newest:
                found[pid] = process.newest
                waits |= process.newest.get("cpu_wait_share", 0.0) >= _MIN_CPU_WAIT_SHARE
        if self._samples_neighbours and self._neighbours.take_sample(now_s):
            # The CPUs that this node's ranks and their data loader workers may use, by pid.
            job = {
                pid: each.cpus
                for each in self._processes.values()
                for pid in (each.pid, *each.children)
            }
            for pid, signals in found.items():
                signals["neighbour_share"] = self._neighbours.busy_share(
                    self._processes[pid].cpus, job
                )
        self._samples_neighbours = waits
        return found

    def busiest_programs(self, pid: int) -> list[CpuProgram]:
        """Return the programs that recently used this process's CPUs, the busiest first."""
        self._owners |= dict.fromkeys(self._processes, RANK)
        # Children come and go, and their numbers may be other programs' later.
        children = {child: CHILD for each in self._processes.values() for child in each.children}
        return self._neighbours.busiest_programs(
            self._processes.get(pid, _UNKNOWN).cpus, children | self._owners
        )

    def sharing_ranks(self, pid: int) -> int:
        """Return the number of ranks that may use CPUs of this process, including itself."""
        cpus = self._processes.get(pid, _UNKNOWN).cpus
        return sum(not cpus.isdisjoint(each.cpus) for each in self._processes.values())

    def cpu_count(self, pid: int) -> int:
        """Return the number of CPUs that a process may use, or 0 if it is not known."""
        return len(self._processes.get(pid, _UNKNOWN).cpus)

    def worker_count(self, pid: int) -> int:
        """Return the number of child processes, without multiprocessing's resource tracker."""
        return sum(
            _TRACKER not in read_kernel_text(self._proc / str(child) / "cmdline")
            for child in self._processes.get(pid, _UNKNOWN).children
        )

    def control_group_path(self, pid: int) -> str:
        group = self._processes.get(pid, _UNKNOWN).group
        return group.path if group is not None else ""

    # -- parts

    def _sample_process(self, process: _SampledProcess, gc_ns: int, now_s: float) -> None:
        if process.group is None or now_s - process.group_s > _GROUP_PERIOD_S:
            process.group, process.group_s = ControlGroup(process.pid, proc=self._proc), now_s
            process.cpus = os.sched_getaffinity(process.pid)
        process.children = child_pids(process.pid, self._proc)
        # Fields 12, 15 and 39 of a stat file are major faults, CPU time in the kernel, and the CPU
        # on which the thread ran last.
        thread = self._read_stat(f"{process.pid}/task/{process.pid}")
        stats = map(self._read_stat, (process.pid, *process.children))
        of_group, limit_share = self._read_group(process.group)
        counters = {
            **of_group,
            "wait_ns": main_thread_cpu_wait_ns(process.pid, self._proc),
            "kernel_ticks": int(thread[12]),
            "major_faults": sum(int(fields[9]) for fields in stats if fields),
            "gc_ns": gc_ns,
        }
        if process.counters:
            pairs = ((name, process.counters.get(name), value) for name, value in counters.items())
            grown = {
                name: max(0, value - earlier)
                for name, earlier, value in pairs
                if earlier is not None and value is not None
            }
            process.newest = self._compute_signals(process, grown, now_s - process.sampled_s)
            # The kernel shows no clock rates in most virtual machines.
            clock, most = (
                read_kernel_text(f"{self._cpu_folder}/cpu{int(thread[36])}/cpufreq/{name}")
                for name in ("scaling_cur_freq", "cpuinfo_max_freq")
            )
            clock_share = int(clock) / int(most) if clock and most.strip("0") else None
            gauges = {"memory_limit_share": limit_share, "cpu_clock_share": clock_share}
            process.newest.update(
                {name: value for name, value in gauges.items() if value is not None}
            )
        process.counters, process.sampled_s = counters, now_s
        process.disk_wait_samples = process.in_disk_wait = 0

    def _compute_signals(
        self, process: _SampledProcess, grown: Mapping[str, int], elapsed_s: float
    ) -> dict[str, float]:
        """Return the signals of a process. grown: increases of its counters since the last sample."""
        signals = {
            signal: grown[name] / unit / elapsed_s
            for signal, (name, unit) in _RATES.items()
            if name in grown
        }
        if process.disk_wait_samples:
            signals["disk_wait_share"] = process.in_disk_wait / process.disk_wait_samples
        if "quota_periods" in grown:
            periods = grown["quota_periods"]
            signals["cpu_quota_share"] = grown["throttled_periods"] / periods if periods else 0.0
        return signals

    def _read_group(self, group: ControlGroup) -> tuple[_Counters, float | None]:
        """Return counters of a control group, and its memory as a share of the limit.

        The values are read once for each sample.
        """
        if group.key not in self._groups:
            periods, throttled = group.quota_periods() or (None, None)
            counters: _Counters = {
                "refaults": group.refault_count(),
                "quota_periods": periods,
                "throttled_periods": throttled,
                "memory_stall_us": group.stall_time_us("memory"),
            }
            self._groups[group.key] = counters, group.memory_limit_share()
        return self._groups[group.key]

    def _waits_for_disk(self, process: _SampledProcess) -> bool:
        """Return True if the main thread waits for a disk, or sleeps while a child process does."""
        state = self._read_stat(process.pid)[0]
        return state == b"D" or (
            state == b"S"
            and any(self._read_stat(child)[:1] == [b"D"] for child in process.children)
        )

    def _read_stat(self, pid: int | str) -> list[bytes]:
        """Return a stat file's fields from the third one, the state.

        Return [] if the process has ended.

        pid: a process id, or "PID/task/TID" for a thread.
        """
        return read_stat_fields(f"{self._proc}/{pid}/stat")
