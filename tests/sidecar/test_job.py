"""Tests of a sidecar's view of the job: data of other nodes, and the text of a hang."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.support import progress
from tests.support.findings import episode
from tests.support.node_view import NodeView
from tests.support.planted import places
from tests.support.ranks import identity_of, make_run
from tests.support.simulations import table_of
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.rank_facts import RankFacts
from torchlens_perf.sidecar import hang_watch
from torchlens_perf.sidecar.cluster import ClusterLink
from torchlens_perf.sidecar.host.stacks import Stack
from torchlens_perf.sidecar.job_generation import JobGeneration
from torchlens_perf.sidecar.nodes import summary
from torchlens_perf.sidecar.nodes.endpoints import Endpoints
from torchlens_perf.sidecar.nodes.messages import CollectedPosts, NodeContact, ReceivedPost
from torchlens_perf.simulate.simulation import Simulation, Topology
from torchlens_perf.verdicts.stragglers.findings import StragglerGroup
from torchlens_perf.verdicts.words.hang import HangEvidence, RankStack, build_hang_verdict

MEETING = Endpoints(("127.0.0.1", 1))


class Wire:
    """A fake exchange without a network. An exchange in which node 0 receives each post at once."""

    def __init__(self) -> None:
        self.sent: list[ReceivedPost] = []
        self.word = b""
        self.links: dict[str, bytes] = {}
        self.contacts: dict[str, NodeContact] = {}

    def open(self, places: Endpoints, key: str, node: str, merges: bool) -> Any:
        return End(self, node)


class End:
    time_without_contact_s = 0.0

    def __init__(self, wire: Wire, node: str) -> None:
        self._wire, self._node = wire, node

    def post(self, payloads: Mapping[int, bytes]) -> None:
        self._wire.sent += [
            ReceivedPost(self._node, 0.0, {rank: payload}) for rank, payload in payloads.items()
        ]

    def collect_posts(self) -> CollectedPosts:
        received, self._wire.sent = self._wire.sent, []
        return CollectedPosts(received, self._wire.contacts)

    def set_instructions(self, reply: bytes) -> None:
        self._wire.word = reply

    def instructions(self) -> bytes:
        return self._wire.word

    def set_links(self, links: bytes) -> None:
        self._wire.links[self._node] = links

    def link_reports(self) -> list[bytes]:
        return list(self._wire.links.values())

    def notes(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


def test_node_waits_15_s_for_the_generations_of_node_0(tmp_path: Path) -> None:
    now_s, run = 0.0, make_run(tmp_path)
    cluster = ClusterLink("node-1", clock=lambda: now_s)
    job = JobGeneration(0, clock=lambda: now_s)
    cluster.add_generation(_identity(run, 1), 0)
    assert not cluster.awaits_node_0(job)
    job.meeting_points[1] = MEETING
    waits = {}
    for now_s in (0.0, 14.9, 15.1):
        waits[now_s] = cluster.awaits_node_0(job)

    assert waits == {0.0: True, 14.9: True, 15.1: False}


def test_slow_module_of_another_nodes_rank_is_named(tmp_path: Path) -> None:
    """The slow rank must have the same modules as node 0's ranks."""
    wire, run, at = Wire(), make_run(tmp_path), places(4, node_size=2)
    nodes = [NodeView(f"node-{number}", wire.open) for number in range(2)]
    for number, view in enumerate(nodes):
        view.begin(0, _identity(run, 2 * number))
    times_ns = [{"a": 1e6, "b": 4e6}, {"a": 1e6, "b": 4e6}, {"a": 1e6, "b": 7e6}, {"a": 1e6}]
    steps = next(Simulation(Topology(4)).steps(20))
    for rank in (2, 3, 0, 1):
        view, identity = nodes[rank // 2], _identity(run, rank)
        view.job.add_steps(identity, at[rank], table_of(steps, rank), MEETING)
        view.job.set_progress(
            identity,
            at[rank],
            progress.rank(rank, state="running"),
            RankFacts(),
            modules_ns=times_ns[rank],
        )
    nodes[1].update(1.0)
    nodes[0].update(1.0)

    assert nodes[0].job.module_times.excess_over_median_ns(2) == pytest.approx(
        {"a": 0.0, "b": 3e6}, abs=4e4
    )
    assert nodes[0].job.module_times.excess_over_median_ns(3) == {}


def test_cause_of_another_nodes_slow_rank_is_found(tmp_path: Path) -> None:
    """The rank's signals arrive with its windows, and are compared with those of other ranks."""
    wire, run, at = Wire(), make_run(tmp_path), places(4, node_size=2)
    nodes = [NodeView(f"node-{number}", wire.open) for number in range(2)]
    for number, view in enumerate(nodes):
        view.begin(0, _identity(run, 2 * number))
    steps = next(Simulation(Topology(4)).steps(20))
    for second in range(8):
        for rank in (2, 3, 0, 1):
            view, identity = nodes[rank // 2], _identity(run, rank)
            if second == 0:
                view.job.add_steps(identity, at[rank], table_of(steps, rank), MEETING)
            now = progress.rank(rank, step=100 + 10 * second, state="running")
            view.job.set_progress(identity, at[rank], now, RankFacts())
            view.job.add_metrics(
                {rank: {"gc_share": 0.25 * (rank == 2), "cpu_wait_share": 0.0}}, float(second)
            )
        nodes[1].update(float(second))
        nodes[0].update(float(second))
    found = nodes[0].job.diagnose_straggler(
        StragglerGroup("rank", "", (2,), episode(2, since=100)), {}
    )
    diagnosis_of_rank_1 = nodes[0].job.diagnose_straggler(
        StragglerGroup("rank", "", (1,), episode(1, since=100)), {}
    )

    assert [cause.kind for cause in found.causes] == ["gc"]
    assert found.causes[0].evidence == {"gc_share": 0.25, "others_gc_share": 0.0}
    assert diagnosis_of_rank_1.causes == ()
    assert diagnosis_of_rank_1.looked_at == ("garbage collection", "waits for a CPU")


def two_nodes(tmp_path: Path) -> tuple[Wire, list[NodeView]]:
    """Return two nodes, each with two ranks that have made steps.

    The second node has sent its posts.
    """
    wire, run, at = Wire(), make_run(tmp_path), places(4, node_size=2)
    nodes = [NodeView(f"node-{number}", wire.open) for number in range(2)]
    for number, view in enumerate(nodes):
        view.begin(0, _identity(run, 2 * number))
    steps = next(Simulation(Topology(4)).steps(20))
    for rank in (2, 3, 0, 1):
        view, identity = nodes[rank // 2], _identity(run, rank)
        view.job.add_steps(identity, at[rank], table_of(steps, rank), MEETING)
        view.job.set_progress(identity, at[rank], progress.rank(rank, state="running"), RankFacts())
    nodes[1].update(1.0)
    return wire, nodes


def test_node_of_another_version_is_left_out_with_a_note(tmp_path: Path) -> None:
    """The other nodes are judged as usual."""
    wire, nodes = two_nodes(tmp_path)
    wire.sent += [ReceivedPost("node-2/4", 0.0, {4: b"of another version"})]
    nodes[0].update(1.0)

    assert set(nodes[0].job.places) == {0, 1, 2, 3}
    assert nodes[0].cluster.notes() == [
        "node node-2/4 runs another version of torchlens_perf: not compared"
    ]
    nodes[0].begin(1)
    assert nodes[0].cluster.notes() == []


def test_windows_that_node_0_has_lost_are_a_note(tmp_path: Path) -> None:
    wire, nodes = two_nodes(tmp_path)
    wire.contacts = {
        name: NodeContact(0.0, missed, left=False) for name, missed in (("n1", 12), ("n2", 0))
    }
    nodes[0].update(1.0)

    assert nodes[0].cluster.notes() == [
        "12 windows of node n1 were lost before node 0 compared them"
    ]


@given(data=st.data())
@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_corrupt_window_of_one_node_does_not_affect_other_nodes(
    tmp_path: Path, data: st.DataObject
) -> None:
    """Arbitrary bytes in a window raise no exception."""
    wire, run, at = Wire(), RunDirectory(tmp_path), places(6, node_size=2)
    nodes = [NodeView(f"node-{number}", wire.open) for number in range(3)]
    for number, view in enumerate(nodes):
        view.begin(0, _identity(run, 2 * number, 6))
    steps = next(Simulation(Topology(6)).steps(20))
    for rank in (2, 3, 4, 5, 0, 1):
        view, identity = nodes[rank // 2], _identity(run, rank, 6)
        view.job.add_steps(identity, at[rank], table_of(steps, rank), MEETING)
        now = progress.rank(rank, state="running", since_step_s=0.1, since_mark_s=0.1)
        view.job.set_progress(
            identity, at[rank], now, RankFacts(), modules_ns={"a": 1e6 + 1e6 * rank}
        )
    nodes[1].update(1.0)
    nodes[2].update(1.0)
    at_first = wire.sent[0]
    ((sender, whole),) = at_first.payloads.items()
    payload = bytearray(whole)
    first = data.draw(st.integers(1, len(payload) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=len(payload) - first))
    payload[first : first + len(noise)] = noise
    wire.sent[0] = structs.replace(at_first, payloads={sender: bytes(payload)})
    nodes[0].cluster.exchange_data(nodes[0].job, 1.0)

    assert {4, 5} <= set(nodes[0].job.places)
    assert nodes[0].job.module_times.excess_over_median_ns(5).keys() == {"a"}


def test_corrupt_windows_are_counted_for_their_node(tmp_path: Path) -> None:
    """A window with an invalid state, text, time or step is left out."""
    wire, nodes = two_nodes(tmp_path)
    good = wire.sent[0]
    ((sender, whole),) = good.payloads.items()
    for field, value in (
        ("state", 200),
        ("population", b"\xff"),
        ("since_step_s", np.nan),
        ("age_s", np.inf),
        ("device", (1, 1, np.nan, 1)),
        ("world_size", 0),
        ("row", 1 << 31),
    ):
        values = np.frombuffer(whole, summary.LAYOUT).copy()
        values[field] = value
        wire.sent.append(structs.replace(good, payloads={sender: values.tobytes()}))
    nodes[0].update(1.0)

    assert nodes[0].cluster.notes() == ["7 windows of node node-1 were corrupt: left out"]
    assert set(nodes[0].job.places) == {0, 1, 2, 3}


def _identity(run: Any, rank: int, world_size: int = 4) -> Identity:
    return identity_of(
        run, rank, world_size, local_rank=rank % 2, local_world_size=2, host=f"node-{rank // 2}"
    )


def test_stacks_of_a_hang_are_read_again_only_if_the_finding_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text, in contrast, always shows the hang's current age. The stacks of all ranks are read for
    their lines of code.
    """
    asked = []

    def stack(pid: int) -> Stack:
        asked.append(pid)
        return Stack((f"frame {len(asked)}",), "")

    monkeypatch.setattr(hang_watch, "read_main_stack", stack)
    view, run, at = NodeView("node-0"), make_run(tmp_path), places(3)

    def hang_at(since_s: float, **changed: Any) -> HangEvidence:
        ranks = [progress.rank(0), progress.rank(1), progress.behind(2, **changed)]
        for each in ranks:
            now = replace(each, since_step_s=since_s, since_mark_s=since_s - 0.1)
            view.job.set_progress(identity_of(run, each.rank, 3), at[each.rank], now, RankFacts())
        view.update(100 + since_s)
        assert view.job.hang is not None
        return view.job.hang

    first, later = hang_at(12.0), hang_at(312.0)
    assert (first.since_s, later.since_s) == (12.0, 312.0)
    assert first.opening.startswith("No step for 12.0 s")
    assert later.opening.startswith("No step for 312 s")
    assert first.stacks == later.stacks == {2: RankStack(("frame 1",), "")}
    # A different finding must be found twice.
    assert hang_at(318.0, state="stopped").stacks == later.stacks
    assert hang_at(320.0, state="stopped").stacks == {2: RankStack(("frame 4",), "")}
    assert asked == [os.getpid()] * 6


def test_end_of_a_hang_is_not_reported_as_a_new_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This node's ranks continue while the newest reports of the other node are older."""
    monkeypatch.setattr(hang_watch, "read_main_stack", lambda pid: Stack((), "none"))
    watch = hang_watch.HangDetector(6.0)
    stuck, entered = progress.behind(1, host="node-0"), progress.rank(0, host="node-0")
    waiting = {number: progress.rank(number, host="node-1", report_age_s=0.5) for number in (2, 3)}
    going_on = {
        number: progress.rank(number, host="node-0", since_step_s=0.01, since_mark_s=0.0)
        for number in (0, 1)
    }

    def texts(local: Mapping[int, progress.Progress], *, age_s: float, now_s: float) -> str:
        watch.update_hang(local, waiting, dict.fromkeys(waiting, age_s), {}, {}, now_s)
        return "" if watch.hang is None else build_hang_verdict(watch.hang).text

    named = texts({0: entered, 1: stuck}, age_s=0.5, now_s=100.0)
    assert "rank 1 (node-0) did not enter it" in named
    assert texts(going_on, age_s=1.5, now_s=101.0) == named
    assert texts(going_on, age_s=2.5, now_s=102.0) == named
    # The other node's reports are newer than the first finding, so its ranks have really stopped.
    assert "while 2 other ranks make steps" in texts(going_on, age_s=0.5, now_s=103.0)


def test_lines_of_code_of_another_nodes_ranks_are_shown_until_they_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sidecar reads the stacks of its own ranks."""
    reads = Stack(("load_batch (train.py:7)",), "", user_line=f"train.py:7 in {'ä' * 99}")
    line = f"train.py:7 in {'ä' * 13}"
    monkeypatch.setattr(hang_watch, "read_main_stack", lambda pid: reads)
    (wire, nodes), run, at = two_nodes(tmp_path), make_run(tmp_path), places(4, node_size=2)
    facts = RankFacts(groups={"0": {"ranks": "0-3", "description": ""}})

    def round_at(now_s: float, **changed: Any) -> None:
        for number in range(4):
            now = progress.behind(3) if number == 3 else progress.rank(number)
            changes = {"since_step_s": now_s, "since_mark_s": now_s, **changed}
            nodes[number // 2].job.set_progress(
                _identity(run, number), at[number], replace(now, **changes), facts
            )
        for view in (nodes[1], nodes[0]):
            view.update(100 + now_s)

    for now_s in (12.0, 14.0):
        round_at(now_s)
    assert nodes[0].job.hang is not None
    assert (
        nodes[0].job.hang.places[0].startswith("rank 3: inside forward GPT > blocks.3, train.py:7")
    )
    assert nodes[0].job.remote_lines == dict.fromkeys((2, 3), line)
    for now_s in (16.0, 18.0):
        round_at(now_s, since_step_s=0.1, since_mark_s=0.1)
    assert nodes[0].job.remote_lines == {2: "", 3: ""}
    for now_s in (30.0, 32.0):
        round_at(now_s)
    wire.sent.append(ReceivedPost("node-1", 0.0, {2: b"\xf2no lines"}))
    nodes[0].update(133.0)
    assert nodes[0].job.remote_lines == dict.fromkeys((2, 3), line)
    # A restarted job has no ranks yet.
    nodes[1].begin(1)
    nodes[1].update(134.0)
