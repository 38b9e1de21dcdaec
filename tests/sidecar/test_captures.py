"""Tests of captures in the sidecar and of the capture command, with fake ranks."""

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
from torchlens_perf.report.captures import capture_rows
from torchlens_perf.run import captures as capture_files
from torchlens_perf.run.captures import (
    BY_USER,
    BY_VERDICT,
    LONGEST_S,
    LOOK_S,
    RAW_TRACE,
    STACKS,
    TRACE,
    Outcome,
    Request,
)
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.sidecar.captures import CaptureRelay, LiveRank
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.verdicts.causes.straggler_groups import (
    add_straggler_groups,
    choose_suspect_and_healthy,
)
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.view.tables import build_capture_table


class Node:
    """The sidecar of a node with two ranks, both of which are the test's process."""

    def __init__(self, folder: Path) -> None:
        self.run = make_run(folder)
        self.folder = folder
        self.ranks = {
            rank: LiveRank(folder / f"rank{rank}.ring", os.getpid(), 0, step=10, refuses=False)
            for rank in (0, 1)
        }
        self.relay = CaptureRelay(self.run)
        self.now_s = 100.0

    def ask(self, **changed: Any) -> Request:
        values = {
            "id": "one", "asked_by": BY_USER, "asked_unix_s": time.time(), "attempt": 0, "ranks": (1,), "from_step": 12,
            "steps": 3, **changed,
        }  # fmt: skip
        request = Request(**values)
        capture_files.submit_request(self.run.captures, request)
        return request

    def run_round(self, after_s: float = LOOK_S) -> None:
        """Run one round of the sidecar after some time."""
        self.now_s += after_s
        self.relay.advance_captures(self.ranks, self.now_s)

    def asked(self) -> list[int]:
        """Return the ranks that have received a capture request."""
        return [
            rank
            for rank, live in self.ranks.items()
            if capture_files.ring_request_path(live.ring).exists()
        ]

    def answer(self, rank: int, trace: bytes = b'{"traceEvents": []}\n') -> None:
        """Answer a capture request as a rank does."""
        ring = self.ranks[rank].ring
        request = capture_files.read_capture_file(capture_files.ring_request_path(ring), Request)
        capture_files.ring_request_path(ring).unlink()
        (Path(request.folder) / RAW_TRACE).write_bytes(trace)
        outcome = Outcome(
            request.id,
            rank,
            request.from_step,
            request.steps,
            files={TRACE: len(trace)},
            paused_s=0.25,
        )
        capture_files.write_capture_file(capture_files.ring_outcome_path(ring), outcome)

    def outcomes(self) -> dict[tuple[str, int], Outcome]:
        return {
            (request.id, rank): outcome
            for request in capture_files.read_requests(self.run.captures)[0]
            for rank in request.ranks
            if (outcome := capture_files.read_outcome(self.run.captures, request, rank)) is not None
        }

    def files(self, rank: int, request: str = "one") -> list[str]:
        return sorted(os.listdir(capture_files.rank_folder(self.run.captures, request, rank)))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_finished_trace_is_compressed_and_stacks_are_added(node: Node) -> None:
    """No file of the request is left in the ring's folder."""
    node.ask()
    node.run_round()
    assert node.asked() == [1]
    assert node.outcomes() == {}
    node.answer(1)
    node.run_round(0.1)
    node.run_round(0.1)

    assert node.files(1) == ["capture.json", STACKS, TRACE]
    folder = capture_files.rank_folder(node.run.captures, "one", 1)
    assert gzip.decompress((folder / TRACE).read_bytes()) == b'{"traceEvents": []}\n'
    assert "test_finished_trace_is_compressed_and_stacks_are_added" in (folder / STACKS).read_text()
    outcome = node.outcomes()["one", 1]
    assert outcome.files == {each: (folder / each).stat().st_size for each in (TRACE, STACKS)}
    assert list(node.folder.glob("rank*")) == []
    (row,) = capture_rows(node.run)
    assert (row["rank"], row["first_step"], row["last_step"], row["asked_by"]) == (
        1,
        12,
        14,
        "user",
    )
    assert row["files"][TRACE]["path"] == "captures/one/rank00001/trace.json.gz"


