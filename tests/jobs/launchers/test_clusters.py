"""Tests of jobs under the installed srun, mpirun, DeepSpeed launcher and Ray, on two nodes of this
machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.launchers.test_torchrun import run_both
from tests.support.launched import NODES, SCRIPT, SHELL_NODE, STEPS, Done, by_shell, why_no_nodes
from tests.support.processes import SCRIPTS
from tests.support.servers import free_port
from tests.support.slurm import cluster
from torchlens_perf.verdicts import node_state

REASON = why_no_nodes()
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.long,
    pytest.mark.skipif(bool(REASON), reason=REASON),
]


def store() -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def need(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(
            f"not installed: {', '.join(missing)} (docs/guides/launchers.md lists the packages)"
        )


def check_numbers(done: Done, launcher: str) -> None:
    """Check that rank, local rank and local world size have the values of the launcher's row."""
    (made,) = done.runs
    found = sorted(
        (
            each.identity.rank,
            each.identity.local_rank,
            each.identity.local_world_size,
            each.identity.launcher,
        )
        for node in node_state.load_all(made)
        for each in node.processes.values()
    )
    assert found == [(rank, rank % 2, 2, launcher) for rank in range(4)]


@pytest.fixture
def agent(tmp_path: Path) -> str:
    """Return an ssh replacement for mpirun that runs a command on a node of this machine."""
    path = tmp_path / "agent"
    path.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nnode=$1; shift\n'
        f'exec unshare --uts --mount sh -c \'{SHELL_NODE}\' "$node" sh -c "$*"\n'
    )
    path.chmod(0o755)
    return str(path)


def test_mpirun_of_open_mpi_records_all_ranks_in_one_run(tmp_path: Path, agent: str) -> None:
    need("mpirun.openmpi")
    command = [
        "mpirun.openmpi", "--allow-run-as-root", "--mca", "plm_rsh_agent", agent, "--mca", "oob_tcp_if_include", "lo",
        "--host", "node-a:2,node-b:2", "-n", "4", sys.executable, SCRIPT,
    ]  # fmt: skip
    exported = [word for name in ("PYTHONPATH", "TORCHLENS_PERF", "STEPS", "SLOW_RANK", "MASTER_ADDR", "MASTER_PORT",
                                  "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS") for word in ("-x", name)]  # fmt: skip
    done = run_both(tmp_path, [*command[:8], *exported, *command[8:]], **store())
    check_numbers(done, "Open MPI")


def test_mpirun_of_mpich_records_all_ranks_in_one_run(tmp_path: Path, agent: str) -> None:
    """MPICH's mpirun (Hydra), like Intel MPI's, sets no variable that names the job."""
    need("mpirun.mpich")
    command = [
        "mpirun.mpich", "-launcher", "ssh", "-launcher-exec", agent, "-localhost", "127.0.0.1", "-hosts",
        "node-a:2,node-b:2", "-n", "4", sys.executable, SCRIPT,
    ]  # fmt: skip
    done = run_both(tmp_path, command, **store())
    check_numbers(done, "Hydra")


def test_mpiexec_of_intel_mpi_records_all_ranks_in_one_run(tmp_path: Path, agent: str) -> None:
    """mpiexec of Intel MPI sets a variable that names the job."""
    root = os.environ.get("I_MPI_ROOT", "")
    if not os.path.exists(f"{root}/bin/mpiexec.hydra"):
        pytest.skip(
            "Intel MPI is not installed; `make test-launchers` does that, and I_MPI_ROOT may"
            " name it"
        )
    command = [
        f"{root}/bin/mpiexec.hydra", "-launcher", "ssh", "-launcher-exec", agent, "-localhost", "127.0.0.1", "-hosts",
        "node-a,node-b", "-ppn", "2", "-n", "4", sys.executable, SCRIPT,
    ]  # fmt: skip
    done = run_both(tmp_path, command, I_MPI_ROOT=root, **store())
    check_numbers(done, "Intel MPI")
    assert done.runs[0].run_id.startswith("mpi-")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Run a cluster of two nodes on this machine. Return the variables that srun needs."""
    need("slurmctld", "slurmd", "srun", "munged")
    with cluster(tmp_path / "slurm") as environ:
        yield environ


def test_srun_records_all_ranks_in_one_run(tmp_path: Path, slurm: dict[str, str]) -> None:
    """Each task is a rank. Job id and step id name the run, which is the same on all nodes."""
    command = ["srun", "-N2", "-n4", "--ntasks-per-node=2", "--unbuffered", sys.executable, SCRIPT]
    done = run_both(tmp_path, command, **slurm, **store())
    check_numbers(done, "srun")
    assert done.runs[0].run_id.startswith("slurm-")


def test_srun_of_shells_records_all_ranks_in_one_run(tmp_path: Path, slurm: dict[str, str]) -> None:
    """Each task is a shell that starts the rank, so ranks of a node share no parent.

    The cyclic distribution puts ranks 0 and 2 on one node, and 1 and 3 on the other.
    """
    command = [
        "srun",
        "-N2",
        "-n4",
        "--ntasks-per-node=2",
        "-m",
        "cyclic",
        "sh",
        "-c",
        f"{sys.executable} {SCRIPT}; exit $?",
    ]
    run_both(tmp_path, command, **slurm, **store())


def python_with(package: str) -> str:
    """Return a Python interpreter that has the named package, or skip the test."""
    python = os.environ.get("FRAMEWORKS_PYTHON", sys.executable)
    found = (
        f"import importlib.util; raise SystemExit(importlib.util.find_spec({package!r}) is None)"
    )
    if subprocess.run([python, "-c", found]).returncode:
        pytest.skip(f"{package} is not installed; FRAMEWORKS_PYTHON may name a Python that has it")
    return python


def test_ray_train_records_all_ranks_in_one_run(tmp_path: Path) -> None:
    """Ray Train runs on a cluster of two nodes. The worker processes are children of Ray's daemons."""
    python = python_with("ray")
    done = run_both(tmp_path, [python, str(SCRIPTS / "launched_by_ray.py")])
    check_numbers(done, "Ray Train")
    # Ray kills the children of a worker as soon as the worker ends.
    (made,) = done.runs
    assert made.report.exists()
    assert all(rank["steps"] >= STEPS - 1 for rank in done.report()["ranks"])


def test_deepspeed_launcher_records_all_ranks_in_one_run(tmp_path: Path) -> None:
    """DeepSpeed's launcher runs once on each node."""
    python = python_with("deepspeed")
    # The base64 text decodes to {"node-a": [0, 1], "node-b": [0, 1]}.
    where = "eyJub2RlLWEiOiBbMCwgMV0sICJub2RlLWIiOiBbMCwgMV19"
    given = store()
    commands = [
        by_shell(
            node, python, "-m", "deepspeed.launcher.launch", f"--world_info={where}", f"--node_rank={number}",
            "--master_addr=127.0.0.1", f"--master_port={given['MASTER_PORT']}", "--no_local_rank", SCRIPT,
        )
        for number, node in enumerate(NODES)
    ]  # fmt: skip
    done = run_both(tmp_path, *commands, **given)
    check_numbers(done, "DeepSpeed")
