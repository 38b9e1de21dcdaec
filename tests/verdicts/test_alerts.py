"""Alerts: raised once when something begins and when it ends, with ids that do not depend on who raises them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.support.findings import PLACES, episode, findings, hang, slow_links
from tests.support.saved import saved
from tests.support.simulations import simulation
from torchlens_perf.run.verdicts import Alert
from torchlens_perf.verdicts.finding_log import FindingLog, stragglers_by_class
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Cause, Diagnosis, Findings, Usual
from torchlens_perf.verdicts.stragglers.resume import EarlierEpisodes
from torchlens_perf.verdicts.words.evidence import ImbalanceEvidence, judged
from torchlens_perf.verdicts.words.stragglers import SlowRankContext

NOW_NS = 1_700_000_000_000_000_000


def told(log: FindingLog, found: Findings, *, attempt: int = 0, hung: dict | None = None) -> list[Alert]:
    """What a log raises for these findings."""
    return list(log.changes(attempt, found, hung, PLACES, NOW_NS))


def restarted(log: FindingLog, found: Findings = NOTHING) -> FindingLog:
    """The log of a sidecar that was started again, with what the one before has saved."""
    return FindingLog("run", saved(log.records), found)


def test_a_straggler_is_told_of_once_and_ends_once() -> None:
    """An alert when a rank is named, another when it is over, nothing in between; both are about the same."""
    log, slow = FindingLog("run"), episode()
    assert told(log, NOTHING) == []
    (started,) = told(log, findings(slow))
    assert told(log, findings(slow)) == []
    slow = dataclasses.replace(slow, until_step=180, cost_ns=14e6)
    (ended,) = told(log, findings(slow))
    assert told(log, findings(slow)) == []

    assert (started.change, ended.change, started.urgent, ended.urgent) == ("started", "ended", True, False)
    assert started.about == ended.about
    assert started.id != ended.id
    assert (started.since_step, started.until_step, ended.until_step) == (100, None, 180)
    assert (started.rank, started.ranks, started.host, started.phase) == (3, (3,), "node-a", "backward")
    assert (started.cause, started.scope, started.attempt) == ("slow_compute", "rank", 0)
    assert (started.cost_s_per_step, started.cost_share, ended.cost_s_per_step) == (0.015, 0.15, 0.014)
    assert started.text.startswith(
        "Rank 3 (node-a) is slow in the backward pass: it computes 80.0 ms per step, the other ranks 60.0"
    )
    assert "Next: compare" in started.sentence
    assert ended.sentence.startswith("Rank 3 was slow in the backward pass from step 100 to step 179")


def test_why_it_is_slow() -> None:
    """An alert says why, in words and for machines; who is called needs not look it up."""
    cause = Cause("gc", "it collects garbage", "call gc.freeze().", 0.9, {})
    because = Diagnosis((cause,), (), (), {}, {})
    (started,) = FindingLog("run").changes(
        0, findings(episode()), None, PLACES, NOW_NS, diagnosed=lambda group: because
    )
    (unknown,) = told(FindingLog("run"), findings(episode()))

    assert started.because == ("gc",)
    assert "Because it collects garbage (which explains 90% of it). Next: call gc.freeze()." in started.sentence
    assert unknown.because == ()
    assert started.id == unknown.id


def test_one_that_came_and_went_between_two_looks_is_told_of() -> None:
    """A replay sees everything at once: it raises the start and the end."""
    raised = told(FindingLog("run"), findings(episode(until=180)))
    assert [alert.change for alert in raised] == ["started", "ended"]


def test_ids_are_the_same_for_everybody() -> None:
    """Live in many looks, or in one look at the end: the same alerts have the same ids."""
    live, slow, other = FindingLog("run"), episode(), episode(rank=5, since=140)
    raised = told(live, findings(slow)) + told(live, findings(slow, other))
    slow = dataclasses.replace(slow, until_step=180)
    raised += told(live, findings(slow, other))
    replayed = told(FindingLog("run"), findings(slow, other))

    assert {alert.id for alert in raised} == {alert.id for alert in replayed}
    assert len({alert.id for alert in raised}) == 3


def test_ids_differ() -> None:
    """Run, attempt, rank, step and what has happened each make another id."""
    ids = [
        alert.id
        for run, attempt, rank, since in itertools.product("ab", (0, 1), (1, 2), (100, 200))
        for alert in told(FindingLog(run), findings(episode(rank, since, since + 50)), attempt=attempt)
    ]
    assert len(set(ids)) == len(ids) == 32
    assert all(len(each) == 32 and int(each, 16) >= 0 for each in ids)


def test_ids_are_pinned() -> None:
    """No version of ours moves them: `printf run/0/straggler/3/112 | sha256sum`, and again with /started."""
    (alert,) = told(FindingLog("run"), findings(episode()))
    assert (alert.about, alert.id) == ("d99058c2bea77235e991556cbaa1c026", "d096ecffb5fb492b68522f7dd942ffa1")


@pytest.mark.parametrize("restart", [None, 80], ids=["one sidecar", "two"])
def test_a_first_step_that_is_corrected_makes_no_other_alert(restart: int | None) -> None:
    """While a rank grows slower, the first step moves: it is one straggler, live, over a restart and in a replay."""
    blocks = [
        block.between(first, first + 4)
        for part in simulation("drifting:rank=3,share=0.2,over=60,since=40,until=110").steps(160)
        for _, block in part.blocks(1)
        for first in range(int(block.key[block.key >= 0].min()), int(block.key.max()) + 1, 4)
    ]
    judge, log, goes_on = StragglerDetector(), FindingLog("run"), EarlierEpisodes(NOTHING)
    found, raised, since = NOTHING, [], set()
    for block in blocks:
        if restart is not None and int(block.key[block.key >= 0].min()) == restart:
            kept = saved(found)
            judge, log, goes_on = StragglerDetector(), restarted(log, kept), EarlierEpisodes(kept)
        judge.add_block("", block)
        found = goes_on.merged_with(judge.judge())
        since |= {each.since_step for each in found.episodes}
        raised += told(log, found)
    whole = StragglerDetector()
    for block in blocks:
        whole.add_block("", block)
    replayed = told(FindingLog("run"), whole.judge(final=True))

    assert len(since) > 1
    assert [alert.change for alert in raised] == ["started", "ended"]
    assert [(alert.id, alert.about) for alert in raised] == [(alert.id, alert.about) for alert in replayed]


@pytest.mark.parametrize(
    ("shared_cost_ns", "cost"), [(12e6, (0.012, 0.12)), (None, (None, None))], ids=["known", "not known"]
)
def test_a_slow_node_is_one_alert(shared_cost_ns: float | None, cost: tuple[float | None, float | None]) -> None:
    """It names all of its ranks and what they cost together, which is not what each of them costs: that is nothing."""
    slow = [episode(rank, excess_ns=20e6 + rank, cost_ns=0.0, shared_cost_ns=shared_cost_ns) for rank in range(4)]
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
    assert (ended.about, ended.change, ended.scope, ended.ranks) == (started.about, "ended", "node", (0, 1, 2, 3))
    assert (ended.until_step, ended.cost_s_per_step) == (183, (shared_cost_ns or 0) / 1e9)
    assert ended.sentence.startswith(
        "Node node-a (ranks 0-3) was slow up to step 182. Rank 3 was slow in the backward pass"
    )


@pytest.mark.parametrize("restart", [None, 130, 150, 170], ids=str)
def test_ranks_that_join_a_slow_node_update_its_alert(restart: int | None) -> None:
    """Nothing is lost of those that are named later; live, over a restart and in a replay the ids are the same."""
    # Ranks 0 and 1 are known each by itself, 2 makes them a node, 3 joins it; 2 is over and is named once more. That
    # 0 is over since before 3 was named is found out only after that.
    named = {(0, 112): 143, (1, 120): 190, (2, 140): 160, (3, 145): 200, (2, 175): 195}

    def at(step: int) -> Findings:
        return findings(
            *(
                episode(
                    rank, first - 12, until if step >= until + 5 else None, named_step=first,
                    last_step=min(step, until + 4), cost_ns=0.0, shared_cost_ns=5e6,
                )
                for (rank, first), until in named.items()
                if step >= first
            )
        )  # fmt: skip

    log, live = FindingLog("run"), []
    for step in range(100, 220, 3):
        if restart is not None and step - 3 < restart <= step:
            log = restarted(log, saved(at(step - 3)))
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


def test_a_sidecar_that_was_started_again_goes_on() -> None:
    """It does not tell again of a rank that is still slow, and the end is about what was told before."""
    first, slow = FindingLog("run"), episode(since=100)
    (started,) = told(first, findings(slow))
    second = restarted(first, findings(slow))
    goes_on = EarlierEpisodes(findings(slow))
    assert told(second, goes_on.merged_with(NOTHING)) == []  # nothing is judged yet
    again = episode(since=164)
    assert told(second, goes_on.merged_with(findings(again))) == []
    again = dataclasses.replace(again, until_step=300)
    (ended,) = told(second, goes_on.merged_with(findings(again)))
    assert told(second, goes_on.merged_with(findings(again))) == []

    assert ended.about == started.about
    assert (ended.since_step, ended.until_step) == (100, 300)
    assert "from step 100 to step 299" in ended.sentence


def test_one_that_ended_while_no_sidecar_ran() -> None:
    """Once a rank that was slow would have been named again, and is not, it is over, as far as is known at once."""
    before = findings(episode())
    log, goes_on = FindingLog("run"), EarlierEpisodes(before)
    told(log, before)
    log = restarted(log, before)
    usual = (Usual("same", "0-7", 60e6, 40e6),)
    assert told(log, goes_on.merged_with(findings(usual=usual, detectable_ns=21e6))) == []
    (ended,) = told(log, goes_on.merged_with(findings(usual=usual, detectable_ns=19e6)))
    assert told(log, goes_on.merged_with(findings(usual=usual, detectable_ns=19e6))) == []

    assert (ended.change, ended.rank, ended.since_step, ended.until_step) == ("ended", 3, 100, 151)


def test_what_had_ended_before_is_not_told_again() -> None:
    """Of saved findings, ended episodes are not raised once more when the judge still has them."""
    before = findings(episode(until=180))
    log = FindingLog("run")
    assert [alert.change for alert in told(log, before)] == ["started", "ended"]
    assert told(restarted(log, before), before) == []


def test_restarted_ranks_end_what_was_open() -> None:
    """With another attempt the slow processes are gone, and so is the hang; the new ones are told of anew."""
    log = FindingLog("run")
    told(log, findings(episode()), hung=hang())
    raised = told(log, findings(episode()), attempt=1)

    assert [(alert.kind, alert.change, alert.attempt) for alert in raised] == [
        ("straggler", "ended", 0),
        ("hang", "ended", 0),
        ("straggler", "started", 1),
    ]
    assert raised[0].text.endswith("It is over: the job was restarted.")


def test_ranks_that_were_replaced_within_an_attempt() -> None:
    """Findings that begin anew end what was open, and the new process of a rank is told of as if it were the first."""
    log = FindingLog("run")
    told(log, findings(episode(), episode(5, until=180)))
    (ended,) = told(log, NOTHING)
    raised = told(log, findings(episode(), episode(5)))

    assert (ended.change, ended.rank) == ("ended", 3)
    assert ended.sentence.endswith("It is over: the ranks were started again.")
    assert [(alert.change, alert.rank) for alert in raised] == [("started", 3), ("started", 5)]


def test_hang_begins_and_ends() -> None:
    """One alert when it is found and one when it is over; in between only if it is known better."""
    log = FindingLog("run")
    (started,) = told(log, NOTHING, hung=hang(kind="apart", ranks=()))
    assert told(log, NOTHING, hung=hang(kind="apart", ranks=(), since_s=20)) == []
    (updated,) = told(log, NOTHING, hung=hang(kind="dead", ranks=(5,), since_s=20))
    (ended,) = log.changes(0, NOTHING, None, PLACES, NOW_NS + 30 * 10**9)

    assert [alert.change for alert in (started, updated, ended)] == ["started", "updated", "ended"]
    assert started.about == updated.about == ended.about
    assert len({started.id, updated.id, ended.id}) == 3
    assert (started.rank, started.host, updated.rank, updated.host) == (None, "", 5, "node-b")
    assert (updated.cause, updated.since_step, updated.sentence) == ("dead", 57, hang(since_s=20).text)
    # Its age is that at the last look: it grows there, and is not counted twice.
    assert (started.duration_s, ended.duration_s) == (12.0, 20)


def test_a_hang_in_a_later_step_is_another_one() -> None:
    """Steps were made in between: the first hang is over, and another one has begun."""
    log = FindingLog("run")
    (first,) = told(log, NOTHING, hung=hang(step=57))
    over, second = told(log, NOTHING, hung=hang(step=58))

    assert (over.change, second.change) == ("ended", "started")
    assert first.about == over.about != second.about


@pytest.mark.parametrize("before", [True, False], ids=["saved", "not saved"])
def test_hang_over_a_restart_of_the_sidecar(before: bool) -> None:
    """A hang that was saved is not told of again; one that was not has the id that it would have had."""
    log = FindingLog("run")
    (first,) = told(log, NOTHING, hung=hang())
    raised = told(restarted(log) if before else FindingLog("run"), NOTHING, hung=hang(since_s=90))
    assert [alert.id for alert in raised] == ([] if before else [first.id])


def hanging() -> FindingLog:
    """The log of a sidecar that was started again while the job hangs."""
    log = FindingLog("run")
    told(log, NOTHING, hung=hang(since_s=90.0))
    return restarted(log)


def test_a_saved_hang_lasts_until_it_is_known_to_be_over() -> None:
    """A sidecar that was started again finds it anew only seconds later; until then, no step was made."""
    log = hanging()

    def look(hung: dict | None, at_step: int | None) -> list[tuple[str, float | None]]:
        raised = log.changes(0, NOTHING, hung, PLACES, NOW_NS, at_step=at_step)
        return [(alert.change, alert.duration_s) for alert in raised]

    assert look(None, 57) == []
    assert look(hang(since_s=12), 57) == []
    assert look(None, 57) == [("ended", 90)]
    for at_step in (58, None):  # a step was made, or all processes have ended
        log = hanging()
        assert look(None, 57) == []
        assert look(None, at_step) == [("ended", 90)]


def test_new_processes_have_alerts_of_their_own() -> None:
    """After a restart ranks begin anew: one named at the same step is another one."""
    log = FindingLog("run")
    (first,) = told(log, findings(episode()))
    ended, second = log.changes(1, findings(episode()), None, PLACES, NOW_NS)
    again = restarted(log, findings(episode()))

    assert (ended.about, ended.change, second.change) == (first.about, "ended", "started")
    assert ended.sentence.endswith("It is over: the job was restarted.")
    assert second.id != first.id
    assert again.changes(1, findings(episode()), None, PLACES, NOW_NS) == ()


def test_another_slow_link_updates_the_alert() -> None:
    """Slow links are one alert, whichever costs most by now; one that was not told of before is news."""
    log, raised = FindingLog("run"), []
    for verdict in (
        slow_links((0, 1)),
        slow_links((2, 3), (0, 1)),
        slow_links((0, 1), (2, 3)),
        slow_links((0, 1)),
    ):
        raised.append(log.changes(0, NOTHING, None, PLACES, NOW_NS, verdicts=[verdict]))
        log = restarted(log)
    (started,), (updated,), *others = raised

    assert (started.change, started.ranks, updated.change, updated.ranks) == ("started", (0, 1), "updated", (2, 3))
    assert started.about == updated.about
    assert started.id != updated.id
    assert others == [(), ()]


def test_a_verdict_that_is_missed_for_moments_stands() -> None:
    """One that is about as large as it must be is not told of each time."""
    log, second = FindingLog("run"), 10**9
    changes = [
        [each.change for each in log.changes(0, NOTHING, None, PLACES, NOW_NS + at * second, verdicts=verdicts)]
        for at, verdicts in (
            (0, [slow_links((0, 1))]),
            (50, []),
            (55, [slow_links((0, 1))]),
            (110, []),
            (115, []),
        )
    ]
    assert changes == [["started"], [], [], [], ["ended"]]


def test_other_verdicts_come_and_go() -> None:
    """A verdict that stands is told of once, however its numbers change, and once more when it is gone."""
    log = FindingLog("run")
    evidence = ImbalanceEvidence("imbalance", "stage", (6, 7))
    verdict = judged("imbalance", None, None, 0.01, 0.1, None, 0.9, "The stage is slow. Next: see.", evidence)
    changed = dataclasses.replace(verdict, cost_s_per_step=0.02, text="The stage is slower. Next: see.")
    raised = [
        [(alert.kind, alert.change, alert.ranks, alert.sentence) for alert in alerts]
        for alerts in (
            log.changes(0, NOTHING, None, PLACES, NOW_NS + minute * 60 * 10**9, verdicts=verdicts)
            for minute, verdicts in enumerate(([verdict], [changed], [], []))
        )
    ]

    assert raised == [
        [("imbalance", "started", (6, 7), verdict.sentence)],
        [],
        [("imbalance", "ended", (6, 7), "No longer: The stage is slower.")],
        [],
    ]


def test_modules_are_in_the_sentence_where_there_is_a_report() -> None:
    """With the report's modules the alert names the slow one, as the report's verdict does."""
    module = {"name": "blocks.3", "by_rank": {}, "backward_by_rank": {"3": 0.030, "1": 0.012, "2": 0.012}}
    (alert,) = FindingLog("run").changes(
        0, findings(episode()), None, PLACES, NOW_NS, context=lambda: SlowRankContext([module])
    )
    assert "most of the difference is in blocks.3" in alert.sentence


def test_counts_by_class() -> None:
    """Only ranks that are slow now count, and every class is there."""
    found = findings(
        episode(0), episode(1, phase="data"), episode(2, phase="cpu"), episode(3, phase="host"), episode(4, until=120)
    )
    assert stragglers_by_class(found) == {"slow_compute": 1, "slow_data": 1, "slow_host": 2, "more_work": 0}


def test_a_node_that_judges_alone() -> None:
    """Its alerts are its own, and end when another node judges; what was over before it began is nothing new."""
    log, slow, past = FindingLog("run"), episode(), episode(rank=5, since=10, until=40)
    links = slow_links((0, 1))

    def found(judge: str | None, log: FindingLog = log) -> list[Alert]:
        verdicts = () if judge is None else (links,)
        hung = None if judge is None else hang()
        return list(
            log.changes(0, findings(slow, past), hung, PLACES, NOW_NS, judge=judge, verdicts=verdicts, at_step=1)
        )

    assert found(None) == []
    began = found("node-b")
    assert {(each.kind, each.change) for each in began} == {
        ("straggler", "started"), ("hang", "started"), ("slow_link", "started")
    }  # fmt: skip
    assert [each.rank for each in began if each.kind == "straggler"] == [3]
    assert all(each.sentence.startswith("On node node-b alone, from where node 0 is not reached: ") for each in began)
    assert found("node-b") == []

    again = restarted(log, findings(slow, past))
    for each in (log, again):
        ended = found(None, each)
        assert {alert.about for alert in ended} == {alert.about for alert in began}
        assert {alert.change for alert in ended} == {"ended"}
        assert all(alert.sentence.endswith("This alert ends: from now on, others judge it.") for alert in ended)
        assert not each.are_open
        assert found(None, each) == []
