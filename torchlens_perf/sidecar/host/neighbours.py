"""Who else uses the CPUs that a rank may run on. In the sidecar; asked only while a rank waits for a CPU.

How busy a CPU is tells the kernel for all programs (/proc/stat). Which ones they are is only known of those that the
sidecar sees: in a container often none but the job's own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MAX_KNOWN = 64  # programs, of the busiest
_KEPT = 0.8  # of what was seen before, at each look
_IDLE_FIELDS = (3, 4)  # of a line of /proc/stat: idle, and idle while something waits for a disk


@dataclasses.dataclass(frozen=True)
class _Seen:
    name: str
    ticks: int
    cpu: int


class Neighbours:
    """Looks at all processes of the node that can be seen. One thread."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._processes: dict[int, _Seen] = {}
        self._busy_ticks: dict[int, int] = {}  # by CPU
        self._before_s = 0.0
        self._busy: dict[int, float] = {}  # by CPU, the share of the time since the look before
        self._took: dict[int, tuple[_Seen, float]] = {}  # by process, how many CPUs it kept busy since then
        self._known: dict[int, tuple[_Seen, float]] = {}  # the same of all looks, older ones counting less

    def update(self, now_s: float) -> bool:
        """Takes stock. Returns whether it is known now who was busy since the last look, which is a few seconds ago."""
        processes, busy_ticks = self._read_processes(), self._read_cpus()
        elapsed_s = now_s - self._before_s
        usable = bool(self._processes) and 0.2 < elapsed_s < 10.0
        self._took, self._busy = {}, {}
        if usable:
            per_s = 1 / TICKS_PER_S / elapsed_s
            for pid, now in processes.items():
                before = self._processes.get(pid)
                ticks = now.ticks - (before.ticks if before is not None else 0)
                if ticks > 0 and (before is None or before.name == now.name):
                    self._took[pid] = now, ticks * per_s
            for cpu, ticks in busy_ticks.items():
                self._busy[cpu] = (ticks - self._busy_ticks.get(cpu, ticks)) * per_s
            self._remember()
        self._processes, self._busy_ticks, self._before_s = processes, busy_ticks, now_s
        return usable

    def busy_share(self, cpus: Collection[int], job: Mapping[int, Collection[int]]) -> float:
        """The share of these CPUs that programs other than the job's kept busy between the last two looks.

        job: processes of the job, and the CPUs that each may use.
        """
        busy = sum(self._busy.get(cpu, 0.0) for cpu in cpus)
        for pid, theirs in job.items():
            _, took = self._took.get(pid, (None, 0.0))
            busy -= took * len(set(theirs) & set(cpus)) / max(1, len(theirs))
        return max(0.0, busy) / max(1, len(cpus))

    def busiest(self, cpus: Collection[int], job: Collection[int]) -> str:
        """The program that was the busiest on these CPUs lately, as "name (pid 7)"; "" if none is seen."""
        of = [(took, pid) for pid, (seen, took) in self._known.items() if seen.cpu in cpus and pid not in job]
        if not of:
            return ""
        _, pid = max(of)
        return f"{self._known[pid][0].name} (pid {pid})"

    def _remember(self) -> None:
        known = {pid: (seen, _KEPT * took) for pid, (seen, took) in self._known.items()}
        for pid, (seen, took) in self._took.items():
            known[pid] = seen, took + (known[pid][1] if pid in known else 0.0)
        busiest = sorted(known.items(), key=lambda item: -item[1][1])[:_MAX_KNOWN]
        self._known = dict(busiest)

    def _read_processes(self) -> dict[int, _Seen]:
        seen = {}
        for entry in os.scandir(self._proc):
            if entry.name.isdigit():
                try:
                    with open(f"{entry.path}/stat", "rb") as file:  # there may be thousands: no Path for each
                        text = file.read()
                except OSError:
                    continue  # it has just ended
                head, _, rest = text.rpartition(b")")
                fields = rest.split()
                name = head.partition(b"(")[2].decode("utf-8", "replace")
                seen[int(entry.name)] = _Seen(name, int(fields[11]) + int(fields[12]), int(fields[36]))
        return seen

    def _read_cpus(self) -> dict[int, int]:
        """By CPU, the ticks in which it was not idle."""
        busy = {}
        for line in (self._proc / "stat").read_text().splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdigit():
                ticks = [int(field) for field in fields[:8]]  # what follows, guests, is in the first two already
                busy[int(name[3:])] = sum(ticks) - sum(ticks[field] for field in _IDLE_FIELDS)
        return busy
