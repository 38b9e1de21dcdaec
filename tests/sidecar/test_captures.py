"""The sidecar's part of a capture, beside ranks that are made by hand: whom it asks, and what comes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import os
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.findings import PLACES, episode, findings
from tests.support.ranks import HOST, Rank, make_run
from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.commands.cli import main
from torchlens_perf.report.captures import captures
from torchlens_perf.run import captures as capture_files
from torchlens_perf.run.captures import BY_USER, BY_VERDICT, LONGEST_S, RAW_TRACE, STACKS, TRACE, Outcome, Request
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.sidecar.captures import LOOK_S, CaptureRelay, LiveRank
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.verdicts.causes.straggler_groups import suspect_and_healthy, with_groups
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.view.tables import capture_table


class Node:
    """A node's sidecar and its two ranks, whose process is this one."""

    def __init__(self, folder: Path) -> None:
        self.run = make_run(folder)
        self.folder = folder
        self.ranks = {
            rank: LiveRank(folder / f"rank{rank}.ring", os.getpid(), 0, step=10, refuses=False) for rank in (0, 1)
        }
        self.relay = CaptureRelay(self.run)
        self.now_s = 100.0

    def ask(self, **changed: Any) -> Request:
        values = {
            "id": "one", "asked_by": BY_USER, "asked_unix_s": time.time(), "attempt": 0, "ranks": (1,), "from_step": 12,
            "steps": 3, **changed,
        }  # fmt: skip
        request = Request(**values)
        capture_files.ask(self.run.captures, request)
        return request

    def look(self, after_s: float = LOOK_S) -> None:
        """A round of the sidecar."""
        self.now_s += after_s
        self.relay.update(self.ranks, self.now_s)

    def asked(self) -> list[int]:
        """Who finds a request beside its ring."""
        return [rank for rank, live in self.ranks.items() if capture_files.ask_path(live.ring).exists()]

    def answer(self, rank: int, trace: bytes = b'{"traceEvents": []}\n') -> None:
        """What the rank does that takes the request up."""
        ring = self.ranks[rank].ring
        request = capture_files.read(capture_files.ask_path(ring), Request)
        capture_files.ask_path(ring).unlink()
        (Path(request.folder) / RAW_TRACE).write_bytes(trace)
        outcome = Outcome(request.id, rank, request.from_step, request.steps, files={TRACE: len(trace)}, paused_s=0.25)
        capture_files.write(capture_files.answer_path(ring), outcome)

    def outcomes(self) -> dict[tuple[str, int], Outcome]:
        return {
            (request.id, rank): outcome
            for request in capture_files.read_requests(self.run.captures)[0]
            for rank in request.ranks
            if (outcome := capture_files.outcome(self.run.captures, request, rank)) is not None
        }

    def files(self, rank: int, request: str = "one") -> list[str]:
        return sorted(os.listdir(capture_files.rank_folder(self.run.captures, request, rank)))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_files_of_a_rank(node: Node) -> None:
    """The trace is compressed, the stacks are the sidecar's, nothing is left beside the ring."""
    node.ask()
    node.look()
    assert node.asked() == [1]
    assert node.outcomes() == {}
    node.answer(1)
    node.look(0.1)
    node.look(0.1)

    assert node.files(1) == ["capture.json", STACKS, TRACE]
    folder = capture_files.rank_folder(node.run.captures, "one", 1)
    assert gzip.decompress((folder / TRACE).read_bytes()) == b'{"traceEvents": []}\n'
    assert "test_files_of_a_rank" in (folder / STACKS).read_text()
    outcome = node.outcomes()["one", 1]
    assert outcome.files == {each: (folder / each).stat().st_size for each in (TRACE, STACKS)}
    assert list(node.folder.glob("rank*")) == []
    (row,) = captures(node.run)
    assert (row["rank"], row["first_step"], row["last_step"], row["asked_by"]) == (1, 12, 14, "user")
    assert row["files"][TRACE]["path"] == "captures/one/rank00001/trace.json.gz"


def test_torn_trace(node: Node) -> None:
    """A disk that was full leaves no trace that cannot be opened."""
    node.ask()
    node.look()
    node.answer(1, b'{"traceEvents": [{"na')
    node.look(0.1)
    node.look(0.1)

    assert node.files(1) == ["capture.json", STACKS]
    assert "is the disk full?" in node.outcomes()["one", 1].left_out[TRACE]


def test_only_those_that_are_asked(node: Node) -> None:
    """Not ranks of another node, of another attempt, or of a request that nobody answered minutes ago."""
    node.ask(id="elsewhere", ranks=(5,))
    node.ask(id="before", attempt=7, ranks=(0,))
    node.ask(id="old", asked_unix_s=time.time() - 300, ranks=(0,))
    node.look()

    assert node.asked() == []
    assert node.outcomes() == {}


