"""Steps and windows in which a verdict was true (`held`), compared with the steps of the run."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.support.facts import take_facts
from tests.support.findings import PLACES, episode, findings, hang, hung, slow_links
from tests.support.reports import checked
from tests.verdicts.words.test_bottleneck import BASE, state_of
from torchlens_perf.analysis.statistics.run_windows import RunWindows
from torchlens_perf.report.build import build_report
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.causes.straggler_groups import add_straggler_groups
from torchlens_perf.verdicts.finding_log import FindingLog
from torchlens_perf.verdicts.judged_windows import JudgedWindows, find_mostly_true_slice
from torchlens_perf.verdicts.node_state import NodeState
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import (
    NOTHING,
    Findings,
    StragglerGroup,
    UsualTimes,
)
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.verdict import Period
from torchlens_perf.verdicts.words.hang import RankStack
from torchlens_perf.verdicts.words.past import describe_period, format_time_of_day
from torchlens_perf.view.terminal import render_full

# Number of steps in a window of a short run.
WIDTH = 8
# Duration of a step with the parts in BASE.
STEP_S = 0.016
SECOND_NS = 1_000_000_000


def node(
    loops: Sequence[Sequence[dict[str, Any]]], found: Findings | None = None, **changed: Any
) -> NodeState:
    """Return a node whose ranks made the given steps.

    `found` has the node's findings, `changed` replaces field values of the node and its processes.
    """
    of_node = {
        field.name: changed.pop(field.name)
        for field in dataclasses.fields(NodeState)
        if field.name in changed
    }
    states = [state_of(rank, len(loops), list(steps)) for rank, steps in enumerate(loops)]
    facts = take_facts(changed)
    states = [dataclasses.replace(state, facts=facts, **changed) for state in states]
    processes = {state.identity.key: state for state in states}
    if found is not None:
        groups = tuple(StragglerGroup("rank", "", (each.rank,), each) for each in found.slow_now)
        of_node["findings"] = dataclasses.replace(found, groups=groups)
    return NodeState("h", processes, **of_node)


def rows(state: NodeState) -> dict[str, dict[str, Any]]:
    """Return the report's verdicts by kind, the first of each kind."""
    verdicts = checked(build_report("r", [state]))["verdicts"]
    return {row.kind: row for row in reversed(verdicts)}


def usual(count: int) -> list[dict[str, Any]]:
    return [dict(BASE) for _ in range(count)]


def seconds(at: str) -> float:
    """Return seconds since the first step of the run, which is at clock time 0."""
    return datetime.datetime.fromisoformat(at).timestamp()


# -- slow ranks


