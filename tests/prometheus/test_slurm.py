"""The Slurm snippets alone, and with real daemons for two nodes on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launched import SCRIPT, why_no_nodes
from tests.support.processes import ROOT, clean_environ, runs
from tests.support.prometheus_server import DEPLOY
from tests.support.servers import free_port, wait_for
from tests.support.slurm import cluster
from torchlens_perf.config import from_environment

TASK_PROLOG, EPILOG = DEPLOY / "slurm" / "task-prolog.sh", DEPLOY / "slurm" / "epilog.sh"
NOBODY = 65534
REASON = why_no_nodes() or (
    "" if shutil.which("slurmctld") else "Slurm is not installed: docs/guides/launchers.md"
)


def printed(**environment: str) -> dict[str, str]:
    """Return the variables that the task prolog sets."""
    done = subprocess.run(
        ["sh", str(TASK_PROLOG)], env=environment, capture_output=True, text=True, check=True
    )
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert {word for word, _ in lines} <= {"export"}
    return dict(pair.split("=", 1) for _, pair in lines)


def test_task_prolog_keeps_settings_of_the_user() -> None:
    """The prolog sets only known settings. An empty value of the user is kept too."""
    found = printed()
    assert found.pop("TORCHLENS_PERF") == "1"
    assert from_environment(found) == {"prometheus": "0.0.0.0:9464"}
    assert printed(TORCHLENS_PERF="0", TORCHLENS_PERF_PROMETHEUS="") == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="an epilog runs as root")
def test_epilog_removes_files_of_a_user_without_processes(tmp_path: Path) -> None:
    """Other users' files are kept. Links are removed and not followed.

    Nothing is removed while the user has a process.
    """
    left = Path(f"/dev/shm/torchlens-perf-{3_000_000_000 + os.getpid()}")
    other = left.with_name(f"{left.name}0")
    (left / "run").mkdir(parents=True)
    (left / "run" / "ring").write_bytes(b"x")
    other.mkdir()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")

    def epilog(uid: str) -> None:
        subprocess.run(
            ["sh", str(EPILOG)], env={"SLURM_JOB_UID": uid, "PATH": os.environ["PATH"]}, check=True
        )

    try:
        epilog("")
        epilog("0")  # Root has a process: this test.
        assert left.exists()
        epilog(left.name.rpartition("-")[2])
        assert not left.exists()
        assert other.exists()
        left.symlink_to(precious)
        epilog(left.name.rpartition("-")[2])
        assert not left.is_symlink()
        assert (precious / "file").read_text() == "kept"
    finally:
        shutil.rmtree(left, ignore_errors=True)
        other.rmdir()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder that other users can enter."""
    folder = Path(tempfile.mkdtemp(prefix=f"slurm-{uuid.uuid4().hex[:6]}-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_unchanged_script_under_slurm_is_recorded_and_scraped(open_folder: Path) -> None:
    """The task prolog starts the recording.

    The two nodes share one network, so the second one reports that the port is in use. The epilog
    cleans up.
    """
    scripts = f"TaskProlog={TASK_PROLOG}\nEpilog={EPILOG}"
    work = open_folder / "work"
    work.mkdir()
    with cluster(open_folder / "slurm", scripts) as environ:
        added = {
            **environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
            "STEPS": "400", "PYTHONPATH": str(ROOT), "TORCHLENS_PERF_PROMETHEUS": str(free_port()),
        }  # fmt: skip
        command = ["srun", "-N2", "-n4", "--ntasks-per-node=2", sys.executable, SCRIPT]
        done = subprocess.run(
            command, cwd=work, env=clean_environ(added), capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, done.stderr
        (run,) = {each.path.resolve(): each for each in runs(work)}.values()
        logs = [path.read_text() for path in sorted(run.nodes.glob("*.log"))]
        assert [("/metrics at http://127.0.0.1:" in log, "Address already in use" in log) for log in logs] in (
            [(True, False), (False, True)], [(False, True), (True, False)],
            # The second sidecar may open the port after the first one has closed it.
            [(True, True), (True, False)], [(True, False), (True, True)],
        ), logs  # fmt: skip

        name = f"torchlens-perf-{NOBODY}"
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        wrapped = f"--wrap=mkdir -p /dev/shm/{name}/run && sleep 2"
        batch = [
            *user,
            "sbatch",
            "-N1",
            "-n1",
            "-w",
            "node-a",
            "--output=/dev/null",
            "--chdir=/",
            wrapped,
        ]
        subprocess.run(batch, cwd="/", env={**os.environ, **environ}, check=True, timeout=20)

        def left() -> str:
            """Return the files of root's jobs in the node's shared memory."""
            command = ["srun", "-N1", "-w", "node-a", "--overcommit", "ls", "/dev/shm"]
            return subprocess.run(
                command, cwd="/", env={**os.environ, **environ}, capture_output=True, text=True
            ).stdout

        assert wait_for(lambda: name in left().split(), 20)
        assert wait_for(lambda: name not in left().split(), 40)