def test_incomplete_trace_is_removed_after_a_disk_error(node: Node) -> None:
    """The rank reports that its disk was full."""
    node.ask()
    node.run_round()
    node.answer(1, b'{"traceEvents": [{"na')
    node.run_round(0.1)
    node.run_round(0.1)

    assert node.files(1) == ["capture.json", STACKS]
    assert "is the disk full?" in node.outcomes()["one", 1].left_out[TRACE]


def test_only_the_requested_live_ranks_receive_the_request(node: Node) -> None:
    """Old requests and requests for other nodes or attempts are ignored."""
    node.ask(id="elsewhere", ranks=(5,))
    node.ask(id="before", attempt=7, ranks=(0,))
    node.ask(id="old", asked_unix_s=time.time() - 300, ranks=(0,))
    node.run_round()

    assert node.asked() == []
    assert node.outcomes() == {}


def test_request_ends_with_the_ranks_process(node: Node) -> None:
    """The outcome contains this reason, even if the rank has a new process."""
    node.ask(ranks=(0, 1))
    node.run_round()
    del node.ranks[0]
    node.ranks[1] = dataclasses.replace(node.ranks[1], pid=1)
    node.run_round(0.1)

    assert {outcome.ended for outcome in node.outcomes().values()} == {"the process ended"}
    assert len(node.outcomes()) == 2
    assert list(node.folder.glob("rank*")) == []


def test_answer_written_just_before_the_process_ended_is_used(node: Node) -> None:
    node.ask()
    node.run_round()
    node.answer(1)
    del node.ranks[1]
    node.relay.close()

    assert node.outcomes()["one", 1].steps == 3


def test_request_is_withdrawn_if_no_step_ends(node: Node) -> None:
    """The stacks show where the rank is blocked."""
    node.ask()
    node.run_round()
    node.run_round(LONGEST_S - 1)
    assert node.asked() == [1]
    node.run_round(2)

    assert node.asked() == []
    assert node.outcomes()["one", 1].ended.startswith("no step ended within 60 s")
    assert STACKS in node.files(1)


def test_request_is_refused_if_captures_are_switched_off(node: Node) -> None:
    node.ranks[1] = dataclasses.replace(node.ranks[1], refuses=True)
    node.ask()
    node.run_round()

    assert node.asked() == []
    assert "capture='off'" in node.outcomes()["one", 1].ended


def test_second_request_for_a_rank_is_refused_while_the_first_runs(node: Node) -> None:
    node.ask()
    node.run_round()
    node.ask(id="two", ranks=(0, 1))
    node.run_round()

    assert node.asked() == [0, 1]
    assert {key: outcome.ended for key, outcome in node.outcomes().items()} == {
        ("two", 1): "another capture of this rank is in progress"
    }


def test_restarted_sidecar_receives_the_answer_to_an_earlier_request(node: Node) -> None:
    """The restarted sidecar does not send the request again."""
    node.ask()
    node.run_round()
    node.answer(1)
    node.relay = CaptureRelay(node.run)
    node.run_round()
    assert node.asked() == []
    node.run_round(0.1)

    assert node.outcomes()["one", 1].steps == 3


def test_request_without_an_answer_ends_after_a_timeout(node: Node) -> None:
    """An answer that arrives after the timeout does not count for the next request."""
    node.ask()
    node.run_round()
    capture_files.ring_request_path(node.ranks[1].ring).unlink()
    node.run_round(3 * LONGEST_S - 1)
    assert node.outcomes() == {}
    node.run_round(2)
    assert "not answered within 180 s: the rank is in step 10" in node.outcomes()["one", 1].ended

    late = Outcome("one", 1, 12, 3)
    node.ask(id="two")
    node.run_round()
    capture_files.write_capture_file(capture_files.ring_outcome_path(node.ranks[1].ring), late)
    node.run_round(0.1)
    assert ("two", 1) not in node.outcomes()
    node.answer(1)
    node.run_round(0.1)
    node.run_round(0.1)
    assert node.outcomes()["two", 1].steps == 3


