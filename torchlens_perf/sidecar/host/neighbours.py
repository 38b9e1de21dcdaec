"""Find other programs that use a rank's CPUs. Sampled only while a rank waits for a CPU.

/proc/stat shows the total load of a CPU. The sidecar identifies only programs that it can see. In a
container, the sidecar often sees only the job's own processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from torchlens_perf.run.cpu_programs import OTHER, OTHER_USER, CpuProgram
from torchlens_perf.run.processes import TICKS_PER_S, read_kernel_bytes

_MAX_PROGRAMS = 64
_DECAY_PER_SAMPLE = 0.8
# Programs that use less of a CPU are not named.
_MIN_CPUS = 0.05
_IDLE_FIELDS = (3, 4)  # Fields "idle" and "iowait" of a CPU's line in /proc/stat.


@dataclasses.dataclass(frozen=True)
class _ProcessTicks:
    name: str
    ticks: int
    cpu: int


class CpuNeighbours:
    """Sampler of the CPU use of all visible processes of the node. Not thread-safe."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._processes: dict[int, _ProcessTicks] = {}
        self._busy_ticks: dict[int, int] = {}  # by CPU
        self._before_s = 0.0
        self._busy: dict[int, float] = {}  # busy share of each CPU since the previous sample
        # Process and number of used CPUs since the previous sample, by pid.
        self._used: dict[int, tuple[_ProcessTicks, float]] = {}
        # Process and decaying sum of its samples, by pid.
        self._weighted: dict[int, tuple[_ProcessTicks, float]] = {}
        self._weights = 0.0

    def take_sample(self, now_s: float) -> bool:
        """Take a sample. Return True if there is a recent previous sample to compare with."""
        processes, busy_ticks = dict(self._read_process_ticks()), dict(self._read_busy_ticks())
        elapsed_s = now_s - self._before_s
        usable = bool(self._processes) and 0.2 < elapsed_s < 10.0
        self._used, self._busy = {}, {}
        if usable:
            per_s = 1 / TICKS_PER_S / elapsed_s
            for pid, now in processes.items():
                before = self._processes.get(pid)
                ticks = now.ticks - (before.ticks if before is not None else 0)
                if ticks > 0 and (before is None or before.name == now.name):
                    self._used[pid] = now, ticks * per_s
            self._busy = {
                cpu: (ticks - self._busy_ticks.get(cpu, ticks)) * per_s
                for cpu, ticks in busy_ticks.items()
            }
            self._update_weighted_use()
        self._processes, self._busy_ticks, self._before_s = processes, busy_ticks, now_s
        return usable

    def busy_share(self, cpus: Collection[int], job: Mapping[int, Collection[int]]) -> float:
        """Return the share of these CPUs that programs outside the job used between two samples.

        job: the CPUs that each process of the job may use, by pid.
        """
        busy = sum(self._busy.get(cpu, 0.0) for cpu in cpus)
        for pid, theirs in job.items():
            _, used = self._used.get(pid, (None, 0.0))
            # A process may also run on CPUs outside `cpus`. Assume that it uses all its allowed
            # CPUs evenly.
            busy -= used * len(set(theirs) & set(cpus)) / max(1, len(theirs))
        return max(0.0, busy) / max(1, len(cpus))

    def busiest_programs(
        self, cpus: Collection[int], owners: Mapping[int, str]
    ) -> list[CpuProgram]:
        """Return the visible programs that recently used these CPUs, the busiest first.

        owners: the owner of each process of the job, by pid.
        """
        found = [
            CpuProgram(seen.name, pid, used / self._weights, owners.get(pid) or self._owner(pid))
            for pid, (seen, used) in self._weighted.items()
            if seen.cpu in cpus and used >= _MIN_CPUS * self._weights
        ]
        return sorted(found, key=lambda each: -each.cpus)

    def _owner(self, pid: int) -> str:
        with contextlib.suppress(OSError):  # The process may have ended.
            if (self._proc / str(pid)).stat().st_uid != os.getuid():
                return OTHER_USER
        return OTHER

    def _update_weighted_use(self) -> None:
        self._weights = _DECAY_PER_SAMPLE * self._weights + 1
        weighted = {
            pid: (seen, _DECAY_PER_SAMPLE * used) for pid, (seen, used) in self._weighted.items()
        }
        for pid, (seen, used) in self._used.items():
            weighted[pid] = seen, used + (weighted[pid][1] if pid in weighted else 0.0)
        busiest = sorted(weighted.items(), key=lambda item: -item[1][1])[:_MAX_PROGRAMS]
        self._weighted = dict(busiest)

    def _read_process_ticks(self) -> Iterator[tuple[int, _ProcessTicks]]:
        for entry in os.scandir(self._proc):
            if entry.name.isdigit():
                try:
                    # There may be thousands of processes, so avoid creating a Path for each.
                    text = read_kernel_bytes(f"{entry.path}/stat")
                except OSError:
                    continue  # The process has just ended.
                # A process name may contain spaces and parentheses, so the fields begin after the
                # last ")".
                head, _, rest = text.rpartition(b")")
                fields = rest.split()
                name = head.partition(b"(")[2].decode("utf-8", "replace")
                yield (
                    int(entry.name),
                    _ProcessTicks(name, int(fields[11]) + int(fields[12]), int(fields[36])),
                )

    def _read_busy_ticks(self) -> Iterator[tuple[int, int]]:
        """Yield each CPU with the number of ticks in which it was busy."""
        for line in (self._proc / "stat").read_text().splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdigit():
                # The fields after the first eight are times of guests, which the first two fields
                # include.
                ticks = [int(field) for field in fields[:8]]
                yield int(name[3:]), sum(ticks) - sum(ticks[field] for field in _IDLE_FIELDS)