def test_process_that_ends(node: Node) -> None:
    """The request goes, and what came of it is said; also where another process has the rank now."""
    node.ask(ranks=(0, 1))
    node.look()
    del node.ranks[0]
    node.ranks[1] = dataclasses.replace(node.ranks[1], pid=1)
    node.look(0.1)

    assert {outcome.ended for outcome in node.outcomes().values()} == {"the process ended"}
    assert len(node.outcomes()) == 2
    assert list(node.folder.glob("rank*")) == []


def test_answer_of_a_process_that_has_ended(node: Node) -> None:
    """What it wrote in the end counts."""
    node.ask()
    node.look()
    node.answer(1)
    del node.ranks[1]
    node.relay.close()

    assert node.outcomes()["one", 1].steps == 3


def test_job_that_stands_still(node: Node) -> None:
    """No step ends: the request is taken back, and the stacks say where the rank is."""
    node.ask()
    node.look()
    node.look(LONGEST_S - 1)
    assert node.asked() == [1]
    node.look(2)

    assert node.asked() == []
    assert node.outcomes()["one", 1].ended.startswith("no step ended within 60 s")
    assert STACKS in node.files(1)


def test_rank_that_may_not_be_asked(node: Node) -> None:
    """capture='off' is the rank's setting."""
    node.ranks[1] = dataclasses.replace(node.ranks[1], refuses=True)
    node.ask()
    node.look()

    assert node.asked() == []
    assert "capture='off'" in node.outcomes()["one", 1].ended


def test_one_at_a_time(node: Node) -> None:
    """Another request for the same rank is refused while one is open."""
    node.ask()
    node.look()
    node.ask(id="two", ranks=(0, 1))
    node.look()

    assert node.asked() == [0, 1]
    assert {key: outcome.ended for key, outcome in node.outcomes().items()} == {
        ("two", 1): "another capture of this rank is in progress"
    }


def test_sidecar_that_was_started_again(node: Node) -> None:
    """It does not ask twice, and takes the answer."""
    node.ask()
    node.look()
    node.answer(1)
    node.relay = CaptureRelay(node.run)
    node.look()
    assert node.asked() == []
    node.look(0.1)

    assert node.outcomes()["one", 1].steps == 3


def test_rank_that_does_not_answer(node: Node) -> None:
    """It took the request up, and its disk was full: the request ends, and a late answer is not the next one's."""
    node.ask()
    node.look()
    capture_files.ask_path(node.ranks[1].ring).unlink()
    node.look(3 * LONGEST_S - 1)
    assert node.outcomes() == {}
    node.look(2)
    assert "not answered within 180 s: the rank is in step 10" in node.outcomes()["one", 1].ended

    late = Outcome("one", 1, 12, 3)
    node.ask(id="two")
    node.look()
    capture_files.write(capture_files.answer_path(node.ranks[1].ring), late)
    node.look(0.1)
    assert ("two", 1) not in node.outcomes()
    node.answer(1)
    node.look(0.1)
    node.look(0.1)
    assert node.outcomes()["two", 1].steps == 3


@pytest.mark.parametrize("answer", ["", "{", "[1]", '{"id": "one", "rank": 1, "files": {"../../x": 5}}'])
def test_answer_that_cannot_be_read(node: Node, answer: str) -> None:
    """It ends the request, and says so."""
    node.ask()
    node.look()
    capture_files.answer_path(node.ranks[1].ring).write_text(answer)
    node.look(0.1)
    node.look(0.1)

    assert "answer cannot be read" in node.outcomes()["one", 1].ended
    assert list(node.folder.glob("rank*.captured")) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "../../elsewhere"}, {"id": "another"}, {"asked_unix_s": "yesterday"}, {"asked_unix_s": None},
        {"steps": 21}, {"steps": "3"}, {"ranks": "01"}, {"ranks": 5}, {"attempt": []}, {"from_step": 1.5},
    ],
)  # fmt: skip
def test_request_that_cannot_be_read(node: Node, wrong: dict[str, Any]) -> None:
    """It is skipped and noted, once; others are taken up. No path leads out of the run directory."""
    bad = {**dataclasses.asdict(node.ask(ranks=(0,))), "id": "bad", **wrong}
    capture_files.request_path(node.run.captures, "bad").write_text(json.dumps(bad))
    node.look()
    node.look()

    assert node.asked() == [0]
    assert [request.id for request in capture_files.read_requests(node.run.captures)[0]] == ["one"]
    (note,) = node.relay.notes
    assert note.startswith("a request for a capture cannot be used: bad.request.json: ")
    assert captures(node.run) == []
    assert sorted(os.listdir(node.run.captures)) == ["bad.request.json", "one", "one.request.json"]


