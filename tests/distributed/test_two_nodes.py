"""Tests of two nodes with two ranks each.

Node 0 judges all ranks. It must name a slow rank with its host, and a silent node.

The nodes are namespaces of this machine with separate host names, shared memory and working
directories.

The nodes share the network, so their sidecars connect as between machines, over the job's store and
their own server.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.device import device
from tests.distributed.test_hang_live import STARTED_S, hang
from tests.support.live_ranks import LiveRanks
from tests.support.processes import SCRIPTS
from tests.support.servers import free_port
from torchlens_perf.sidecar.nodes.endpoints import Endpoints
from torchlens_perf.sidecar.nodes.rendezvous import (
    ExchangeAddress,
    create_token,
    store_key_of_watch,
)

NODES = ("node-a", "node-b")
RANKS = 4
# The slow rank is on the second node.
SLOW_RANK = 3
# A hang is reported after ten seconds without a step.
NOTICED_S = 15.0
# The ranks notice lost connections, and the sidecar tries to reach node 0 for some seconds.
ENDED_S = 120.0


def _why_not() -> str:
    """Return the reason why this machine cannot have a second node, or an empty string."""
    if os.geteuid():
        return "namespaces with names and mounts of their own need root"
    done = subprocess.run(
        [
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            "hostname node-x && mount -t tmpfs tmpfs /dev/shm",
        ],
        capture_output=True,
        text=True,
    )
    return done.stderr.strip() if done.returncode else ""


REASON = _why_not()
pytestmark = [
    pytest.mark.distributed, pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)
]  # fmt: skip


def all_ranks(report: dict[str, Any]) -> bool:
    """Return True if the node's own two ranks have made enough steps for a typical step time."""
    return len(report["ranks"]) == RANKS // 2 and all(
        rank["steps"] >= 40 for rank in report["ranks"]
    )


def planted_straggler(report: dict[str, Any]) -> dict[str, Any] | None:
    """Return the verdict about the planted slow rank.

    Verdicts on other ranks are ignored, because other tests may slow another rank down for a while.
    """
    verdicts = (verdict for verdict in report["verdicts"] if verdict["kind"] == "straggler")
    return next((verdict for verdict in verdicts if verdict["rank"] == SLOW_RANK), None)


def test_slow_rank_is_named_over_an_exchange_with_configured_address_and_token(
    tmp_path: Path,
) -> None:
    """Node 0 names the rank with its host and slow phase, although it has no ring file of that
    rank.

    Node 0 listens on the address of `exchange` with the token of the environment. No file contains
    the token.
    """
    address = f"127.0.0.1:{free_port()}"
    told = {
        "SLOW_RANK": str(SLOW_RANK),
        "SLOW_FROM": "10",
        "TORCHLENS_PERF_EXCHANGE": f"grpc://{address}",
        "TORCHLENS_PERF_EXCHANGE_TOKEN": "S3CRET",
    }
    with LiveRanks(tmp_path, RANKS, NODES, **told) as job:
        verdict = job.wait_for(planted_straggler, 2 * STARTED_S, NODES[0])
        reports = [job.report(node) for node in NODES]
        (published,) = job.run_directory(NODES[0]).nodes.glob("exchange-*")
        found = ExchangeAddress.decode(published.read_bytes())
        (log,) = job.run_directory(NODES[1]).nodes.glob("*.log")
        assert "node 0's sidecar was found by the setting `exchange`" in log.read_text()
        expected = create_token(
            Endpoints(job.job_store, None, address, token="S3CRET"), store_key_of_watch(0)
        )
        files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]

    assert [[rank["rank"] for rank in report["ranks"]] for report in reports] == [[0, 1], [2, 3]]
    assert verdict["phase"] == "compute"
    assert "rank 3" in verdict["text"].lower()
    assert "node-b" in verdict["text"]
    assert (found.port, found.token) == (int(address.rpartition(":")[2]), expected)
    assert len(files) > 5
    assert not any(b"S3CRET" in each for each in files)


