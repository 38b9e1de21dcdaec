"""Read the limits, usage and stall times of a process's control group (version 1 or 2).

See Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst in Linux, and accounting/psi.rst for
pressure stall information.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchlens_perf.run.processes import read_kernel_text

_ROOT = Path("/sys/fs/cgroup")
_PRESSURE = Path("/proc/pressure")
_NO_LIMIT = 1 << 60  # Version 1 represents "no limit" by a very large number.


class ControlGroup:
    """The control group of one process. Each call reads the group's files again.

    Methods return None if the kernel does not provide the value. The group and its memory limits
    are looked up only once.
    """

    def __init__(
        self,
        pid: int,
        *,
        proc: Path = Path("/proc"),
        root: Path = _ROOT,
        pressure: Path = _PRESSURE,
    ) -> None:
        """Raises OSError if there is no such process."""
        self._pressure = pressure
        paths: dict[str, str] = {}
        for line in (proc / str(pid) / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths.update((controller, path) for controller in controllers.split(","))
        # The file of version 2 has a single line, without the name of a controller.
        self._is_v2 = "memory" not in paths
        self.path = paths.get("" if self._is_v2 else "memory", "/")
        """Path of the group in the hierarchy of the memory controller."""
        self._memory = self._find_folder(root if self._is_v2 else root / "memory", self.path)
        self._cpu = (
            self._memory if self._is_v2 else self._find_folder(root / "cpu", paths.get("cpu", "/"))
        )
        self.key = self._memory, self._cpu
        """Two processes with equal keys are in the same group."""
        self._limits = list(self._find_memory_limits(root))

    @staticmethod
    def _find_folder(root: Path, path: str) -> Path:
        """Return the group's folder.

        In a container, the path may belong to the host and be invisible. The root folder is then
        the container's own group.
        """
        folder = root / path.lstrip("/")
        return folder if folder.is_dir() else root

    def memory_limit_share(self) -> float | None:
        """Return the highest ratio of used memory to limit, over the group and its parents."""
        return max((used / limit for used, limit in self._read_memory_use()), default=None)

    def memory_limit_bytes(self) -> int | None:
        """Return the tightest memory limit of the group and its parents."""
        return min((limit for _, limit in self._limits), default=None)

    def oom_kill_count(self) -> int | None:
        """Return how many processes of the group the kernel's OOM killer has ended so far."""
        file = "memory.events" if self._is_v2 else "memory.oom_control"
        count = _read_fields(self._memory / file).get("oom_kill", "")
        return int(count) if count.isdigit() else None

    def refault_count(self) -> int | None:
        """Return the total number of memory pages that were evicted and then needed again."""
        fields = _read_fields(self._memory / "memory.stat")
        found = [
            int(fields[name])
            for name in ("workingset_refault_anon", "workingset_refault_file")
            if name in fields
        ]
        return sum(found) if found else None

    def quota_periods(self) -> tuple[int, int] | None:
        """Return the number of CPU quota periods, and of those in which the quota was exhausted.

        The throttled time is no substitute: it is a sum over CPUs, not a share of the elapsed time.
        """
        fields = _read_fields(self._cpu / "cpu.stat")
        periods = int(fields.get("nr_periods", 0))
        return (periods, int(fields["nr_throttled"])) if periods else None

    def stall_time_us(self, resource: str) -> int | None:
        """Return the total time during which at least one task of the group waited for a resource.

        resource: "memory" or "io". If the group has no value, the node's value is returned.
        """
        for path in (self._memory / f"{resource}.pressure", self._pressure / resource):
            # The first line, "some", is the time during which at least one task waited.
            some = read_kernel_text(path).partition("\n")[0]
            if some:  # Without pressure accounting in the kernel, the text is empty.
                return int(some.rpartition("total=")[2])
        return None

    def _read_memory_use(self) -> Iterator[tuple[int, int]]:
        """Yield the used bytes and the limit, for each memory limit of the group and its parents.

        Inactive file pages do not count as used. They fill any group that reads files, and the
        kernel reclaims them first.
        """
        for folder, limit in self._limits:
            used = _read_integer(
                folder / ("memory.current" if self._is_v2 else "memory.usage_in_bytes")
            )
            fields = _read_fields(folder / "memory.stat")
            droppable = int(
                fields.get("inactive_file" if self._is_v2 else "total_inactive_file", 0)
            )
            if used is not None:
                yield max(0, used - droppable), limit

    def _find_memory_limits(self, root: Path) -> Iterator[tuple[Path, int]]:
        """Yield folder and memory limit, for this group and its parents where they have a limit."""
        most = "memory.max" if self._is_v2 else "memory.limit_in_bytes"
        for folder in (self._memory, *self._memory.parents):
            if folder.is_relative_to(root):
                limit = _read_integer(folder / most)
                if limit is not None and 0 < limit < _NO_LIMIT:
                    yield folder, limit


def _read_integer(path: Path) -> int | None:
    text = read_kernel_text(path)
    return int(text) if text.isdigit() else None  # The file may contain "max".


def _read_fields(path: Path) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in read_kernel_text(path).splitlines() if " " in line)