def test_disk_that_is_full(node: Node) -> None:
    """A trace that cannot be compressed goes, and what can be said is said."""
    node.ask()
    node.look()
    node.answer(1)
    folder = capture_files.rank_folder(node.run.captures, "one", 1)
    (folder / TRACE).mkdir()  # in the way of the finished file
    node.look(0.1)
    node.look(0.1)

    outcome = node.outcomes()["one", 1]
    assert outcome.left_out[TRACE].startswith("it could not be compressed: ")
    assert set(outcome.files) == {STACKS}
    assert node.files(1) == ["capture.json", STACKS, TRACE]
    assert list((folder / TRACE).iterdir()) == []


@pytest.mark.parametrize(("traced", "code", "quiet"), [(True, 0, []), (False, 1, []), (True, 0, ["--quiet"])])
def test_code_of_the_command(node: Node, traced: bool, code: int, quiet: list[str]) -> None:
    """0 is that there is a trace; a rank that has made no step yet does not stand in the way. Quiet, it says what came
    of it all the same."""
    ranks = [Rank(node.run, rank) for rank in (0, 1)]
    ranks[0].steps(40, forward=100)
    sidecar = Sidecar(node.run, HOST, None, lambda run, asked: None)
    sidecar.poll()
    sidecar.account()
    sidecar.keep()

    def answers() -> None:
        while not (asked := capture_files.read_requests(node.run.captures)[0]):
            time.sleep(0.01)
        files, left_out = ({TRACE: 5}, {}) if traced else ({}, {TRACE: "the disk is full"})
        outcome = Outcome(asked[0].id, 0, 50, 3, files=files, left_out=left_out)
        folder = capture_files.rank_folder(node.run.captures, asked[0].id, 0)
        folder.mkdir(parents=True)
        capture_files.write(capture_files.outcome_path(folder), outcome)

    answering = threading.Thread(target=answers, daemon=True)
    answering.start()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["capture", str(node.run.path), "--rank", "0", "--timeout", "20", *quiet]) == code
    answering.join(5)
    assert ("no trace: the disk is full" in out.getvalue()) is not traced
    assert ("asked: ranks 0" in out.getvalue()) is not bool(quiet)
    assert ("trace.json.gz  5 bytes" in out.getvalue()) is traced
    assert out.getvalue().endswith("\nopen traces in ui.perfetto.dev\n") is (traced and not quiet)
    for rank in ranks:
        rank.close()


def test_table_of_profiles(node: Node) -> None:
    """The newest first: where the trace is, or why there is none."""
    node.ask()
    node.ask(id="two", ranks=(0,))
    node.ranks[0] = dataclasses.replace(node.ranks[0], refuses=True)
    node.look()
    node.answer(1)
    node.look(0.1)
    node.look(0.1)

    rows = captures(node.run)
    table = capture_table(cast("Any", {"captures": rows}))

    assert table is not None
    assert {column.title: column.values for column in table.columns} == {
        "rank": [0, 1], "steps": [None, "12-14"],
        "trace": ["none: captures are switched off: capture='off'", "captures/one/rank00001/trace.json.gz"],
        "paused": [0.0, 0.25],
    }  # fmt: skip


def test_pause_is_no_lag_in_collectives(node: Node) -> None:
    """The others wait for the writing in the first collective of the step after it. That is no rank's fault."""
    ranks = [Rank(node.run, rank) for rank in (0, 1)]
    for rank in ranks:
        rank.session.metadata.add_group("0", [0, 1], "default_pg")
        recorder = rank.session.recorder
        name_id = rank.session.intern("allreduce group=0 dtype=float32")
        for step in range(40):
            waits = step == 31 and rank.identity.rank == 0  # for rank 1, which writes at the end of step 30
            took_ns = 500_000_000 if waits else 1_000_000
            start_ns = rank.clock() if waits or step != 31 else rank.clock() + 499_000_000
            recorder.record_span(int(Kind.COLLECTIVE), name_id, start_ns, took_ns, int(Flag.COMPLETED), 1 << 20, step)
            rank.clock.advance(600_000_000)
            captured = step in (28, 29, 30) and rank.identity.rank == 1
            recorder.next_step(int(Flag.CAPTURED) * captured, 0, 1)
    sidecar = Sidecar(node.run, HOST, None, lambda run, asked: None)
    sidecar.poll()
    sidecar.account()
    (row,) = sidecar.state.join.operations()
    (counted,) = sidecar.state.join.counts().values()
    sidecar.close()
    for rank in ranks:
        rank.close()

    assert counted.joined == 40 - WARM_UP_STEPS
    assert row.joined == counted.joined - 4
    assert {rank: each["exposed_lag_ns"] for rank, each in row.totals().items()} == {0: 0, 1: 0}


# -- after a verdict


