"""Tests of answers, views, alerts and figures for processes that watch a live run."""

from __future__ import annotations

import json
import time

import pandas as pd
import pytest

from tests.sidecar.test_node import WORK, dead_process, finish, run_round, sidecar, two_ranks
from tests.support.in_memory import InMemoryExporter
from tests.support.ranks import Rank
from torchlens_perf.errors import RunStoreError
from torchlens_perf.page.notebook import results_from_run
from torchlens_perf.run.directory import RunDirectory, create_local_folders
from torchlens_perf.run.mailbox import ALERTS, ANSWER, RESULTS, STEPS, VIEW, Mailbox
from torchlens_perf.sidecar import live_results
from torchlens_perf.sidecar.live_results import LiveResultDelivery
from torchlens_perf.sidecar.node import Sidecar


class Live:
    """A sidecar with two ranks that make steps and a process that requests results."""

    def __init__(self, run: RunDirectory, exporter: InMemoryExporter | None = None) -> None:
        self.run = run
        self.sidecar: Sidecar = sidecar(run, exporter)[0]
        self.ranks = two_ranks(run)
        self.made = 0
        self.results = LiveResultDelivery(self.sidecar, self._results)

    def _results(self, run: RunDirectory) -> str:
        self.made += 1
        return results_from_run(run)

    def steps(self, count: int, **slow: float) -> None:
        """Make steps of both ranks. slow: changed durations of rank 1."""
        for _ in range(0, count, 4):
            self.ranks[0].steps(4, **WORK)
            self.ranks[1].steps(4, **{**WORK, **slow})
            run_round(self.sidecar)

    def round(self, now_s: float) -> frozenset[str]:
        """Run one round as loop.py does. Return the requests."""
        self.sidecar.read_rings()
        asked = self.results.poll_requests()
        self.sidecar.count_records()
        if STEPS in asked:
            self.sidecar.save_records()
        self.results.deliver_due(now_s)
        return asked

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.sidecar.close()


@pytest.fixture
def live(run: RunDirectory):
    made = Live(run)
    yield made
    made.close()


def test_no_results_and_no_state_are_written_without_a_request(live: Live) -> None:
    live.steps(20)
    for now_s in (0.0, 5.0, 10.0):
        assert live.round(now_s) == frozenset()

    assert live.made == live.sidecar.monitor.alerts.raised == 0
    assert not live.run.node_state_path("node-a").exists()


def test_answer_contains_all_steps_before_the_request(live: Live) -> None:
    """Each request is answered once."""
    live.steps(12)
    for steps in (12, 20):
        live.ranks[0].steps(steps - 12, **WORK)
        live.ranks[1].steps(steps - 12, **WORK)
        box = Mailbox(live.ranks[1].ring_path, ANSWER, RESULTS)
        assert live.round(1.0) == {RESULTS}
        assert live.round(2.0) == frozenset()
        value = json.loads(box.wait_for_message(0.0) or "")
        box.close()
        assert (value["summary"]["steps"], value["summary"]["running"]) == (steps, True)
        assert f"{steps} steps" in value["text"]
    assert live.made == 2


def test_requested_steps_are_written_before_the_answer(live: Live) -> None:
    """The requesting process reads the steps from the run directory."""
    live.steps(16)
    assert list(live.run.steps.iterdir()) == []
    box = Mailbox(live.ranks[0].ring_path, ANSWER, STEPS)
    assert live.round(1.0) == {STEPS}

    assert box.wait_for_message(0.0)
    assert len(pd.read_parquet(live.run.steps)) == 32
    box.close()


def test_view_is_updated_once_a_second(live: Live) -> None:
    """Updates need new records, and end when the process no longer shows the view."""
    live.steps(8)
    view = Mailbox(live.ranks[0].ring_path, VIEW)
    assert live.round(100.0) == frozenset()
    assert live.results.is_watched
    assert view.read_new_message()
    live.steps(8)
    live.round(100.9)
    assert view.read_new_message() is None
    live.round(200.0)
    assert json.loads(view.read_new_message() or "")["summary"]["steps"] == 16
    live.round(300.0)
    assert view.read_new_message() is None
    view.close()
    live.steps(8)
    live.round(400.0)
    assert not live.results.is_watched
    assert live.made == 2


