"""A job reaches the memory limit of its control group: the kernel ends the sidecar, not the job."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import SCRIPTS, clean_environ, read_by_hand, report
from torchlens_perf.run.directory import RunDirectory

JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


@pytest.fixture
def group() -> Iterator[Path]:
    """Yield a new memory control group, of version 1 or 2."""
    version_1 = Path("/sys/fs/cgroup/memory")
    parent = version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")
    made = parent / f"torchlens-perf-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"control groups of {parent} cannot be made: {error}")
    if not (made / "memory.stat").exists():
        made.rmdir()
        pytest.skip(f"control groups of {parent} have no memory limit")
    yield made
    deadline_s = time.monotonic() + 60
    while (made / "cgroup.procs").read_text() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    with contextlib.suppress(OSError):
        made.rmdir()


@pytest.mark.long
@pytest.mark.parametrize("room_mb", [40, 55, 70])
def test_kernel_ends_the_sidecar_before_a_job_that_uses_most_of_the_memory(
    room_mb: int, group: Path, tmp_path: Path
) -> None:
    """The sidecar needs about 100 MB. Its records can be read when there is memory."""
    script = str(SCRIPTS / "train_in_memory_group.py")
    done = subprocess.run(
        ["sh", "-c", JOIN, str(group), sys.executable, script, str(group), str(room_mb), str(tmp_path)],
        cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    path, _, steps = done.stdout.strip().rpartition(" ")
    run = RunDirectory(Path(path))
    assert f"Next: torchlens-perf sidecar {run.path}" in done.stderr
    read_by_hand(run.path, tmp_path)
    value = report(run)
    assert value["ranks"][0]["steps"] == int(steps)
    assert value["quality"]["lost"] == 0