def test_suspect_and_healthy_one(node: Node) -> None:
    """Once in an attempt, also after the sidecar was started again; the same steps on both."""
    (node.run.nodes / "node-a.json").touch()
    found = with_groups(findings(episode(3)), PLACES)
    for _ in range(2):
        node.relay.ask_after_verdict(found, PLACES, node.ranks)
        node.relay = CaptureRelay(node.run)
    (request,) = capture_files.read_requests(node.run.captures)[0]

    assert (request.asked_by, request.ranks, request.steps) == (BY_VERDICT, (3, 2), 3)
    assert request.from_step == 10 + 1 + 20  # two seconds of 100 ms
    restarted = {rank: dataclasses.replace(live, attempt=1) for rank, live in node.ranks.items()}
    node.relay.ask_after_verdict(found, PLACES, restarted)
    assert [each.attempt for each in capture_files.read_requests(node.run.captures)[0]] == [0, 1]


def test_nobody_is_asked_without_a_slow_rank_within_reach(node: Node) -> None:
    """No verdict, or its rank's node has another disk."""
    found = with_groups(findings(episode(3)), PLACES)
    node.relay.ask_after_verdict(findings(), PLACES, node.ranks)
    node.relay.ask_after_verdict(found, PLACES, node.ranks)

    assert capture_files.read_requests(node.run.captures)[0] == []


@pytest.mark.parametrize(
    ("slow", "reached", "places", "chosen"),
    [
        ((3,), range(8), PLACES, (3, 2)),
        ((3, 2), range(8), PLACES, (3, 1)),
        ((0, 1, 2, 3), range(8), PLACES, (3, 4)),  # the whole node is slow
        ((3,), (3,), PLACES, (3,)),
        ((3,), (4, 5), PLACES, ()),
        ((3,), range(8), {**PLACES, 2: Placement("node-a", "other")}, (3, 1)),
        ((), range(8), PLACES, ()),
    ],
)  # fmt: skip
def test_choice(slow: tuple[int, ...], reached: Any, places: dict[int, Placement], chosen: tuple[int, ...]) -> None:
    """The slowest rank, and the nearest one that nobody suspects: of its population, on its node if there is one."""
    found = findings(*(episode(rank, excess_ns=2e7 + rank, cost_ns=2e7 + rank) for rank in slow))

    assert suspect_and_healthy(with_groups(found, places), places, set(reached)) == chosen


def _read(node: Node) -> None:
    """What the node's sidecar does once."""
    sidecar = Sidecar(node.run, HOST, None, lambda run, asked: None)
    sidecar.poll()
    sidecar.account()
    sidecar.keep()
    sidecar.close()


@pytest.mark.parametrize("before", ["nothing", "no step"])
def test_command_waits_for_the_first_steps(node: Node, before: str) -> None:
    """The sidecar of a busy machine reads the ring seconds after the steps; an immediate request waits for it."""
    rank = Rank(node.run, 0)
    if before == "no step":
        _read(node)

    def reads_later() -> None:
        time.sleep(1.2)
        rank.steps(40, forward=100)
        _read(node)

    reading = threading.Thread(target=reads_later, daemon=True)
    reading.start()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["capture", str(node.run.path), "--rank", "0", "--timeout", "6"]) == 1  # nobody answers
    reading.join(5)
    assert out.getvalue().startswith("asked: ranks 0, ")
    rank.close()


@pytest.mark.parametrize(
    ("options", "ends", "words"),
    [
        (["--timeout", "0.2"], False, "has not read the first steps yet: ask again in some seconds"),
        (["--no-wait"], False, "has not read the first steps yet: ask again in some seconds"),
        (["--timeout", "60"], True, "has ended: a capture needs a live run"),
    ],
)
def test_command_says_why_it_cannot_ask(node: Node, options: list[str], ends: bool, words: str) -> None:
    """Never that no step was made, which a sidecar that has not read the ring cannot know."""
    rank = Rank(node.run, 0)
    rank.steps(40 if ends else 0, forward=100)
    if ends:
        rank.close()
    _read(node)
    with contextlib.redirect_stderr(io.StringIO()) as err:
        assert main(["capture", str(node.run.path), "--rank", "0", *options]) == 2
    assert words in err.getvalue()
    rank.close()


def test_silent_run_is_not_called_ended(node: Node) -> None:
    """Its node may have lost its power."""
    rank = Rank(node.run, 0)
    rank.steps(40, forward=100)
    _read(node)
    for path in node.run.nodes.glob("*.json"):
        os.utime(path, (time.time() - 600, time.time() - 600))
    with contextlib.redirect_stderr(io.StringIO()) as err:
        assert main(["capture", str(node.run.path), "--rank", "0"]) == 2
    assert "is silent for 10 minutes" in err.getvalue()
    rank.close()
