"""Tests of launchers that set few variables: shell loops, torch.multiprocessing, Accelerate,
Lightning.

Both nodes' ranks must be recorded in one run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.jobs.launchers.test_torchrun import run_both
from tests.support.launched import SCRIPT, by_shell, on_nodes, why_no_nodes
from tests.support.processes import SCRIPTS
from tests.support.servers import free_port
from torchlens_perf.verdicts import node_state

REASON = why_no_nodes()
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(bool(REASON), reason=REASON),
]


def store() -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


@pytest.mark.long
def test_ranks_started_by_a_loop_are_recorded_in_one_run(tmp_path: Path) -> None:
    """Only MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE are set.

    Each node must find out which ranks are local.
    """
    loops = ([str(SCRIPTS / "launched_loop.py"), first] for first in ("0", "2"))
    done = run_both(tmp_path, *on_nodes(*loops), **store())
    (made,) = done.runs
    processes = [
        each.identity for node in node_state.load_all(made) for each in node.processes.values()
    ]
    assert {each.local_world_size for each in processes} == {None}
    assert {each.launcher for each in processes} == {"environment"}


@pytest.mark.long
def test_ranks_started_by_spawn_are_recorded_in_one_run(tmp_path: Path) -> None:
    """torch.multiprocessing sets no variables, so only torch.distributed has rank and
    world size.
    """
    script = str(SCRIPTS / "launched_spawn.py")
    run_both(
        tmp_path,
        *on_nodes(*([script, first, "4"] for first in ("0", "2"))),
        **store(),
        START_METHOD="fork",
    )


@pytest.mark.long
def test_ranks_started_by_a_shell_loop_are_recorded_in_one_run(tmp_path: Path) -> None:
    """Each rank is a fresh interpreter in a separate shell."""
    loop = 'for i in 0 1; do (export RANK=$(($2 + i)); "$0" "$1"; true) & done; wait'
    commands = [
        by_shell(node, "sh", "-c", loop, sys.executable, SCRIPT, first)
        for node, first in (("node-a", "0"), ("node-b", "2"))
    ]
    run_both(tmp_path, *commands, **store(), WORLD_SIZE="4")


@pytest.mark.long
def test_ranks_spawned_as_fresh_interpreters_are_recorded_in_one_run(tmp_path: Path) -> None:
    """mp.spawn starts the interpreters."""
    script = str(SCRIPTS / "launched_spawn.py")
    commands = [
        by_shell(node, sys.executable, script, first, "4")
        for node, first in (("node-a", "0"), ("node-b", "2"))
    ]
    run_both(tmp_path, *commands, **store())


@pytest.mark.long
def test_accelerate_launch_records_all_ranks_in_one_run(tmp_path: Path) -> None:
    """`accelerate launch` runs on two machines."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    port = free_port()
    options = ["--multi_gpu", "--num_machines=2", "--num_processes=4", "--main_process_ip=127.0.0.1",
               "--mixed_precision=no",
               "--dynamo_backend=no", f"--main_process_port={port}"]  # fmt: skip
    launch = (
        ["-m", "accelerate.commands.launch", *options, f"--machine_rank={node}", SCRIPT]
        for node in range(2)
    )
    run_both(tmp_path, *on_nodes(*launch))


@pytest.mark.long
def test_lightning_launcher_records_all_ranks_in_one_run(tmp_path: Path) -> None:
    """The script is rank 0 of its node, and starts the node's other ranks."""
    pytest.importorskip("lightning", reason="lightning is not installed")
    script = str(SCRIPTS / "launched_lightning.py")
    commands = [
        by_shell(node, "env", f"NODE_RANK={number}", sys.executable, script)
        for number, node in enumerate(("node-a", "node-b"))
    ]
    run_both(tmp_path, *commands, **store())
