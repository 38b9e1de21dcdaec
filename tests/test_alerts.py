"""Alerts: raised once when something begins and when it ends, with ids that do not depend on who raises them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.findings import PLACES, episode, findings, hang
from torchlens_perf.alerts import Alert, AlertLog, stragglers_by_class
from torchlens_perf.records import Verdict
from torchlens_perf.straggler import NOTHING, Findings

NOW_NS = 1_700_000_000_000_000_000


def told(log: AlertLog, found: Findings, *, attempt: int = 0, hung: dict | None = None) -> list[Alert]:
    """What a log raises for these findings."""
    return list(log.changes(attempt, found, hung, PLACES, NOW_NS))


def test_a_straggler_is_told_of_once_and_ends_once() -> None:
    """An alert when a rank is named, another when it is over, nothing in between; both are about the same."""
    log, slow = AlertLog("run"), episode()
    assert told(log, NOTHING) == []
    (started,) = told(log, findings(slow))
    assert told(log, findings(slow)) == []
    slow.until_step, slow.cost_ns = 180, 14e6  # as the judge does: it changes the episode that it has handed out
    (ended,) = told(log, findings(slow))
    assert told(log, findings(slow)) == []

    assert (started.change, ended.change, started.urgent, ended.urgent) == ("started", "ended", True, False)
    assert started.about == ended.about
    assert started.id != ended.id
    assert (started.since_step, started.until_step, ended.until_step) == (100, None, 180)
    assert (started.rank, started.ranks, started.host, started.phase) == (3, (3,), "node-a", "backward")
    assert (started.cause, started.scope, started.attempt) == ("slow_compute", "rank", 0)
    assert (started.cost_s, started.cost_share, ended.cost_s) == (0.015, 0.15, 0.014)
    assert started.text.startswith("Rank 3 (node-a) is slow in the backward pass: 80.0 ms of work a step against 60.0")
    assert "Next: compare" in started.text
    assert ended.text.startswith("Rank 3 was slow in the backward pass from step 100 to step 180")


def test_one_that_came_and_went_between_two_looks_is_told_of() -> None:
    """A replay sees everything at once: it raises the start and the end."""
    raised = told(AlertLog("run"), findings(episode(until=180)))
    assert [alert.change for alert in raised] == ["started", "ended"]


def test_ids_are_the_same_for_everybody() -> None:
    """Live in many looks, or in one look at the end: the same alerts have the same ids."""
    live, slow, other = AlertLog("run"), episode(), episode(rank=5, since=140)
    raised = told(live, findings(slow)) + told(live, findings(slow, other))
    slow.until_step = 180
    raised += told(live, findings(slow, other))
    replayed = told(AlertLog("run"), findings(slow, other))

    assert {alert.id for alert in raised} == {alert.id for alert in replayed}
    assert len({alert.id for alert in raised}) == 3


def test_ids_differ() -> None:
    """Run, attempt, rank, step and what has happened each make another id."""
    ids = [
        alert.id
        for run, attempt, rank, since in itertools.product("ab", (0, 1), (1, 2), (100, 200))
        for alert in told(AlertLog(run), findings(episode(rank, since, since + 50)), attempt=attempt)
    ]
    assert len(set(ids)) == len(ids) == 32
    assert all(len(each) == 32 and int(each, 16) >= 0 for each in ids)


def test_ids_are_pinned() -> None:
    """No version of ours moves them: `printf run/0/straggler/3/100 | sha256sum`, and again with /started."""
    (alert,) = told(AlertLog("run"), findings(episode()))
    assert (alert.about, alert.id) == ("4c700d3a4baba2a5990ad0d31d89717a", "7ac7aed9a2a5c771985b1762d8074225")


def test_the_slowest_of_a_node_speaks_for_it() -> None:
    """Each slow rank has its alert; all say that the node is slow, and the slowest one's sentence is the node's."""
    slow = [episode(rank, excess_ns=20e6 + rank) for rank in range(4)]
    raised = told(AlertLog("run"), findings(*slow))

    assert [(alert.rank, alert.scope, alert.ranks) for alert in raised] == [
        (rank, "node", (0, 1, 2, 3)) for rank in range(4)
    ]
    assert [alert.text.startswith("Node node-a is slow") for alert in raised] == [False, False, False, True]


def test_a_sidecar_that_was_started_again_goes_on() -> None:
    """It does not tell again of a rank that is still slow, and the end is about what was told before."""
    first, slow = AlertLog("run"), episode(since=100)
    (started,) = told(first, findings(slow))
    second = AlertLog("run", 0, findings(slow), None)
    assert told(second, NOTHING) == []  # nothing is judged yet
    again = episode(since=164, from_start=True)
    assert told(second, findings(again)) == []
    again.until_step = 300
    (ended,) = told(second, findings(again))

    assert ended.about == started.about
    assert (ended.since_step, ended.until_step) == (100, 300)
    assert "from step 100 to step 300" in ended.text


def test_one_that_ended_while_no_sidecar_ran() -> None:
    """Once a rank that was slow would have been named again, and is not, it is over; no step is claimed for it."""
    log = AlertLog("run", 0, findings(episode()), None)
    assert told(log, findings(detectable_ns=float("inf"))) == []
    assert told(log, findings(detectable_ns=21e6)) == []
    (ended,) = told(log, findings(detectable_ns=19e6))
    assert told(log, findings(detectable_ns=19e6)) == []

    assert (ended.change, ended.rank, ended.since_step, ended.until_step) == ("ended", 3, 100, None)
    assert ended.text == "Rank 3 was slow in the backward pass from step 100 on. It is over."


def test_what_had_ended_before_is_not_told_again() -> None:
    """Of saved findings, ended episodes are not raised once more when the judge still has them."""
    saved = findings(episode(until=180))
    assert told(AlertLog("run", 0, saved, None), saved) == []


def test_restarted_ranks_end_what_was_open() -> None:
    """With another attempt the slow processes are gone, and so is the hang; the new ones are told of anew."""
    log = AlertLog("run")
    told(log, findings(episode()), hung=hang())
    raised = told(log, findings(episode()), attempt=1)

    assert [(alert.kind, alert.change, alert.attempt) for alert in raised] == [
        ("straggler", "ended", 0),
        ("hang", "ended", 0),
        ("straggler", "started", 1),
    ]
    assert raised[0].text.endswith("It is over: the job was restarted.")


def test_hang_begins_and_ends() -> None:
    """One alert when it is found and one when it is over; in between only if it is known better."""
    log = AlertLog("run")
    (started,) = told(log, NOTHING, hung=hang(kind="apart", ranks=()))
    assert told(log, NOTHING, hung=hang(kind="apart", ranks=(), since_s=20)) == []
    (updated,) = told(log, NOTHING, hung=hang(kind="dead", ranks=(5,)))
    (ended,) = log.changes(0, NOTHING, None, PLACES, NOW_NS + 30 * 10**9)

    assert [alert.change for alert in (started, updated, ended)] == ["started", "updated", "ended"]
    assert started.about == updated.about == ended.about
    assert len({started.id, updated.id, ended.id}) == 3
    assert (started.rank, started.host, updated.rank, updated.host) == (None, "", 5, "node-b")
    assert (updated.cause, updated.since_step, updated.text) == ("dead", 57, hang()["text"])
    assert (started.duration_s, ended.duration_s) == (12.0, 42.0)


def test_a_hang_in_a_later_step_is_another_one() -> None:
    """Steps were made in between: the first hang is over, and another one has begun."""
    log = AlertLog("run")
    (first,) = told(log, NOTHING, hung=hang(step=57))
    over, second = told(log, NOTHING, hung=hang(step=58))

    assert (over.change, second.change) == ("ended", "started")
    assert first.about == over.about != second.about


@pytest.mark.parametrize("saved", [hang(), None])
def test_hang_over_a_restart_of_the_sidecar(saved: dict | None) -> None:
    """A hang that was saved is not told of again; one that was not has the id that it would have had."""
    (first,) = told(AlertLog("run"), NOTHING, hung=hang())
    raised = told(AlertLog("run", 0, NOTHING, saved), NOTHING, hung=hang(since_s=90))
    assert [alert.id for alert in raised] == ([] if saved else [first.id])


def test_other_verdicts_come_and_go() -> None:
    """A verdict that stands is told of once, however its numbers change, and once more when it is gone."""
    log = AlertLog("run")
    verdict = Verdict(
        "slow_link", 6, "communication", 0.01, 0.1, 40, 0.9, "The link is slow. Next: see.", {"ranks": [6, 7]}
    )
    changed = dataclasses.replace(verdict, cost_s_per_step=0.02, text="The link is slower. Next: see.")
    raised = [
        [(alert.kind, alert.change, alert.ranks, alert.text) for alert in alerts]
        for alerts in (
            log.changes(0, NOTHING, None, PLACES, NOW_NS, verdicts=verdicts)
            for verdicts in ([verdict], [changed], [], [])
        )
    ]

    assert raised == [
        [("slow_link", "started", (6, 7), verdict.text)],
        [],
        [("slow_link", "ended", (6, 7), "No longer: The link is slow.")],
        [],
    ]


def test_modules_are_in_the_sentence_where_there_is_a_report() -> None:
    """With the report's modules the alert names the slow one, as the report's verdict does."""
    module = {"name": "blocks.3", "by_rank": {}, "backward_by_rank": {"3": 0.030, "1": 0.012, "2": 0.012}}
    (alert,) = AlertLog("run").changes(
        0, findings(episode()), None, PLACES, NOW_NS, report={"modules": [module], "ranks": []}
    )
    assert "most of it in blocks.3" in alert.text


def test_counts_by_class() -> None:
    """Only ranks that are slow now count, and every class is there."""
    found = findings(
        episode(0), episode(1, phase="data"), episode(2, phase="cpu"), episode(3, phase="host"), episode(4, until=120)
    )
    assert stragglers_by_class(found) == {"slow_compute": 1, "slow_data": 1, "slow_host": 2, "more_work": 0}