@pytest.mark.parametrize(
    "answer", ["", "{", "[1]", '{"id": "one", "rank": 1, "files": {"../../x": 5}}']
)
def test_request_ends_with_an_error_if_the_answer_is_unreadable(node: Node, answer: str) -> None:
    node.ask()
    node.run_round()
    capture_files.ring_outcome_path(node.ranks[1].ring).write_text(answer)
    node.run_round(0.1)
    node.run_round(0.1)

    assert "answer cannot be read" in node.outcomes()["one", 1].ended
    assert list(node.folder.glob("rank*.captured")) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "../../elsewhere"}, {"id": "another"}, {"asked_unix_s": "yesterday"}, {"asked_unix_s": None},
        {"steps": 21}, {"steps": "3"}, {"ranks": "01"}, {"ranks": 5}, {"attempt": []}, {"from_step": 1.5},
    ],
)  # fmt: skip
def test_unreadable_request_is_noted_once(node: Node, wrong: dict[str, Any]) -> None:
    """Other requests are handled. A path outside the run directory is refused."""
    bad = {**dataclasses.asdict(node.ask(ranks=(0,))), "id": "bad", **wrong}
    capture_files.request_path(node.run.captures, "bad").write_text(json.dumps(bad))
    node.run_round()
    node.run_round()

    assert node.asked() == [0]
    assert [request.id for request in capture_files.read_requests(node.run.captures)[0]] == ["one"]
    (note,) = node.relay.notes
    assert note.startswith("a capture request is invalid: bad.request.json: ")
    assert capture_rows(node.run) == []
    assert sorted(os.listdir(node.run.captures)) == ["bad.request.json", "one", "one.request.json"]


def test_trace_is_removed_if_it_cannot_be_compressed(node: Node) -> None:
    """The outcome contains the reason."""
    node.ask()
    node.run_round()
    node.answer(1)
    folder = capture_files.rank_folder(node.run.captures, "one", 1)
    (folder / TRACE).mkdir()  # A folder with the name of the finished file makes the write fail.
    node.run_round(0.1)
    node.run_round(0.1)

    outcome = node.outcomes()["one", 1]
    assert outcome.left_out[TRACE].startswith("it could not be compressed: ")
    assert set(outcome.files) == {STACKS}
    assert node.files(1) == ["capture.json", STACKS, TRACE]
    assert list((folder / TRACE).iterdir()) == []


@pytest.mark.parametrize(
    ("traced", "code", "quiet"), [(True, 0, []), (False, 1, []), (True, 0, ["--quiet"])]
)
def test_capture_command_exits_0_only_if_there_is_a_trace(
    node: Node, traced: bool, code: int, quiet: list[str]
) -> None:
    """A rank without steps does not change the exit code.

    With --quiet, the result is still printed.
    """
    ranks = [Rank(node.run, rank) for rank in (0, 1)]
    ranks[0].steps(40, forward=100)
    sidecar = Sidecar(node.run, HOST, None, lambda run, asked: None)
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.save_records()

    def answers() -> None:
        while not (asked := capture_files.read_requests(node.run.captures)[0]):
            time.sleep(0.01)
        files, left_out = ({TRACE: 5}, {}) if traced else ({}, {TRACE: "the disk is full"})
        outcome = Outcome(asked[0].id, 0, 50, 3, files=files, left_out=left_out)
        folder = capture_files.rank_folder(node.run.captures, asked[0].id, 0)
        folder.mkdir(parents=True)
        capture_files.write_capture_file(capture_files.outcome_path(folder), outcome)

    answering = threading.Thread(target=answers, daemon=True)
    answering.start()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert (
            main(["capture", str(node.run.path), "--rank", "0", "--timeout", "20", *quiet]) == code
        )
    answering.join(5)
    assert ("no trace: the disk is full" in out.getvalue()) is not traced
    assert ("requested: rank 0" in out.getvalue()) is not bool(quiet)
    assert ("trace.json.gz  5 bytes" in out.getvalue()) is traced
    assert out.getvalue().endswith("\nopen traces in ui.perfetto.dev\n") is (traced and not quiet)
    for rank in ranks:
        rank.close()


