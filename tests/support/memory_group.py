"""Control groups with a memory limit."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.leftovers import eventually

_LIMITS = (
    ("/sys/fs/cgroup", "memory.max"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
)


@pytest.fixture
def memory_group() -> Iterator[Callable[[int], Path]]:
    """Return a function that creates a control group of version 2 or 1 with a limit in bytes."""
    made: list[Path] = []

    def make(limit_bytes: int) -> Path:
        for root, name in _LIMITS:
            folder = Path(root) / f"torchlens-{uuid.uuid4().hex}"
            with contextlib.suppress(OSError):
                folder.mkdir()
                made.append(folder)
                if (folder / name).exists():
                    (folder / name).write_text(str(limit_bytes))
                    return folder
        pytest.skip("no control group can be created here")

    yield make
    for folder in made:
        assert eventually(lambda folder=folder: _is_removed(folder)), folder


def _is_removed(folder: Path) -> bool:
    """Move the group's processes out, and remove it. Processes that are ending keep it busy."""
    with contextlib.suppress(FileNotFoundError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (folder.parent / "cgroup.procs").write_text(pid)
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()
