"""Alerts: one at the start and one at the end of a problem, with ids that any process derives."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from msgspec import structs

from tests.support.findings import PLACES, episode, findings, hang, shared, slow_links
from tests.support.saved import save_and_load
from tests.support.simulations import simulation
from torchlens_perf.run.verdicts import Alert
from torchlens_perf.verdicts.finding_log import FindingLog
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.stragglers.findings import (
    NOTHING,
    Cause,
    Diagnosis,
    Findings,
    UsualTimes,
    count_stragglers_by_class,
)
from torchlens_perf.verdicts.stragglers.resume import EarlierEpisodes
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.evidence import ImbalanceEvidence
from torchlens_perf.verdicts.words.hang import build_hang_verdict
from torchlens_perf.verdicts.words.stragglers import SlowRankContext

NOW_NS = 1_700_000_000_000_000_000


def told(
    log: FindingLog, found: Findings, *, attempt: int = 0, hung: dict | None = None
) -> list[Alert]:
    """Return the alerts that a log raises for the given findings."""
    return list(log.record_changes(attempt, found, hung, PLACES, NOW_NS))


def restarted(log: FindingLog, found: Findings = NOTHING) -> FindingLog:
    """Return the log of a restarted sidecar, with the saved records of the earlier one."""
    return FindingLog("run", save_and_load(log.records), found)


def test_straggler_raises_one_alert_at_its_start_and_one_at_its_end() -> None:
    """The two alerts have the same subject."""
    log, slow = FindingLog("run"), episode()
    assert told(log, NOTHING) == []
    (started,) = told(log, findings(slow))
    assert told(log, findings(slow)) == []
    slow = dataclasses.replace(slow, until_step=180, cost_ns=14e6)
    (ended,) = told(log, findings(slow))
    assert told(log, findings(slow)) == []

    assert (started.change, ended.change, started.urgent, ended.urgent) == (
        "started",
        "ended",
        True,
        False,
    )
    assert started.about == ended.about
    assert started.id != ended.id
    assert (started.since_step, started.until_step, ended.until_step) == (100, None, 180)
    assert (started.rank, started.ranks, started.host, started.phase) == (
        3,
        (3,),
        "node-a",
        "backward",
    )
    assert (started.cause, started.scope, started.attempt) == ("slow_compute", "rank", 0)
    assert (started.cost_s_per_step, started.cost_share, ended.cost_s_per_step) == (
        0.015,
        0.15,
        0.014,
    )
    assert started.text.startswith(
        "Rank 3 (node-a) is slow in the backward pass: it computes 80.0 ms per step, the other"
        " ranks 60.0"
    )
    assert "Next: compare" in started.sentence
    assert ended.sentence.startswith(
        "Rank 3 was slow in the backward pass from step 100 to step 179"
    )


def test_alert_contains_the_cause_as_text_and_as_kind() -> None:
    cause = Cause("gc", 0.9, {"gc_share": 0.9}, {})
    because = Diagnosis((cause,), (), (), {}, {})
    (started,) = FindingLog("run").record_changes(
        0, findings(episode()), None, PLACES, NOW_NS, diagnosed=lambda group: because
    )
    (unknown,) = told(FindingLog("run"), findings(episode()))

    assert started.because == ("gc",)
    assert (
        "Cause: Python's garbage collector takes 90% of the step time of rank 3, which explains 90% of the"
        " difference. Next: call gc.freeze()" in started.sentence
    )
    assert unknown.because == ()
    assert started.id == unknown.id


def test_straggler_that_started_and_ended_at_once_raises_both_alerts() -> None:
    """A replay evaluates the whole run at once."""
    raised = told(FindingLog("run"), findings(episode(until=180)))
    assert [alert.change for alert in raised] == ["started", "ended"]


def test_alert_ids_of_a_replay_equal_those_of_the_live_run() -> None:
    live, slow, other = FindingLog("run"), episode(), episode(rank=5, since=140)
    raised = told(live, findings(slow)) + told(live, findings(slow, other))
    slow = dataclasses.replace(slow, until_step=180)
    raised += told(live, findings(slow, other))
    replayed = told(FindingLog("run"), findings(slow, other))

    assert {alert.id for alert in raised} == {alert.id for alert in replayed}
    assert len({alert.id for alert in raised}) == 3


def test_alert_ids_differ_by_run_attempt_rank_step_and_change() -> None:
    ids = [
        alert.id
        for run, attempt, rank, since in itertools.product("ab", (0, 1), (1, 2), (100, 200))
        for alert in told(
            FindingLog(run), findings(episode(rank, since, since + 50)), attempt=attempt
        )
    ]
    assert len(set(ids)) == len(ids) == 32
    assert all(len(each) == 32 and int(each, 16) >= 0 for each in ids)


def test_alert_ids_equal_their_pinned_values() -> None:
    """The subject is `printf run/0/straggler/3/112 | sha256sum`, the id the same with /started."""
    (alert,) = told(FindingLog("run"), findings(episode()))
    assert (alert.about, alert.id) == (
        "d99058c2bea77235e991556cbaa1c026",
        "d096ecffb5fb492b68522f7dd942ffa1",
    )


@pytest.mark.parametrize("restart", [None, 80], ids=["one sidecar", "two"])
def test_corrected_first_step_of_a_straggler_raises_no_second_alert(restart: int | None) -> None:
    """While a rank becomes slower, its first step is corrected.

    The straggler stays the same live, over a restart and in a replay.
    """
    blocks = [
        block.select_steps(first, first + 4)
        for part in simulation("drifting:rank=3,share=0.2,over=60,since=40,until=110").steps(160)
        for _, block in part.detector_rows(1)
        for first in range(int(block.key[block.key >= 0].min()), int(block.key.max()) + 1, 4)
    ]
    judge, log, goes_on = StragglerDetector(), FindingLog("run"), EarlierEpisodes(NOTHING)
    found, raised, since = NOTHING, [], set()
    for block in blocks:
        if restart is not None and int(block.key[block.key >= 0].min()) == restart:
            kept = save_and_load(found)
            judge, log, goes_on = StragglerDetector(), restarted(log, kept), EarlierEpisodes(kept)
        judge.add_bin_batch("", block)
        found = goes_on.merge_into(judge.judge())
        since |= {each.since_step for each in found.episodes}
        raised += told(log, found)
    whole = StragglerDetector()
    for block in blocks:
        whole.add_bin_batch("", block)
    replayed = told(FindingLog("run"), whole.judge(final=True))

    assert len(since) > 1
    assert [alert.change for alert in raised] == ["started", "ended"]
    assert [(alert.id, alert.about) for alert in raised] == [
        (alert.id, alert.about) for alert in replayed
    ]


@pytest.mark.parametrize(
    ("shared_cost_ns", "cost"),
    [(12e6, (0.012, 0.12)), (None, (None, None))],
    ids=["known", "not known"],
)
def test_slow_node_is_one_alert_with_its_shared_cost(
    shared_cost_ns: float | None, cost: tuple[float | None, float | None]
) -> None:
    """Each rank of the slow node alone costs nothing."""
    slow = [
        episode(
            rank,
            excess_ns=20e6 + rank,
            cost_ns=0.0,
            shared=shared_cost_ns and shared(shared_cost_ns),
        )
        for rank in range(4)
    ]
    log = FindingLog("run")
    (started,) = told(log, findings(*slow))
    for rank, each in enumerate(slow):
        assert told(log, findings(*slow)) == []
        slow[rank] = dataclasses.replace(each, until_step=180 + rank)
    (ended,) = told(log, findings(*slow))
    assert told(log, findings(*slow)) == []

    assert (started.rank, started.scope, started.ranks) == (3, "node", (0, 1, 2, 3))
    assert started.sentence.startswith("Node node-a is slow (ranks 0-3), most of all rank 3,")
    assert (started.cost_s_per_step, started.cost_share) == cost
    assert ("is not known" in started.sentence) == (shared_cost_ns is None)
    assert (ended.about, ended.change, ended.scope, ended.ranks) == (
        started.about,
        "ended",
        "node",
        (0, 1, 2, 3),
    )
    assert (ended.until_step, ended.cost_s_per_step) == (183, (shared_cost_ns or 0) / 1e9)
    assert ended.sentence.startswith(
        "Node node-a (ranks 0-3) was slow up to step 182. Rank 3 was slow in the backward pass"
    )


@pytest.mark.parametrize("restart", [None, 130, 150, 170], ids=str)
def test_ranks_that_join_a_slow_node_update_its_alert(restart: int | None) -> None:
    """The ids are the same live, over a restart and in a replay."""
    # Ranks 0 and 1 are reported alone, rank 2 makes the group a node, and rank 3 joins it. Rank 2
    # ends and is reported again. Rank 0 ended before rank 3 was reported, which becomes known only
    # later.
    named = {(0, 112): 143, (1, 120): 190, (2, 140): 160, (3, 145): 200, (2, 175): 195}

    def at(step: int) -> Findings:
        return findings(
            *(
                episode(
                    rank, first - 12, until if step >= until + 5 else None, named_step=first,
                    last_step=min(step, until + 4), cost_ns=0.0, shared=shared(5e6),
                )
                for (rank, first), until in named.items()
                if step >= first
            )
        )  # fmt: skip

    log, live = FindingLog("run"), []
    for step in range(100, 220, 3):
        if restart is not None and step - 3 < restart <= step:
            log = restarted(log, save_and_load(at(step - 3)))
        live += told(log, at(step))
    replayed = told(FindingLog("run"), at(300))

    changes = [(alert.rank, alert.change, alert.ranks) for alert in live]
    assert [(change, ranks) for _, change, ranks in changes] == [
        ("started", (0,)),
        ("started", (1,)),
        ("updated", (0, 1, 2)),
        ("updated", (0, 1, 2, 3)),
        ("updated", (1, 2, 3)),
        ("ended", (1,)),
        ("ended", (0, 2, 3)),
    ]
    assert {alert.about for alert in live if alert.ranks != (1,)} == {live[0].about}
    assert len({alert.id for alert in live}) == len(live)
    assert sorted(alert.id for alert in live) == sorted(alert.id for alert in replayed)


def test_restarted_sidecar_does_not_repeat_an_alert() -> None:
    """The alert at the end has the subject of the earlier one."""
    first, slow = FindingLog("run"), episode(since=100)
    (started,) = told(first, findings(slow))
    second = restarted(first, findings(slow))
    goes_on = EarlierEpisodes(findings(slow))
    assert told(second, goes_on.merge_into(NOTHING)) == []  # Nothing has been judged yet.
    again = episode(since=164)
    assert told(second, goes_on.merge_into(findings(again))) == []
    again = dataclasses.replace(again, until_step=300)
    (ended,) = told(second, goes_on.merge_into(findings(again)))
    assert told(second, goes_on.merge_into(findings(again))) == []

    assert ended.about == started.about
    assert (ended.since_step, ended.until_step) == (100, 300)
    assert "from step 100 to step 299" in ended.sentence


def test_straggler_that_ended_while_no_sidecar_ran_raises_its_end() -> None:
    """The end is known once the rank would have been found again."""
    before = findings(episode())
    log, goes_on = FindingLog("run"), EarlierEpisodes(before)
    told(log, before)
    log = restarted(log, before)
    usual = (UsualTimes("same", "0-7", 60e6, 40e6),)
    assert told(log, goes_on.merge_into(findings(usual=usual, detectable_ns=21e6))) == []
    (ended,) = told(log, goes_on.merge_into(findings(usual=usual, detectable_ns=19e6)))
    assert told(log, goes_on.merge_into(findings(usual=usual, detectable_ns=19e6))) == []

    assert (ended.change, ended.rank, ended.since_step, ended.until_step) == ("ended", 3, 100, 151)


def test_ended_straggler_is_not_raised_again_after_a_restart() -> None:
    before = findings(episode(until=180))
    log = FindingLog("run")
    assert [alert.change for alert in told(log, before)] == ["started", "ended"]
    assert told(restarted(log, before), before) == []


def test_new_attempt_ends_open_findings() -> None:
    """If the new processes have the same problems, alerts are raised again."""
    log = FindingLog("run")
    told(log, findings(episode()), hung=hang())
    raised = told(log, findings(episode()), attempt=1)

    assert [(alert.kind, alert.change, alert.attempt) for alert in raised] == [
        ("straggler", "ended", 0),
        ("hang", "ended", 0),
        ("straggler", "started", 1),
    ]
    assert raised[0].text.endswith("It is over: the job was restarted.")


def test_first_findings_on_new_processes_end_those_on_replaced_ones() -> None:
    log = FindingLog("run")
    told(log, findings(episode(), episode(5, until=180)))
    (ended,) = told(log, NOTHING)
    raised = told(log, findings(episode(), episode(5)))

    assert (ended.change, ended.rank) == ("ended", 3)
    assert ended.sentence.endswith("It is over: the ranks were started again.")
    assert [(alert.change, alert.rank) for alert in raised] == [("started", 3), ("started", 5)]


def test_hang_raises_its_start_its_updates_and_its_end() -> None:
    """The alert is updated only if the kind of hang or its ranks change."""
    log = FindingLog("run")
    (started,) = told(log, NOTHING, hung=hang(kind="apart", ranks=()))
    assert told(log, NOTHING, hung=hang(kind="apart", ranks=(), since_s=20)) == []
    (updated,) = told(log, NOTHING, hung=hang(kind="dead", ranks=(5,), since_s=20))
    (ended,) = log.record_changes(0, NOTHING, None, PLACES, NOW_NS + 30 * 10**9)

    assert [alert.change for alert in (started, updated, ended)] == ["started", "updated", "ended"]
    assert started.about == updated.about == ended.about
    assert len({started.id, updated.id, ended.id}) == 3
    assert (started.rank, started.host, updated.rank, updated.host) == (None, "", 5, "node-b")
    assert (updated.cause, updated.since_step, updated.text) == (
        "dead",
        57,
        build_hang_verdict(hang(since_s=20)).text,
    )
    # The alert at the end has the duration that was measured last, which does not grow until the
    # end.
    assert (started.duration_s, ended.duration_s) == (12.0, 20)


def test_hang_in_a_later_step_is_another_hang() -> None:
    log = FindingLog("run")
    (first,) = told(log, NOTHING, hung=hang(step=57))
    over, second = told(log, NOTHING, hung=hang(step=58))

    assert (over.change, second.change) == ("ended", "started")
    assert first.about == over.about != second.about


@pytest.mark.parametrize("before", [True, False], ids=["saved", "not saved"])
def test_saved_hang_is_not_raised_again_after_a_restart(before: bool) -> None:
    """A hang that was not saved is raised with the same id."""
    log = FindingLog("run")
    (first,) = told(log, NOTHING, hung=hang())
    raised = told(restarted(log) if before else FindingLog("run"), NOTHING, hung=hang(since_s=90))
    assert [alert.id for alert in raised] == ([] if before else [first.id])


def hanging() -> FindingLog:
    """Return the log of a sidecar that was restarted during a hang."""
    log = FindingLog("run")
    told(log, NOTHING, hung=hang(since_s=90.0))
    return restarted(log)


def test_saved_hang_stays_open_until_a_step_ends() -> None:
    """A restarted sidecar finds the hang again only after some seconds."""
    log = hanging()

    def look(hung: dict | None, at_step: int | None) -> list[tuple[str, float | None]]:
        raised = log.record_changes(0, NOTHING, hung, PLACES, NOW_NS, at_step=at_step)
        return [(alert.change, alert.duration_s) for alert in raised]

    assert look(None, 57) == []
    assert look(hang(since_s=12), 57) == []
    assert look(None, 57) == [("ended", 90)]
    # The hang is over after a step has ended, or after all processes have ended.
    for at_step in (58, None):
        log = hanging()
        assert look(None, 57) == []
        assert look(None, at_step) == [("ended", 90)]


def test_slow_rank_at_the_same_step_of_a_new_attempt_has_another_alert() -> None:
    log = FindingLog("run")
    (first,) = told(log, findings(episode()))
    ended, second = log.record_changes(1, findings(episode()), None, PLACES, NOW_NS)
    again = restarted(log, findings(episode()))

    assert (ended.about, ended.change, second.change) == (first.about, "ended", "started")
    assert ended.sentence.endswith("It is over: the job was restarted.")
    assert second.id != first.id
    assert again.record_changes(1, findings(episode()), None, PLACES, NOW_NS) == ()


def test_another_slow_link_updates_the_open_alert() -> None:
    """All slow links share one alert, whichever costs most."""
    log, raised = FindingLog("run"), []
    for verdict in (
        slow_links((0, 1)),
        slow_links((2, 3), (0, 1)),
        slow_links((0, 1), (2, 3)),
        slow_links((0, 1)),
    ):
        raised.append(log.record_changes(0, NOTHING, None, PLACES, NOW_NS, verdicts=[verdict]))
        log = restarted(log)
    (started,), (updated,), *others = raised

    assert (started.change, started.ranks, updated.change, updated.ranks) == (
        "started",
        (0, 1),
        "updated",
        (2, 3),
    )
    assert started.about == updated.about
    assert started.id != updated.id
    assert others == [(), ()]


def test_verdict_missing_for_less_than_a_minute_stays_open() -> None:
    log, second = FindingLog("run"), 10**9
    changes = [
        [
            each.change
            for each in log.record_changes(
                0, NOTHING, None, PLACES, NOW_NS + at * second, verdicts=verdicts
            )
        ]
        for at, verdicts in (
            (0, [slow_links((0, 1))]),
            (50, []),
            (55, [slow_links((0, 1))]),
            (110, []),
            (115, []),
        )
    ]
    assert changes == [["started"], [], [], [], ["ended"]]


def test_verdict_raises_one_alert_at_its_start_and_one_at_its_end() -> None:
    """Changed numbers raise no alert."""
    log = FindingLog("run")
    evidence = ImbalanceEvidence(
        "pp 1", 0.002, 0.001, ranks=(6, 7), scope="stage", cause="imbalance"
    )
    verdict = Verdict(
        kind="imbalance", cost_s_per_step=0.01, cost_share=0.1, confidence=0.9,
        action="see.", evidence=evidence,
    )  # fmt: skip
    slower = structs.replace(evidence, work_s=0.003)
    changed = structs.replace(verdict, cost_s_per_step=0.02, evidence=slower)
    raised = [
        [(alert.kind, alert.change, alert.ranks, alert.sentence) for alert in alerts]
        for alerts in (
            log.record_changes(
                0, NOTHING, None, PLACES, NOW_NS + minute * 60 * 10**9, verdicts=verdicts
            )
            for minute, verdicts in enumerate(([verdict], [changed], [], []))
        )
    ]

    assert raised == [
        [("imbalance", "started", (6, 7), verdict.sentence)],
        [],
        [
            (
                "imbalance",
                "ended",
                (6, 7),
                f"This is over, and needs no action unless it returns: {changed.text}",
            )
        ],
        [],
    ]


def test_alert_has_the_slow_module_of_the_report() -> None:
    module = {
        "name": "blocks.3",
        "by_rank": {},
        "backward_by_rank": {"3": 0.030, "1": 0.012, "2": 0.012},
    }
    (alert,) = FindingLog("run").record_changes(
        0, findings(episode()), None, PLACES, NOW_NS, context=lambda: SlowRankContext([module])
    )
    assert "most of the difference is in blocks.3" in alert.sentence


def test_open_slow_ranks_are_counted_by_class() -> None:
    """Ended episodes do not count, and all classes are present."""
    found = findings(
        episode(0),
        episode(1, phase="data"),
        episode(2, phase="cpu"),
        episode(3, phase="host"),
        episode(4, until=120),
    )
    assert count_stragglers_by_class(found) == {
        "slow_compute": 1,
        "slow_data": 1,
        "slow_host": 2,
        "more_work": 0,
    }


def test_alerts_of_a_node_that_judges_alone_end_when_another_node_judges() -> None:
    """Earlier ended episodes raise no alert."""
    log, slow, past = FindingLog("run"), episode(), episode(rank=5, since=10, until=40)
    links = slow_links((0, 1))

    def found(judge: str | None, log: FindingLog = log) -> list[Alert]:
        verdicts = () if judge is None else (links,)
        hung = None if judge is None else hang()
        return list(
            log.record_changes(
                0,
                findings(slow, past),
                hung,
                PLACES,
                NOW_NS,
                judge=judge,
                verdicts=verdicts,
                at_step=1,
            )
        )

    assert found(None) == []
    began = found("node-b")
    assert {(each.kind, each.change) for each in began} == {
        ("straggler", "started"), ("hang", "started"), ("slow_link", "started")
    }  # fmt: skip
    assert [each.rank for each in began if each.kind == "straggler"] == [3]
    assert all(
        each.sentence.startswith("Only from node node-b, which cannot reach node 0: ")
        for each in began
    )
    assert found("node-b") == []

    again = restarted(log, findings(slow, past))
    for each in (log, again):
        ended = found(None, each)
        assert {alert.about for alert in ended} == {alert.about for alert in began}
        assert {alert.change for alert in ended} == {"ended"}
        assert all(
            alert.sentence.endswith("This alert ends: another node judges this from now on.")
            for alert in ended
        )
        assert not each.records.open_findings
        assert found(None, each) == []
