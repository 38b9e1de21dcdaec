"""Tests of torchrun's rendezvous types on two nodes.

One run includes both nodes, and the slow rank of the second node is named.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launched import (
    NODES,
    SCRIPT,
    SLOW_RANK,
    Done,
    on_nodes,
    run,
    torchrun,
    why_no_nodes,
)
from tests.support.servers import free_port
from torchlens_perf.verdicts import node_state

REASON = why_no_nodes()
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(bool(REASON), reason=REASON),
]


# `--rdzv-backend=c10d` has the same effect.
C10D = {"PET_RDZV_BACKEND": "c10d"}


def static(port: int, *arguments: str) -> list[list[str]]:
    meeting = ("--master-addr=127.0.0.1", f"--master-port={port}", *arguments)
    return on_nodes(*(torchrun(f"--node-rank={number}", *meeting, SCRIPT) for number in range(2)))


def c10d(port: int, *arguments: str) -> list[list[str]]:
    return on_nodes(
        *(
            torchrun(
                f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", f"--rdzv-conf=is_host={host}",
                "--local-addr=127.0.0.1", *arguments, SCRIPT,
            )
            for host in (1, 0)
        )
    )  # fmt: skip


def check(done: Done) -> None:
    """Check that one run includes both nodes and names the slow rank of the second node."""
    value = done.report()
    assert value["run"]["nodes"] == sorted(NODES)
    assert [rank["rank"] for rank in value["ranks"]] == [0, 1, 2, 3]
    found = done.straggler()
    assert found is not None, value["verdicts"]


def run_both(folder: Path, *commands: list[str], **environment: str) -> Done:
    """Run a job with a slow rank with and without recording.

    Check the recorded run, and that all results are bit-equal.
    """
    done = run(folder, *commands, SLOW_RANK=str(SLOW_RANK), **environment)
    check(done)
    plain = run(folder / "unwatched", *commands, watched=False, SLOW_RANK="-1", **environment)
    assert done.losses == plain.losses != []
    assert plain.runs == []
    return done


@pytest.mark.long
def test_static_rendezvous_makes_one_run_named_by_node_0(tmp_path: Path) -> None:
    """The run id is "none", and the port is fixed.

    Other nodes receive the run's name from node 0.
    """
    run_both(tmp_path, *static(free_port()))


@pytest.mark.long
def test_reused_rendezvous_id_makes_a_new_run(tmp_path: Path) -> None:
    """A static rendezvous has the same id in the same folder.

    No run contains processes of both jobs.
    """
    job = static(free_port(), "--rdzv-id=100")
    run(tmp_path, *job, STEPS="20")
    done = run(tmp_path, *job, STEPS="20")
    for made in done.runs:
        ranks = [
            each.identity.rank
            for node in node_state.load_all(made)
            for each in node.processes.values()
        ]
        assert len(ranks) == len(set(ranks)), made.path
    assert len(done.runs) >= 2


@pytest.mark.long
def test_c10d_rendezvous_makes_one_run_named_by_its_endpoint(tmp_path: Path) -> None:
    """The endpoint is node 0's address and port, which all nodes know."""
    run_both(tmp_path, *c10d(free_port()), **C10D)
