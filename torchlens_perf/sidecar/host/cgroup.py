"""Read the limits, usage and stall times of a process's control group, version 1 or 2.

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

    Methods return None if the kernel does not provide the value. The group and the folders that
    have a memory limit are looked up once.
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
        # Version 2 has a single line, without the name of a controller.
        self._is_v2 = "memory" not in paths
        self.path = paths.get("" if self._is_v2 else "memory", "/")
        """Path of the group in the hierarchy of the memory controller."""
        self._memory = self._find_folder(root if self._is_v2 else root / "memory", self.path)
        self._cpu = (
            self._memory if self._is_v2 else self._find_folder(root / "cpu", paths.get("cpu", "/"))
        )
        self._limits = list(self._find_memory_limits(root))

    @staticmethod
    def _find_folder(root: Path, path: str) -> Path:
        """Return the group's folder.

        In a container, the path may be the host's, which is not visible. The root is then the
        container's own group.
        """
        folder = root / path.lstrip("/")
        return folder if folder.is_dir() else root

    def memory_limit_share(self) -> float | None:
        """Return used memory divided by the limit of the group or a parent, whichever is higher."""
        return max((used / limit for used, limit in self._read_memory_use()), default=None)

    def memory_left_bytes(self) -> int | None:
        """Return the bytes that are left below the limits of the group and its parents."""
        return min((limit - used for used, limit in self._read_memory_use()), default=None)

    def refault_count(self) -> int | None:
        """Return the number of pages so far that were evicted and then needed again."""
        fields = _read_fields(self._memory / "memory.stat")
        found = [
            int(fields[name])
            for name in ("workingset_refault_anon", "workingset_refault_file")
            if name in fields
        ]
        return sum(found) if found else None

    def quota_periods(self) -> tuple[int, int] | None:
        """Return the periods of the CPU quota so far, and those in which the quota was used up.

        The throttled time is not used, because it adds up over CPUs and is not a share of the time.
        """
        fields = _read_fields(self._cpu / "cpu.stat")
        periods = int(fields.get("nr_periods", 0))
        return (periods, int(fields["nr_throttled"])) if periods else None

    def stall_time_us(self, resource: str) -> int | None:
        """Return the total time in which at least one task of the group waited for a resource.

        resource: "memory" or "io". Without a value for the group, the node's is returned.
        """
        for path in (self._memory / f"{resource}.pressure", self._pressure / resource):
            # The first line, "some", counts the time in which at least one task waited.
            some = read_kernel_text(path).partition("\n")[0]
            if some:  # The text is empty if the kernel does not account for pressure.
                return int(some.rpartition("total=")[2])
        return None

    def _read_memory_use(self) -> Iterator[tuple[int, int]]:
        """Yield used bytes and the limit, for each limit of the group and its parents.

        Inactive file pages do not count as used: they fill any group that reads files, and the
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
        """Yield folder and limit of each group with a limit, among this group and its parents."""
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
