"""Who else uses the CPUs that a rank may run on. In the sidecar; asked only while a rank waits for a CPU."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MOST_KNOWN = 64  # programs, of the busiest
_HALF_LIFE = 0.9  # of what was seen before, at each look


@dataclasses.dataclass(frozen=True)
class _Seen:
    name: str
    ticks: int
    cpu: int


class Neighbours:
    """Looks at all processes of the node. One thread."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before: dict[int, _Seen] = {}
        self._before_s = 0.0
        self._busy: dict[int, tuple[str, float, int]] = {}  # by process: name, CPUs that it kept busy, the last of them
        self._known: Counter[tuple[int, str, int]] = Counter()

    def look(self, now_s: float) -> bool:
        """Takes stock. Returns whether it is known now who was busy since the last look, which is a few seconds ago."""
        seen = self._processes()
        elapsed_s = now_s - self._before_s
        usable = bool(self._before) and 0.2 < elapsed_s < 10.0
        self._busy = {}
        if usable:
            for pid, now in seen.items():
                before = self._before.get(pid)
                ticks = now.ticks - (before.ticks if before is not None else 0)
                if ticks > 0 and (before is None or before.name == now.name):
                    self._busy[pid] = now.name, ticks / _TICKS_PER_S / elapsed_s, now.cpu
        self._before, self._before_s = seen, now_s
        return usable

    def busy_cpus(self, cpus: Collection[int], own: Collection[int]) -> float:
        """How many of these CPUs others kept busy between the last two looks. own: processes that do not count."""
        return sum(share for pid, (_, share, cpu) in self._busy.items() if cpu in cpus and pid not in own)

    def remember(self, cpus: Collection[int], own: Collection[int]) -> None:
        """Adds who was busy on these CPUs to what busiest() tells of."""
        for key in list(self._known):
            self._known[key] *= _HALF_LIFE  # type: ignore[assignment]
        for pid, (name, share, cpu) in self._busy.items():
            if cpu in cpus and pid not in own:
                self._known[pid, name, cpu] += share  # type: ignore[assignment]
        for key, _ in self._known.most_common()[_MOST_KNOWN:]:
            del self._known[key]

    def busiest(self, cpus: Collection[int], own: Collection[int], names: Mapping[int, str]) -> str:
        """The program that was the busiest on these CPUs lately, as "name (pid 7)"; "" if none was.

        names: of processes that have a better one than their program's.
        """
        of = [(share, key) for key, share in self._known.items() if key[2] in cpus and key[0] not in own]
        if not of:
            return ""
        _, (pid, name, _) = max(of)
        return f"{names.get(pid, name)} (pid {pid})"

    def _processes(self) -> dict[int, _Seen]:
        seen = {}
        for entry in os.scandir(self._proc):
            if entry.name.isdigit():
                try:
                    text = Path(entry.path, "stat").read_bytes()
                except OSError:
                    continue  # it has just ended
                head, _, rest = text.rpartition(b")")
                fields = rest.split()
                name = head.partition(b"(")[2].decode("utf-8", "replace")
                seen[int(entry.name)] = _Seen(name, int(fields[11]) + int(fields[12]), int(fields[36]))
        return seen