@given(
    since=st.integers(0, 150), length=st.one_of(st.none(), st.integers(13, 150)), from_start=st.booleans(),
    steps=st.integers(80, 200),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_first_step_end_and_windows_of_a_verdict_equal_those_of_its_episode(
    since: int, length: int | None, from_start: bool, steps: int
) -> None:
    """Each window counts once."""
    since = min(since, steps - 20)
    until = None if length is None else min(since + length, steps)
    slow = episode(1, since, until, from_start=from_start, last_step=steps - 1)
    found = rows(
        node([usual(steps), usual(steps)], findings(slow, last_step=steps - 1, compared=2))
    )
    held = found[
        (
            "straggler"
            if until is None
            else next(kind for kind in found if kind.startswith("straggler_"))
        )
    ].held
    begin, end = 0 if from_start else since, steps if until is None else until
    firsts = range(0, steps - WIDTH // 2 + 1, WIDTH)
    middles = [(first + min(first + WIDTH, steps)) / 2 for first in firsts]

    assert (held.since_step, held.until_step) == (begin, until)
    assert held.windows_judged == len(middles)
    assert held.windows_held == max(1, sum(begin <= middle < end for middle in middles))
    assert held.window_steps == WIDTH
    assert seconds(held.since) == pytest.approx(begin * STEP_S, abs=1e-3)
    assert (held.until is None) == (until is None)
    if until is not None:
        assert seconds(held.until) == pytest.approx(until * STEP_S, abs=1e-3)


def test_slow_rank_without_data_on_this_node_uses_the_windows_of_others() -> None:
    found = rows(node([usual(80), usual(80)], findings(episode(7, 40, last_step=79))))

    assert found["straggler"].held.windows_held == 5
    assert found["straggler"].held.windows_judged == 10


def test_verdict_of_no_slow_rank_is_valid_since_the_last_episode() -> None:
    """The bottleneck is judged in the windows outside the episode."""
    found = rows(node([usual(160), usual(160)], findings(episode(1, 40, 80), last_step=159)))
    nobody, limit = found["none"].held, found["compute_bound"].held

    assert (nobody.since_step, nobody.until_step) == (80, None)
    assert (nobody.windows_held, nobody.windows_judged) == (10, 20)
    assert (limit.since_step, limit.windows_held, limit.windows_judged) == (0, 15, 15)
    assert found["straggler_ended"].held.until_step == 80


def test_ended_verdicts_come_last() -> None:
    verdicts = build_report(
        "r", [node([usual(160), usual(160)], findings(episode(1, 40, 80), last_step=159))]
    )["verdicts"]

    assert [row.kind for row in verdicts] == ["none", "compute_bound", "straggler_ended"]


# -- bottlenecks of the step


def slow_data(begin: int, end: int, count: int, data: float = 20.0) -> list[dict[str, Any]]:
    return [{**BASE, "data": data} if begin <= step < end else dict(BASE) for step in range(count)]


def test_bottleneck_of_a_part_of_the_run_is_reported() -> None:
    """The run waited for data from step 64 to 127.

    Over the whole run, computing is the bottleneck.
    """
    found = rows(node([slow_data(64, 128, 400)] * 2))
    row = found["data_bound_ended"]

    assert (
        row.sentence
        == "Data loading took 57% (20.0 ms) of a step of 35.0 ms from step 64 to 127; in the"
        " rest of the run, 1.00 ms. It is over: no action is needed unless it returns."
    )
    assert (row.held.since_step, row.held.until_step) == (64, 128)
    assert (row.held.windows_held, row.held.windows_judged) == (8, 50)
    assert seconds(row.held.since) == pytest.approx(64 * STEP_S, abs=1e-3)
    assert row.cost_s_per_step == pytest.approx(0.020)
    limit = found["compute_bound"].held
    assert (limit.since_step, limit.until_step, limit.windows_held) == (128, None, 34)


def test_bottleneck_of_the_newest_steps_is_reported() -> None:
    """The bottleneck of the whole run is reported as well."""
    found = rows(node([slow_data(320, 400, 400)] * 2))

    assert found["data_bound"].sentence.startswith(
        "Since step 320, data loading takes 57% (20.0 ms) of a step of 35.0 ms; before, 1.00"
        " ms. Next: see what takes the time of a batch"
    )
    assert found["data_bound"].held.until_step is None
    assert found["compute_bound"].held.until_step == 320


def test_cpu_contention_in_a_part_of_the_run_is_reported() -> None:
    """The result does not depend on the phase that has the contention."""
    starved = [
        {**BASE, "forward": 24.0, "cpu": 20.0 if 80 <= step < 160 else 0.0} for step in range(400)
    ]
    for step in (*range(80), *range(160, 400)):
        starved[step]["forward"] = 4.0
    row = rows(node([starved] * 2))["lack_of_cpu_ended"]

    assert row.sentence.startswith(
        "CPU contention took 56% (20.0 ms) of a step of 36.0 ms from step 80 to 159; "
    )


def test_cpu_contention_is_not_reported_if_later_steps_have_no_measurement() -> None:
    """Steps with very many phases have no measurement of CPU contention.

    No finding is reported on steps without a measurement.
    """
    lacking = {**BASE, "forward": 24.0, "host": 20.0}
    loop = [{**lacking, "cpu": 20.0} if step < 80 else dict(lacking) for step in range(400)]
    report = checked(build_report("r", [node([loop])]))

    assert "0 ns" not in " ".join(row.sentence for row in report["verdicts"])
    assert not [row for row in report["verdicts"] if row.kind.startswith("lack_of_cpu")]


def test_cpu_contention_in_varying_phases_is_one_finding() -> None:
    """Each phase has contention in few steps, but every step has some.

    The windows show the same as the run.
    """
    rng = np.random.default_rng(4)
    parts = ("data", "forward", "backward", "optimizer", "host")
    loop = []
    for _ in range(400):
        part = str(rng.choice(parts))
        loop.append({**BASE, part: BASE[part] + 12.0, "cpu": 12.0, "cpu_in": part})
    row = rows(node([loop]))["lack_of_cpu"]

    assert row.held.until_step is None
    assert row.held.windows_held >= 0.9 * row.held.windows_judged


@pytest.mark.parametrize(
    "loop",
    [
        slow_data(64, 88, 400),  # Three windows.
        slow_data(0, 400, 400, 3.5),
        # Waits for data take a quarter of the step in some windows, and less in other windows.
        [{**BASE, "data": 5.5 if step // WIDTH % 2 else 4.0} for step in range(400)],
        [{**BASE, "data": 5.0 if step // 100 % 2 else 4.0} for step in range(400)],
    ],
    ids=["short", "below", "flicker", "alike"],
)  # fmt: skip
def test_short_or_constant_bottlenecks_are_not_reported_as_changes(
    loop: list[dict[str, Any]],
) -> None:
    """Some bottlenecks last for a few windows, others hardly differ from the rest of the run."""
    kinds = [
        row.kind
        for row in build_report("r", [node([loop] * 2)])["verdicts"]
        if row.kind != "long_steps"
    ]
    assert sorted(kinds) in (["compute_bound", "not_compared"], ["data_bound", "not_compared"])


def test_bottleneck_that_ended_has_its_last_step() -> None:
    """The run waited for data in most of its steps and now computes."""
    found = rows(node([slow_data(0, 320, 400)] * 2))
    held = found["data_bound"].held

    assert (held.since_step, held.until_step) == (0, 320)
    assert (held.windows_held, held.windows_judged) == (40, 50)
    text = " ".join(
        render_full(
            build_report("r", [node([slow_data(0, 320, 400)] * 2)]), "x", columns=110, color=False
        ).split()
    )
    assert "in 40 of the run's 50 judged windows of 8 steps, from step 0 to 319 (" in text


def test_bottleneck_of_the_run_is_current_although_its_last_windows_are_faster() -> None:
    """Another program has ended shortly before the run. Three windows are no part of the run."""
    row = rows(node([slow_data(0, 376, 400)] * 2))["data_bound"]

    assert row.sentence.startswith("Data loading takes 57% (20.0 ms) of a typical step")
    assert not row.is_over


def test_bottleneck_of_the_run_is_current_if_nothing_else_limits_the_newest_steps() -> None:
    """Host code takes little more time than before, so it is no limit of its own part of the run."""
    small = {**BASE, "forward": 1.0, "backward": 1.0, "optimizer": 1.0}
    loop = [
        small | ({"data": 5.0, "host": 4.0} if step < 240 else {"data": 3.0, "host": 4.6})
        for step in range(400)
    ]
    row = rows(node([loop] * 2))["data_bound"]

    assert row.sentence.startswith("Data loading takes 38% (4.39 ms) of a typical step")
    assert not row.is_over
    assert row.held is None


def test_waiting_for_a_slow_rank_is_not_a_bottleneck() -> None:
    waits = [
        {**BASE, "communication": 30.0} if 80 <= step < 160 else dict(BASE) for step in range(400)
    ]
    slow = findings(episode(1, 80, 160), last_step=399)

    assert "communication_bound_ended" in rows(node([waits] * 2))
    assert "communication_bound_ended" not in rows(node([waits] * 2, slow))


def test_windows_with_long_evaluation_steps_are_counted() -> None:
    loop = usual(200)
    for step in (60, 100, 140):
        loop[step] = {**BASE, "host": 901.0, "flags": Flag.EVALUATION}
    held = rows(node([loop]))["long_steps"].held

    assert (held.since_step, held.windows_held, held.windows_judged) == (56, 3, 25)
    assert held.until_step is None, "the next is due in step 180"


def test_all_steps_of_an_unusual_kind_count_for_its_windows() -> None:
    """Evaluation steps in the warm-up and of other lengths are included."""
    loop = usual(200)
    for step, host in ((1, 901.0), (60, 901.0), (150, 9001.0)):
        loop[step] = {**BASE, "host": host, "flags": Flag.EVALUATION}
    found = [
        row for row in build_report("r", [node([loop])])["verdicts"] if row.kind == "long_steps"
    ]

    assert found
    assert [row.held for row in found] == [None] * len(found)


def test_unknown_validity_of_a_verdict_is_null() -> None:
    """Validity is unknown for too few steps, for verdicts from samples, and for long steps of
    unknown cause.
    """
    unknown = usual(200)
    unknown[60] = {**BASE, "host": 901.0}
    for state in (
        node([usual(2)]),
        node([usual(60)], cpu_wait=[12.0, 20.0]),
        node([usual(60)], compute_device="xpu"),
    ):
        assert rows(state).popitem()[1].held is None
    assert rows(node([unknown]))["long_steps"].held is None


def test_only_windows_of_the_current_slow_stage_count() -> None:
    work_ms = np.array([[40.0] * 10 + [10.0] * 10, [10.0] * 10 + [40.0] * 10, [10.0] * 20])
    windows = RunWindows(
        (0, 1, 2), 8, 8 * np.arange(20), work_ms * 1e6, *np.zeros((2, 3, 20, len(PARTS))), np.full((3, 20), 50e6),
        (0,) * 20, 159,
    )  # fmt: skip
    places = {rank: Placement("h", f"pp{rank}", {"pp": rank}) for rank in range(3)}
    usual = tuple(
        UsualTimes(f"pp{rank}", str(rank), work, 0.0)
        for rank, work in enumerate((10e6, 40e6, 10e6))
    )
    judged = add_straggler_groups(findings(usual=usual, step_ns=50e6), places)
    found = JudgedWindows(windows, judged, places, False).find_imbalanced_part()

    assert found is not None
    assert (found.since_step, found.until_step, found.held.sum(), found.judged.sum()) == (
        80,
        None,
        10,
        20,
    )


# -- findings recorded by the sidecar


def test_hang_in_progress_has_the_time_of_its_start() -> None:
    """The start is the alert's time minus the time without a step at that moment."""
    state = node([usual(57)] * 2, hang=hang(57), records=hung(), ended="")
    held = rows(state)["hang"].held

    assert (held.since_step, held.until_step, held.windows_judged) == (57, None, None)
    assert (seconds(held.since), held.until) == (100.0, None)
    assert rows(node([usual(57)] * 2, hang=hang(57), ended=""))["hang"].held.since_step == 57


def test_past_hang_is_the_first_verdict_if_it_cost_most() -> None:
    """The verdict has the hang's duration, share of step time, rank, action, and stacks."""
    stacks = {2: RankStack(("train.py:7 in load",), "")}
    loop = usual(200)
    loop[57] = {**BASE, "host": 60_000.0}
    report = checked(
        build_report("r", [node([loop], records=hung(60.0, over=True, stacks=stacks))])
    )
    row = report["verdicts"][0]

    assert (
        row.sentence
        == "The job hung in step 57 for 60.0 s, and then continued: 95% of all step time. Rank 2 did not"
        " enter it. Next: look at it."
    )
    assert (row.kind, row.rank, row.evidence.went_on) == ("hang_ended", 2, True)
    assert (row.held.since_step, row.held.until_step) == (57, 58)
    assert (seconds(row.held.since), seconds(row.held.until)) == (100.0, 160.0)
    assert row.lost_s == pytest.approx(60.0)
    assert row.cost_share == pytest.approx(60 / report["steps"]["total_s"], abs=0.01)
    assert row.evidence.stacks == stacks
    assert [each.kind for each in report["verdicts"]] == [
        "hang_ended",
        "compute_bound",
    ], "its step is no second one"
    text = render_full(report, "x", columns=200, color=False)
    assert "  cost        60.0 s = 95% of all step time\n" in text
    assert text.index("The job hung") < text.index("train.py:7 in load") < text.index("Computing")
    assert "  earlier " not in text


def test_short_past_hang_is_listed_as_earlier() -> None:
    loop = usual(20_000)
    loop[57] = {**BASE, "host": 12_000.0}
    report = checked(build_report("r", [node([loop], records=hung(12.0, over=True))]))

    assert (
        report["verdicts"][-1].sentence
        == "The job hung in step 57 for 12.0 s, and then continued. Rank 2 did not enter it."
    )
    assert "  earlier " in render_full(report, "x", columns=200, color=False)


@pytest.mark.parametrize("ended", ["closed", "died"])
@pytest.mark.parametrize("seen_to_end", [True, False])
def test_hang_comes_before_the_death_of_its_ranks(seen_to_end: bool, ended: str) -> None:
    """The end of the hang may not have been observed."""
    report = build_report(
        "r", [node([usual(57)] * 2, records=hung(60.0, over=seen_to_end), ended=ended)]
    )
    row = report["verdicts"][0]

    assert row.kind == "hang_ended"
    assert ("died" in [each.kind for each in report["verdicts"]]) is (ended == "died")
    assert (
        row.sentence
        == "The job hung in step 57 for 60.0 s, and did not continue. Rank 2 did not enter it. Next:"
        " look at it."
    )
    text = render_full(report, "x", columns=110, color=False)
    assert "  earlier " not in text
    assert "The job hung in step 57" in text


def test_recovered_slow_link_is_listed_as_earlier() -> None:
    log, link = FindingLog("run"), slow_links((3, 4))
    log.record_changes(0, NOTHING, None, PLACES, 5 * SECOND_NS, last_step=40, verdicts=[link])
    for at_s in (6, 90):
        log.record_changes(0, NOTHING, None, PLACES, at_s * SECOND_NS, last_step=at_s)
    row = rows(node([usual(200)] * 2, records=log.records))["slow_link_ended"]

    assert row.sentence.startswith(
        "This is over, and needs no action unless it returns: Communication of ranks 3-4 is slow: allreduce of"
    )
    assert row.evidence.ranks == (3, 4)
    assert (row.held.since_step, row.held.until_step) == (40, 90)


def test_findings_of_earlier_attempts_are_ignored() -> None:
    """The report is about the last attempt, whose steps have other numbers."""
    assert "hang_ended" not in rows(node([usual(200)], records=hung(over=True, attempt=1)))


# -- sentences on validity


def test_sentence_on_validity_has_known_windows_steps_and_times() -> None:
    """A time on another day than the run's first has its date."""
    started = "2026-11-23T09:00:00.000+00:00"
    whole = Period(
        since_step=64, until_step=None, windows_held=14, windows_judged=15, window_steps=64,
        since="2026-11-23T09:14:02.500+00:00", until=None,
    )  # fmt: skip
    over = structs.replace(whole, until_step=200, until="2026-11-24T01:02:03.000+00:00")
    at_step = structs.replace(whole, windows_held=None, windows_judged=None, since=None)

    assert (
        describe_period(whole, started)
        == "in 14 of the run's 15 judged windows of 64 steps, since step 64 (09:14:02 UTC)."
    )
    assert (
        describe_period(over, started)
        == "in 14 of the run's 15 judged windows of 64 steps, from step 64 to 199 (09:14:02 UTC to"
        " 2026-11-24 01:02:03 UTC)."
    )
    assert describe_period(
        structs.replace(whole, windows_held=1, windows_judged=1, window_steps=8), started
    ).startswith("in 1 of the run's 1 judged window of 8 steps, ")
    assert describe_period(at_step, started) == "since step 64."
    assert describe_period(None, started) == ""


def test_times_are_in_the_time_zone_of_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The date is left out on the first day of the run in this zone."""
    started, at = "2026-11-23T23:30:00.000+00:00", "2026-11-23T23:45:00.000+00:00"
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "CET-1")
        time.tzset()
        local = format_time_of_day(at, started)
    time.tzset()

    assert local == "00:45:00 CET"


def test_newest_ended_findings_are_listed_as_earlier() -> None:
    """The number of older findings is shown."""
    past: list[Episode] = [episode(1, 20 * place, 20 * place + 10) for place in range(6)]
    text = render_full(
        build_report("r", [node([usual(160)] * 2, findings(*past, last_step=159))]),
        "x",
        columns=110,
        color=False,
    )
    words = " ".join(text.partition("  earlier ")[2].split())

    assert words.startswith("Rank 1 was slow in the backward pass from step 100 to step 109: ")
    assert (
        "It is over: no action is needed unless it returns."
        " Seen in 2 of the run's 20 judged windows of 8 steps, from step 100 to 109 (" in words
    )
    assert "2 more: --json" in words


@given(st.lists(st.booleans(), max_size=40))
def test_range_of_windows_has_the_largest_difference_to_the_others(held: list[bool]) -> None:
    """In no other range do windows with the finding outnumber those without it by more."""

    def worth(begin: int, end: int) -> int:
        return sum(1 if each else -1 for each in held[begin:end])

    found = find_mostly_true_slice(held)
    best = max(
        (worth(i, j) for i in range(len(held)) for j in range(i + 1, len(held) + 1)), default=0
    )
    assert (found is None) == (True not in held)
    if found is not None:
        assert worth(*found) == best
        assert held[found[0]]
        assert held[found[1] - 1]
