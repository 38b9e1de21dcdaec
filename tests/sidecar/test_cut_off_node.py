"""Tests of a node that cannot reach node 0 and judges its own ranks meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sidecar.nodes.conftest import FAST
from tests.support.in_memory import InMemoryExporter
from tests.support.ranks import HOST, Rank, run_without_traces
from tests.support.servers import free_port
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.verdicts import Alert
from torchlens_perf.sidecar.cluster import ClusterLink
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.nodes.endpoints import Endpoints
from torchlens_perf.sidecar.nodes.exchange import Exchange
from torchlens_perf.sidecar.nodes.rendezvous import store_key_of_watch
from torchlens_perf.verdicts.finding_log import FindingLog

WORK = {"data": 1, "forward": 4, "communication": 2, "backward": 6, "host": 1}
WITHIN_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with run_without_traces(tmp_path) as made:
        yield made


class Node:
    """The second of two nodes, with ranks 2 and 3. Rank 3 is slow."""

    def __init__(self, made: RunDirectory, places: Endpoints) -> None:
        of_node = {"local_world_size": 2}
        self.ranks = [
            Rank(
                made,
                rank,
                4,
                exchange=f"grpc://{places.coordinator}",
                identity={"local_rank": rank - 2, **of_node},
            )
            for rank in (2, 3)
        ]
        self.exporter = InMemoryExporter()
        self.sidecar = Sidecar(made, HOST, self.exporter, lambda directory, asked: None)

    def steps(self) -> None:
        self.ranks[0].steps(150, **WORK)
        self.ranks[1].steps(150, **{**WORK, "forward": 9})

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < deadline_s, (
                self.alerts,
                self.sidecar.monitor.cluster.notes(),
            )
            self.sidecar.read_rings()
            self.sidecar.count_records()
            self.sidecar.judge_ranks(time.monotonic())
            self.sidecar.export_results()
            time.sleep(0.05)

    @property
    def alerts(self) -> list[Alert]:
        return self.exporter.alerts


def test_cut_off_node_raises_alerts_until_node_0_is_back(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    places = Endpoints(("127.0.0.1", 1), run.nodes, f"127.0.0.1:{free_port()}")
    node = Node(run, places)
    node.sidecar.monitor.cluster = ClusterLink(
        HOST, run.run_id, cut_off_after_s=1.0, node_0_timeout_s=0.5
    )
    node.steps()
    node.until(lambda: bool(node.alerts))
    (started,) = node.alerts
    assert (started.change, started.rank) == ("started", 3)
    assert started.text.startswith(
        f"Only from node {HOST}, which cannot reach node 0: Rank 3 ({HOST}) is slow"
    )
    assert node.exporter.assessment is not None
    assert not node.exporter.assessment.whole_job
    (of_job,) = FindingLog(run.run_id).record_changes(
        0, node.sidecar.state.findings, None, node.sidecar.monitor.job.places, started.unix_ns
    )
    # Node 0 raises a separate alert. Neither of the two alerts ends the other one.
    assert of_job.about != started.about

    node_0 = Exchange(places, store_key_of_watch(0), "node-0", True, timing=FAST)
    try:
        node.until(lambda: len(node.alerts) > 1)
        node.steps()
        node.until(lambda: node.sidecar.state.findings.last_step > 250)
    finally:
        node.sidecar.wait_for_last_exchange()
        node_0.close()
        node.sidecar.close()
        for rank in node.ranks:
            rank.close()
    _, ended = node.alerts
    assert (ended.change, ended.about) == ("ended", started.about)
    assert ended.text.endswith("This alert ends: another node judges this from now on.")
