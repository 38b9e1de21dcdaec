"""Control groups with a limit, for planted faults and tests.

The groups need root, and work with control-group versions 1 and 2.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class LimitedGroup:
    """A control group for this process.

    The group limits memory to some bytes, or reads from a file's disk to some bytes a second.
    """

    def __init__(self, resource: str, limit: int, file: Path | None = None) -> None:
        """Create the group. `resource` is "memory" or "io". Raises OSError without permission."""
        controller = {"memory": "memory", "io": "blkio"}[resource]
        is_v1 = (ROOT / controller).is_dir()
        base = ROOT / controller if is_v1 else ROOT
        path = next(
            line.split(":", 2)[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.split(":", 2)[1] in ("" if not is_v1 else controller, controller)
        )
        self._home = base / path.lstrip("/")
        self._folder = base / f"torchlens_perf-{resource}-{os.getpid()}"
        self._folder.mkdir()
        if resource == "memory":
            (self._folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(
                str(limit)
            )
        else:
            assert file is not None
            device = file.stat().st_dev
            disk = f"{os.major(device)}:{os.minor(device)}"
            name, text = ("blkio.throttle.read_bps_device", f"{disk} {limit}")
            if not is_v1:
                name, text = "io.max", f"{disk} rbps={limit}"
            (self._folder / name).write_text(text)

    def enter(self) -> None:
        """Move this process into the group, which limits its reads and allocations."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def leave(self) -> None:
        """Move this process back and remove the group."""
        (self._home / "cgroup.procs").write_text(str(os.getpid()))
        self._folder.rmdir()
