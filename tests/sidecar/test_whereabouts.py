"""Tests of the time of a saved state, and of each running rank's activity at that time."""

from __future__ import annotations

import time

import pytest

from tests.support.ranks import HOST, Rank
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Kind
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.verdicts import node_state

WORK = {"forward": 4, "backward": 6}


def test_running_rank_is_shown_with_its_step_and_open_spans(run: RunDirectory) -> None:
    """Durations are measured with the rank's own clock."""
    rank = Rank(run, 0, 1)
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None)
    rank.session.recorder.start_thread_time()
    rank.steps(5, **WORK)
    rank.clock.advance(2_000_000)
    rank.begin(Kind.BACKWARD, "backward")
    rank.clock.advance(3_000_000)
    rank.begin(Kind.WAIT, "wait")
    rank.clock.advance(5_000_000)
    sidecar.read_rings()
    sidecar.count_records()
    (source,) = sidecar.sources
    found = source.current_activity(rank.clock())
    rank.close()
    sidecar.close()

    assert found is not None
    assert (found.step, found.inside) == (5, ("backward", "wait"))
    assert found.step_s == pytest.approx(0.010)
    assert found.inside_s == pytest.approx(0.005)


def test_rank_outside_of_all_spans_has_no_span_time(run: RunDirectory) -> None:
    rank = Rank(run, 0, 1)
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None)
    rank.steps(1, **WORK)
    sidecar.read_rings()
    sidecar.count_records()
    (source,) = sidecar.sources
    found = source.current_activity(rank.clock())
    rank.close()
    sidecar.close()

    assert found is not None
    assert (found.inside, found.inside_s) == ((), None)


def test_report_shows_the_current_activity_of_running_ranks_only(run: RunDirectory) -> None:
    rank = Rank(run, 0, 1, _total_steps=500)
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None)
    rank.steps(5, **WORK)
    rank.begin(Kind.FORWARD, "forward GPT")
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.save_state()
    live = load_report(run)
    saved_s = node_state.load(run.node_state_path(HOST)).saved_unix_ns / 1e9
    rank.close()
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.save_state()
    ended = load_report(run)
    sidecar.close()

    assert live["run"]["total_steps"] == 500
    assert live["ranks"][0]["now"] is not None
    assert live["ranks"][0]["now"].inside == ("forward GPT",)
    assert abs(time.time() - saved_s) < 60
    assert live["run"]["as_of"] is not None
    assert ended["ranks"][0]["now"] is None


@pytest.mark.parametrize(
    ("configured", "total"),
    [((500, 500), 500), ((0, 500), 500), ((400, 500), None), ((0, 0), None)],
)
def test_total_steps_are_known_if_all_ranks_agree(
    run: RunDirectory, configured: tuple[int, int], total: int | None
) -> None:
    """Ranks without a configured number are ignored."""
    ranks = [Rank(run, rank, 2, _total_steps=number) for rank, number in enumerate(configured)]
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None)
    for rank in ranks:
        rank.steps(5, **WORK)
    sidecar.read_rings()
    sidecar.count_records()
    sidecar.save_state()
    found = load_report(run)["run"]["total_steps"]
    for rank in ranks:
        rank.close()
    sidecar.close()

    assert found == total