@pytest.mark.long
@pytest.mark.skipif(device.missing() is not None, reason=str(device.missing()))
def test_slow_device_of_another_node_is_named(tmp_path: Path) -> None:
    """The exchanged windows contain device times, and so does node 0's verdict."""
    device.build()
    slow = {"SLOW_RANK": str(SLOW_RANK), "SLOW_FROM": "10", "PYTHONPATH": os.pathsep.join(sys.path)}
    with LiveRanks(
        tmp_path, RANKS, NODES, script=str(SCRIPTS / "train_device_ranks.py"), **slow
    ) as job:
        found = job.wait_for(planted_straggler, 2 * STARTED_S, NODES[0])
        report = job.report(NODES[0])

    assert found["phase"] == "forward"
    assert "node-b" in found["text"]
    assert "host time" not in found["text"]
    assert (report["run"]["judged_by"], len(report["ranks"])) == ("device", RANKS // 2)


def hang_of_a_device(value: dict[str, Any]) -> dict[str, Any] | None:
    """Return the verdict if it names a device.

    Before the second report from the other node, all ranks seem to be waiting.
    """
    found: dict[str, Any] | None = hang(value)
    return found if found is not None and found["evidence"]["kind"] == "device" else None


@pytest.mark.long
@pytest.mark.skipif(device.missing() is not None, reason=str(device.missing()))
def test_hung_device_of_another_node_is_named(tmp_path: Path) -> None:
    """In this test, a kernel of rank 2 never ends.

    Node 0 names the rank, its node, the step and the mark without that rank's ring.
    """
    device.build()
    stuck = {"HANG_RANK": "2", "HANG_AT": "60", "PYTHONPATH": os.pathsep.join(sys.path)}
    with LiveRanks(
        tmp_path, RANKS, NODES, script=str(SCRIPTS / "hang_device_ranks.py"), **stuck
    ) as job:
        found = job.wait_for(hang_of_a_device, 2 * STARTED_S, NODES[0])

    assert found["evidence"]["ranks"] == [2]
    assert "but the device of rank 2 (node-b) is in step 60 after the beginning of" in found["text"]
    assert "while the furthest device of ranks 0-1,3 is" in found["text"]


@pytest.fixture(scope="module")
def silence(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Stop all ranks and the sidecar of the other node, then continue them.

    Return node 0's verdict.
    """
    with LiveRanks(tmp_path_factory.mktemp("silence"), RANKS, NODES) as job:
        for node in NODES:
            job.wait_for(all_ranks, STARTED_S, node)
        job.wait_for(lambda report: job.compared(NODES[0]) == RANKS, STARTED_S, NODES[0])
        assert hang(job.report(NODES[0])) is None
        pids = job.rank_pids()
        stopped = [pids[2], pids[3], *job.sidecar_pids(NODES[1])]
        assert len(stopped) == 3
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        found: dict[str, Any] = job.wait_for(hang, NOTICED_S, NODES[0])
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        job.wait_for(lambda report: hang(report) is None, STARTED_S, NODES[0])
    return found


@pytest.mark.long
def test_silent_node_is_named_until_it_continues(silence: dict[str, Any]) -> None:
    """Node 0 names the silent ranks and their host within 15 s, and its own ranks as waiting."""
    assert silence["rank"] in (2, 3)
    assert silence["evidence"]["waiting"] == [0, 1]
    assert "node-b" in silence["text"]


@pytest.mark.long
def test_silent_node_is_distinguished_from_a_hang(silence: dict[str, Any]) -> None:
    """The node was healthy in its last message and failed as a whole, so the advice is about the
    machine.
    """
    assert (silence["evidence"]["kind"], silence["evidence"]["ranks"]) == ("silent", [2, 3])
    assert "stopped reporting when the steps ended" in silence["text"]


@pytest.mark.long
def test_other_node_keeps_its_data_and_says_that_node_0_is_gone(tmp_path: Path) -> None:
    """All processes of node 0 are killed. The sidecar of the other node ends by itself."""
    with LiveRanks(tmp_path, RANKS, NODES) as job:
        for node in NODES:
            job.wait_for(all_ranks, STARTED_S, node)
        job.wait_for(lambda report: job.compared(NODES[0]) == RANKS, STARTED_S, NODES[0])
        pids = job.rank_pids()
        survivors = job.sidecar_pids(NODES[1])
        before = {rank["rank"]: rank["steps"] for rank in job.report(NODES[1])["ranks"]}
        for pid in (*job.sidecar_pids(NODES[0]), pids[0], pids[1]):
            os.kill(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + ENDED_S
        while any(Path(f"/proc/{pid}").exists() for pid in survivors):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        report = job.report(NODES[1])

    steps = {rank["rank"]: rank["steps"] for rank in report["ranks"]}
    # Both ranks failed in the same collective, so one of them may have ended one step more.
    assert steps.keys() == before.keys() == {2, 3}
    assert abs(steps[2] - steps[3]) <= 1
    assert all(steps[rank] >= before[rank] for rank in steps)
    assert report["quality"]["lost"] == 0
    # How the exchange ended depends on what the sidecar was doing.
    notes = " ".join(report["quality"]["notes"])
    assert "node 0's sidecar" in notes or "errors in the exchange between nodes" in notes
    # Both ranks lost a connection, so neither is blamed.
    (verdict,) = (each for each in report["verdicts"] if each["kind"] == "failed")
    assert "Another rank ended before, or the network failed: only 2 of 4" in verdict["text"]
    assert verdict["action"] == "read the logs of the other ranks."
    assert (report["run"]["state"], report["run"]["ranks_seen"]) == ("failed", 2)
