"""The control group of a process: its limits, what it uses of them, and how much it waits. Version 1 and 2.

Linux, Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst; pressure stall information: accounting/psi.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchlens_perf.run.processes import text_of

_ROOT = Path("/sys/fs/cgroup")
_PRESSURE = Path("/proc/pressure")
_NO_LIMIT = 1 << 60  # version 1 says so by a very large number


class ControlGroup:
    """Reads the files of one process's group anew at each question; None for what the kernel does not tell.

    Which group it is, and which limits there are, is looked up once.
    """

    def __init__(self, pid: int, *, proc: Path = Path("/proc"), root: Path = _ROOT, pressure: Path = _PRESSURE) -> None:
        """Raises OSError where there is no such process."""
        self._pressure = pressure
        paths: dict[str, str] = {}
        for line in (proc / str(pid) / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths.update((controller, path) for controller in controllers.split(","))
        self._is_v2 = "memory" not in paths
        self.path = paths.get("" if self._is_v2 else "memory", "/")
        """The group's name in its hierarchy, that of its memory."""
        self._memory = self._folder(root if self._is_v2 else root / "memory", self.path)
        self._cpu = self._memory if self._is_v2 else self._folder(root / "cpu", paths.get("cpu", "/"))
        self._limits = list(self._memory_limits(root))

    @staticmethod
    def _folder(root: Path, path: str) -> Path:
        """In a container, the path may be the host's, which is not visible: there the root is the container's group."""
        folder = root / path.lstrip("/")
        return folder if folder.is_dir() else root

    def memory_limit_share(self) -> float | None:
        """Used memory by the limit, of the group or of one around it; None without a limit."""
        return max((used / limit for used, limit in self._memory_used()), default=None)

    def memory_left_bytes(self) -> int | None:
        """How much more memory the group may use, by its own limit or one around it; None without a limit."""
        return min((limit - used for used, limit in self._memory_used()), default=None)

    def refaults(self) -> int | None:
        """Pages that were evicted and needed again so far."""
        fields = _fields(self._memory / "memory.stat")
        found = [int(fields[name]) for name in ("workingset_refault_anon", "workingset_refault_file") if name in fields]
        return sum(found) if found else None

    def quota_periods(self) -> tuple[int, int] | None:
        """How many periods of its CPU quota the group has run in so far, and in how many it has used it up; None
        without a quota. (Its throttled time adds up over CPUs: it is no share of the time.)"""
        fields = _fields(self._cpu / "cpu.stat")
        periods = int(fields.get("nr_periods", 0))
        return (periods, int(fields["nr_throttled"])) if periods else None

    def stall_us(self, resource: str) -> int | None:
        """How long so far at least one task of the group, or else of the node, has waited for "memory" or "io"."""
        for path in (self._memory / f"{resource}.pressure", self._pressure / resource):
            some = text_of(path).partition("\n")[0]
            if some:  # else there is no such file, or pressure accounting is switched off
                return int(some.rpartition("total=")[2])
        return None

    def _memory_used(self) -> Iterator[tuple[int, int]]:
        """Of each limit, what is used of it, and the limit, in bytes.

        Without pages of files that were not used again: they fill any group that reads files, and are let go first.
        """
        for folder, limit in self._limits:
            used = _integer(folder / ("memory.current" if self._is_v2 else "memory.usage_in_bytes"))
            fields = _fields(folder / "memory.stat")
            droppable = int(fields.get("inactive_file" if self._is_v2 else "total_inactive_file", 0))
            if used is not None:
                yield max(0, used - droppable), limit

    def _memory_limits(self, root: Path) -> Iterator[tuple[Path, int]]:
        """Of this group and those around it, the folders of those that have a limit, and that."""
        most = "memory.max" if self._is_v2 else "memory.limit_in_bytes"
        for folder in (self._memory, *self._memory.parents):
            if folder.is_relative_to(root):
                limit = _integer(folder / most)
                if limit is not None and 0 < limit < _NO_LIMIT:
                    yield folder, limit


def _integer(path: Path) -> int | None:
    text = text_of(path)
    return int(text) if text.isdigit() else None  # "max"


def _fields(path: Path) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in text_of(path).splitlines() if " " in line)