def test_captures_are_listed_newest_first(node: Node) -> None:
    """A row contains the trace's path or the reason for a failure."""
    node.ask()
    node.ask(id="two", ranks=(0,))
    node.ranks[0] = dataclasses.replace(node.ranks[0], refuses=True)
    node.run_round()
    node.answer(1)
    node.run_round(0.1)
    node.run_round(0.1)

    rows = capture_rows(node.run)
    table = build_capture_table(cast("Any", {"captures": rows}))

    assert table is not None
    assert {column.title: column.values for column in table.columns} == {
        "rank": [0, 1], "steps": [None, "12-14"],
        "trace": ["none: captures are switched off: capture='off'", "captures/one/rank00001/trace.json.gz"],
        "paused": [0.0, 0.25],
    }  # fmt: skip


def test_pause_for_a_capture_is_not_reported_as_a_late_rank(node: Node) -> None:
    """Other ranks wait in the next step's first collective while the captured rank writes.

    The report on this run names no slow rank.
    """
    ranks = [Rank(node.run, rank) for rank in (0, 1)]
    for rank in ranks:
        rank.session.metadata.add_group("0", [0, 1], "default_pg")
        recorder = rank.session.recorder
        name_id = rank.session.intern("allreduce group=0 dtype=float32")
        for step in range(40):
            # Rank 0 waits for rank 1, which writes at the end of step 30.
            waits = step == 31 and rank.identity.rank == 0
            took_ns = 500_000_000 if waits else 1_000_000
            start_ns = rank.clock() if waits or step != 31 else rank.clock() + 499_000_000
            recorder.record_span(
                int(Kind.COLLECTIVE), name_id, start_ns, took_ns, int(Flag.COMPLETED), 1 << 20, step
            )
            rank.clock.advance(600_000_000)
            captured = step in (28, 29, 30) and rank.identity.rank == 1
            recorder.next_step(int(Flag.CAPTURED) * captured, 0, 1)
    sidecar = Sidecar(node.run, HOST, None, lambda run, asked: None)
    sidecar.read_rings()
    sidecar.count_records()
    (row,) = sidecar.state.join.operations()
    (counted,) = sidecar.state.join.join_counts().values()
    sidecar.close()
    for rank in ranks:
        rank.close()

    assert counted.joined == 40 - WARM_UP_STEPS
    assert row.joined == counted.joined - 4
    assert {rank: each["exposed_lag_ns"] for rank, each in row.totals_by_rank().items()} == {
        0: 0,
        1: 0,
    }


# -- after a verdict


def test_slow_and_healthy_rank_are_captured_once_per_attempt(node: Node) -> None:
    """The two ranks record the same steps.

    A restarted sidecar does not request the captures again.
    """
    (node.run.nodes / "node-a.json").touch()
    found = add_straggler_groups(findings(episode(3)), PLACES)
    for _ in range(2):
        node.relay.request_after_verdict(found, PLACES, node.ranks)
        node.relay = CaptureRelay(node.run)
    (request,) = capture_files.read_requests(node.run.captures)[0]

    assert (request.asked_by, request.ranks, request.steps) == (BY_VERDICT, (3, 2), 3)
    # The capture begins after ten seconds of steps of 100 ms.
    assert request.from_step == 10 + 1 + 100
    restarted = {rank: dataclasses.replace(live, attempt=1) for rank, live in node.ranks.items()}
    node.relay.request_after_verdict(found, PLACES, restarted)
    assert [each.attempt for each in capture_files.read_requests(node.run.captures)[0]] == [0, 1]