def test_view_of_a_dead_process_is_not_updated(run: RunDirectory) -> None:
    """Its mailbox remains, because it was killed. Views of other processes are updated."""
    died, lives = Rank(run, 0, identity=dead_process()), Rank(run, 1)
    made = sidecar(run)[0]
    results = LiveResultDelivery(made, results_from_run)
    view = Mailbox(died.ring_path, VIEW)
    for rank in (died, lives):
        rank.steps(8, **WORK)
    run_round(made)
    results.poll_requests()
    results.deliver_due(100.0)

    assert view.read_new_message() is None
    view.close()
    for rank in (died, lives):
        rank.close()
    made.close()


def test_slow_view_is_updated_less_often(live: Live) -> None:
    """A view that took 0.5 s is updated after ten seconds."""
    view = Mailbox(live.ranks[0].ring_path, VIEW)
    seconds = iter([0.0, 0.5] * 2)
    live.results = LiveResultDelivery(live.sidecar, live._results, lambda: next(seconds))
    due = []
    for now_s in (0.0, 9.9, 10.1):
        live.steps(4)
        live.round(now_s)
        due.append(view.read_new_message() is not None)

    assert due == [True, False, True]
    view.close()


def test_requesting_process_computes_the_results_of_a_large_job(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a large job, the sidecar would need seconds to compute the results.

    The sidecar only saves the state and sends an empty answer at once.
    """
    monkeypatch.setattr(live_results, "MAX_RANKS", 1)
    live.steps(8)
    box, view = (
        Mailbox(live.ranks[0].ring_path, ANSWER, RESULTS),
        Mailbox(live.ranks[0].ring_path, VIEW),
    )
    live.round(1.0)

    assert (box.wait_for_message(0.0), view.wait_for_message(0.0), live.made) == ("", "", 0)
    assert json.loads(results_from_run(live.run))["summary"]["steps"] == 8
    box.close()
    view.close()


def test_request_is_answered_with_an_empty_text_if_its_results_fail(live: Live) -> None:
    """The sidecar logs the error, and the requesting process reads the run directory itself."""

    def fails(run: RunDirectory) -> str:
        raise RunStoreError("damaged")

    live.results = LiveResultDelivery(live.sidecar, fails)
    box = Mailbox(live.ranks[0].ring_path, ANSWER, RESULTS)
    with pytest.raises(RunStoreError, match="damaged"):
        live.round(1.0)
    assert box.wait_for_message(0.0) == ""
    box.close()


@pytest.mark.parametrize("exports", [False, True])
def test_each_listener_receives_the_alerts(run: RunDirectory, exports: bool) -> None:
    """Alerts about the start and the end of a slow rank arrive with and without an exporter."""
    live = Live(run, InMemoryExporter() if exports else None)
    early = Mailbox(live.ranks[0].ring_path, ALERTS)
    live.round(0.0)
    assert early.read_new_message() is None
    live.steps(60, forward=9)
    live.round(1.0)
    (started,) = json.loads(early.read_new_message() or "")
    assert (started["change"], started["kind"], started["rank"]) == ("started", "straggler", 1)
    assert started["text"]
    assert started["next"]
    late = Mailbox(live.ranks[1].ring_path, ALERTS)
    live.round(2.0)
    assert [row["id"] for row in json.loads(late.read_new_message() or "")] == [started["id"]]
    live.steps(240)
    live.round(3.0)
    for box in (early, late):
        assert [row["change"] for row in json.loads(box.read_new_message() or "")] == [
            "started",
            "ended",
        ]
        box.close()
    live.round(4.0)
    live.close()


def test_mailbox_of_a_dead_process_is_removed_with_its_ring(run: RunDirectory) -> None:
    rank = Rank(run, 0, 1)
    rank.steps(4, **WORK)
    boxes = [Mailbox(rank.ring_path, kind) for kind in (ANSWER, VIEW, ALERTS)]
    rank.close()
    finish(run)

    left = [path for folder in create_local_folders(run.run_id) for path in folder.iterdir()]
    assert left == []
    assert not any(box.path.exists() for box in boxes)


def test_request_in_the_same_clock_tick_is_found(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new file in the same tick of the file system's clock does not change the folder's time."""
    tick_ns = time.time_ns()
    monkeypatch.setattr(RunDirectory, "local_change_times_ns", lambda run: [tick_ns])
    # In this test, the tick of the clock lasts as long as the test.
    monkeypatch.setattr(live_results, "CLOCK_TICK_NS", 3_600_000_000_000)
    live.round(0.0)
    assert live.results.poll_requests() == frozenset()
    box = Mailbox(live.ranks[0].ring_path, ANSWER, RESULTS)
    assert live.results.poll_requests() == {RESULTS}
    box.close()