def test_no_capture_is_made_without_a_reachable_slow_rank(node: Node) -> None:
    """Either there is no verdict, or the slow rank's node has another disk."""
    found = add_straggler_groups(findings(episode(3)), PLACES)
    node.relay.request_after_verdict(findings(), PLACES, node.ranks)
    node.relay.request_after_verdict(found, PLACES, node.ranks)

    assert capture_files.read_requests(node.run.captures)[0] == []


@pytest.mark.parametrize(
    ("slow", "reached", "places", "chosen"),
    [
        ((3,), range(8), PLACES, (3, 2)),
        ((3, 2), range(8), PLACES, (3, 1)),
        ((0, 1, 2, 3), range(8), PLACES, (3, 4)),  # In this case all ranks of the node are slow.
        ((3,), (3,), PLACES, (3,)),
        ((3,), (4, 5), PLACES, ()),
        ((3,), range(8), {**PLACES, 2: Placement("node-a", "other")}, (3, 1)),
        ((), range(8), PLACES, ()),
    ],
)  # fmt: skip
def test_slowest_and_nearest_healthy_rank_are_captured(
    slow: tuple[int, ...], reached: Any, places: dict[int, Placement], chosen: tuple[int, ...]
) -> None:
    """The healthy rank is of the same population, and on the same node if possible."""
    found = findings(*(episode(rank, excess_ns=2e7 + rank, cost_ns=2e7 + rank) for rank in slow))

    assert (
        choose_suspect_and_healthy(add_straggler_groups(found, places), places, set(reached))
        == chosen
    )


def _read(node: Node) -> None:
    """Read the rings once, as the node's sidecar does."""
    sidecar = Sidecar(node.run, HOST, None, lambda run, asked: None)
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.save_records()
    sidecar.close()


@pytest.mark.parametrize("before", ["nothing", "no step"])
def test_capture_command_waits_until_the_first_steps_are_read(node: Node, before: str) -> None:
    """On a busy machine, the sidecar reads the ring seconds after the first steps."""
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
        # No rank answers.
        assert main(["capture", str(node.run.path), "--rank", "0", "--timeout", "6"]) == 1
    reading.join(5)
    assert out.getvalue().startswith("requested: rank 0, ")
    rank.close()


@pytest.mark.parametrize(
    ("options", "ends", "words"),
    [
        (
            ["--timeout", "0.2"],
            False,
            "has not read the first steps yet: try again in a few seconds",
        ),
        (["--no-wait"], False, "has not read the first steps yet: try again in a few seconds"),
        (["--timeout", "60"], True, "has ended: a capture needs a live run"),
    ],
)
def test_capture_command_prints_why_a_rank_cannot_be_captured(
    node: Node, options: list[str], ends: bool, words: str
) -> None:
    """The command never says that a rank has made no step.

    A sidecar that has not read the ring cannot know the number of steps.
    """
    rank = Rank(node.run, 0)
    rank.steps(40 if ends else 0, forward=100)
    if ends:
        rank.close()
    _read(node)
    with contextlib.redirect_stderr(io.StringIO()) as err:
        assert main(["capture", str(node.run.path), "--rank", "0", *options]) == 2
    assert words in err.getvalue()
    rank.close()


def test_capture_command_does_not_say_that_a_run_without_updates_has_ended(node: Node) -> None:
    """The run's node may have lost power."""
    rank = Rank(node.run, 0)
    rank.steps(40, forward=100)
    _read(node)
    for path in node.run.nodes.glob("*.json"):
        os.utime(path, (time.time() - 600, time.time() - 600))
    with contextlib.redirect_stderr(io.StringIO()) as err:
        assert main(["capture", str(node.run.path), "--rank", "0"]) == 2
    assert "has written nothing for 10 minutes" in err.getvalue()
    rank.close()
