"""Since when verdicts have held, and in how many windows of the run: held against what the steps were made of."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.findings import PLACES, episode, findings, hang, hung, slow_links
from tests.support.reports import checked
from tests.verdicts.words.test_bottleneck import BASE, state_of
from torchlens_perf.analysis.statistics.run_windows import RunWindows
from torchlens_perf.report.build import build
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.causes.straggler_groups import with_groups
from torchlens_perf.verdicts.finding_log import FindingLog
from torchlens_perf.verdicts.judged_windows import JudgedWindows, longest
from torchlens_perf.verdicts.node_state import NodeState
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings, StragglerGroup, Usual
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.words.hang import RankStack
from torchlens_perf.verdicts.words.over import held_words
from torchlens_perf.view.terminal import render

WIDTH = 8  # steps, of a window of a short run
STEP_S = 0.016  # of BASE
SECOND_NS = 1_000_000_000


def node(loops: Sequence[Sequence[dict[str, Any]]], found: Findings | None = None, **changed: Any) -> NodeState:
    """A node whose ranks have made these steps. found: by its judge. changed: fields of the processes and the node."""
    of_node = {field.name: changed.pop(field.name) for field in dataclasses.fields(NodeState) if field.name in changed}
    states = [state_of(rank, len(loops), list(steps)) for rank, steps in enumerate(loops)]
    states = [dataclasses.replace(state, **changed) for state in states]
    processes = {state.identity.key: state for state in states}
    if found is not None:
        groups = tuple(StragglerGroup("rank", "", (each.rank,), each) for each in found.slow_now)
        of_node["findings"] = dataclasses.replace(found, groups=groups)
    return NodeState("h", processes, **of_node)


def rows(state: NodeState) -> dict[str, dict[str, Any]]:
    """The report's verdicts, the first of each kind."""
    verdicts = checked(build("r", [state]))["verdicts"]
    return {row["kind"]: row for row in reversed(verdicts)}


def usual(count: int) -> list[dict[str, Any]]:
    return [dict(BASE) for _ in range(count)]


def seconds(at: str) -> float:
    """Since the first step of these tests' runs, which is at the clock's zero."""
    return datetime.datetime.fromisoformat(at).timestamp()


# -- slow ranks


@given(
    since=st.integers(0, 150), length=st.one_of(st.none(), st.integers(13, 150)), from_start=st.booleans(),
    steps=st.integers(80, 200),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_a_slow_rank_agrees_with_its_episode(since: int, length: int | None, from_start: bool, steps: int) -> None:
    """First step, end and windows are the episode's, whatever they are; each window is counted on one side only."""
    since = min(since, steps - 20)
    until = None if length is None else min(since + length, steps)
    slow = episode(1, since, until, from_start=from_start, last_step=steps - 1)
    found = rows(node([usual(steps), usual(steps)], findings(slow, last_step=steps - 1, compared=2)))
    held = found["straggler" if until is None else next(kind for kind in found if kind.startswith("straggler_"))][
        "held"
    ]
    begin, end = 0 if from_start else since, steps if until is None else until
    firsts = range(0, steps - WIDTH // 2 + 1, WIDTH)
    middles = [(first + min(first + WIDTH, steps)) / 2 for first in firsts]

    assert (held["since_step"], held["until_step"]) == (begin, until)
    assert held["windows_judged"] == len(middles)
    assert held["windows_held"] == max(1, sum(begin <= middle < end for middle in middles))
    assert held["window_steps"] == WIDTH
    assert seconds(held["since"]) == pytest.approx(begin * STEP_S, abs=1e-3)
    assert (held["until"] is None) == (until is None)
    if until is not None:
        assert seconds(held["until"]) == pytest.approx(until * STEP_S, abs=1e-3)


def test_a_rank_of_another_nodes_disk() -> None:
    """One that is slow and not here is held against the windows of those that are."""
    found = rows(node([usual(80), usual(80)], findings(episode(7, 40, last_step=79))))

    assert found["straggler"]["held"]["windows_held"] == 5
    assert found["straggler"]["held"]["windows_judged"] == 10


def test_nobody_is_slow_since_somebody_was() -> None:
    """That no rank stands out holds since the last episode; what limits the step is judged in the other windows."""
    found = rows(node([usual(160), usual(160)], findings(episode(1, 40, 80), last_step=159)))
    nobody, limit = found["none"]["held"], found["compute_bound"]["held"]

    assert (nobody["since_step"], nobody["until_step"]) == (80, None)
    assert (nobody["windows_held"], nobody["windows_judged"]) == (10, 20)
    assert (limit["since_step"], limit["windows_held"], limit["windows_judged"]) == (0, 15, 15)
    assert found["straggler_ended"]["held"]["until_step"] == 80


def test_what_is_over_comes_last() -> None:
    verdicts = build("r", [node([usual(160), usual(160)], findings(episode(1, 40, 80), last_step=159))])["verdicts"]

    assert [row["kind"] for row in verdicts] == ["none", "compute_bound", "straggler_ended"]


# -- what limits the step


def slow_data(begin: int, end: int, count: int, data: float = 20.0) -> list[dict[str, Any]]:
    return [{**BASE, "data": data} if begin <= step < end else dict(BASE) for step in range(count)]


def test_waiting_for_data_for_a_while() -> None:
    """The run as a whole computes; that it waited for data from step 64 to 127 is there, with what it took."""
    found = rows(node([slow_data(64, 128, 400)] * 2))
    row = found["data_bound_ended"]

    assert row["text"] == (
        "Waiting for data took 57% (20.0 ms) of a step of 35.0 ms from step 64 to 127; in the rest of the run, 1.00 ms."
    )
    assert (row["held"]["since_step"], row["held"]["until_step"]) == (64, 128)
    assert (row["held"]["windows_held"], row["held"]["windows_judged"]) == (8, 50)
    assert seconds(row["held"]["since"]) == pytest.approx(64 * STEP_S, abs=1e-3)
    assert row["cost_s_per_step"] == pytest.approx(0.020)
    limit = found["compute_bound"]["held"]
    assert (limit["since_step"], limit["until_step"], limit["windows_held"]) == (128, None, 34)


def test_waiting_for_data_by_now() -> None:
    """What limits the newest steps is said beside what limits the run."""
    found = rows(node([slow_data(320, 400, 400)] * 2))

    assert found["data_bound"]["text"].startswith(
        "Since step 320, waiting for data takes 57% (20.0 ms) of a step of 35.0 ms; before, 1.00 ms. Next: raise"
    )
    assert found["data_bound"]["held"]["until_step"] is None
    assert found["compute_bound"]["held"]["until_step"] == 320


def test_lack_of_a_cpu_for_a_while() -> None:
    """In which part of the step it was missing does not matter."""
    starved = [{**BASE, "forward": 24.0, "cpu": 20.0 if 80 <= step < 160 else 0.0} for step in range(400)]
    for step in (*range(80), *range(160, 400)):
        starved[step]["forward"] = 4.0
    row = rows(node([starved] * 2))["lack_of_cpu_ended"]

    assert row["text"].startswith("Waiting for a CPU took 56% (20.0 ms) of a step of 36.0 ms from step 80 to 159; ")


def test_lack_of_a_cpu_that_is_not_measured_later_is_not_none() -> None:
    """As in steps with very many phases: nothing is said of the rest of the run."""
    lacking = {**BASE, "forward": 24.0, "host": 20.0}
    loop = [{**lacking, "cpu": 20.0} if step < 80 else dict(lacking) for step in range(400)]
    report = checked(build("r", [node([loop])]))

    assert "0 ns" not in " ".join(row["text"] for row in report["verdicts"])
    assert not [row for row in report["verdicts"] if row["kind"].startswith("lack_of_cpu")]


def test_lack_of_a_cpu_that_strikes_any_part_of_a_step() -> None:
    """In each part it is missing in few steps, and in every step it is missing: the windows show what the run shows."""
    rng = np.random.default_rng(4)
    parts = ("data", "forward", "backward", "optimizer", "host")
    loop = []
    for _ in range(400):
        part = str(rng.choice(parts))
        loop.append({**BASE, part: BASE[part] + 12.0, "cpu": 12.0, "cpu_in": part})
    row = rows(node([loop]))["lack_of_cpu"]

    assert row["held"]["until_step"] is None
    assert row["held"]["windows_held"] >= 0.9 * row["held"]["windows_judged"]


@pytest.mark.parametrize(
    "loop",
    [
        slow_data(64, 88, 400),  # three windows
        slow_data(0, 400, 400, 3.5),
        [{**BASE, "data": 5.5 if step // WIDTH % 2 else 4.0} for step in range(400)],  # now a quarter, now less
        [{**BASE, "data": 5.0 if step // 100 % 2 else 4.0} for step in range(400)],
    ],
    ids=["short", "below", "flicker", "alike"],
)  # fmt: skip
def test_little_is_not_named(loop: list[dict[str, Any]]) -> None:
    """Neither what lasts for a few windows, nor what is much the same in the rest of the run."""
    kinds = [row["kind"] for row in build("r", [node([loop] * 2)])["verdicts"] if row["kind"] != "long_steps"]
    assert sorted(kinds) in (["compute_bound", "not_compared"], ["data_bound", "not_compared"])


def test_the_verdict_on_the_run_is_over() -> None:
    """A run that waited for data in most of its steps, and now computes: the verdict says until when it held."""
    found = rows(node([slow_data(0, 320, 400)] * 2))
    held = found["data_bound"]["held"]

    assert (held["since_step"], held["until_step"]) == (0, 320)
    assert (held["windows_held"], held["windows_judged"]) == (40, 50)
    text = " ".join(render(build("r", [node([slow_data(0, 320, 400)] * 2)]), "x", columns=110, color=False).split())
    assert "in 40 of 50 windows of 8 steps, from step 0 to 319 (" in text


def test_while_a_rank_is_slow_the_others_waiting_is_its_doing() -> None:
    """A wait of those steps is no finding of its own."""
    waits = [{**BASE, "communication": 30.0} if 80 <= step < 160 else dict(BASE) for step in range(400)]
    slow = findings(episode(1, 80, 160), last_step=399)

    assert "communication_bound_ended" in rows(node([waits] * 2))
    assert "communication_bound_ended" not in rows(node([waits] * 2, slow))


def test_steps_that_evaluated() -> None:
    """The windows that held some of the long steps, by what the steps did."""
    loop = usual(200)
    for step in (60, 100, 140):
        loop[step] = {**BASE, "host": 901.0, "flags": Flag.EVALUATION}
    held = rows(node([loop]))["long_steps"]["held"]

    assert (held["since_step"], held["windows_held"], held["windows_judged"]) == (56, 3, 25)
    assert held["until_step"] is None, "the next is due in step 180"


def test_steps_that_are_named_hold_in_no_window() -> None:
    """Windows count every step that evaluated, also one of the warm-up and those of another length."""
    loop = usual(200)
    for step, host in ((1, 901.0), (60, 901.0), (150, 9001.0)):
        loop[step] = {**BASE, "host": host, "flags": Flag.EVALUATION}
    found = [row for row in build("r", [node([loop])])["verdicts"] if row["kind"] == "long_steps"]

    assert found
    assert [row["held"] for row in found] == [None] * len(found)


def test_what_cannot_be_known_is_null() -> None:
    """No window says it: too few steps, samples of the sidecar, long steps of which nobody knows what they did."""
    unknown = usual(200)
    unknown[60] = {**BASE, "host": 901.0}
    for state in (node([usual(2)]), node([usual(60)], cpu_wait=[12.0, 20.0]), node([usual(60)], compute_device="xpu")):
        assert rows(state).popitem()[1]["held"] is None
    assert rows(node([unknown]))["long_steps"]["held"] is None


def test_another_stage_was_out_of_balance_before() -> None:
    """Windows of the pipeline stage that has too much work now count, and no others."""
    work_ms = np.array([[40.0] * 10 + [10.0] * 10, [10.0] * 10 + [40.0] * 10, [10.0] * 20])
    windows = RunWindows(
        (0, 1, 2), 8, 8 * np.arange(20), work_ms * 1e6, *np.zeros((2, 3, 20, len(PARTS))), np.full((3, 20), 50e6),
        (0,) * 20, 159,
    )  # fmt: skip
    places = {rank: Placement("h", f"pp{rank}", {"pp": rank}) for rank in range(3)}
    usual = tuple(Usual(f"pp{rank}", str(rank), work, 0.0) for rank, work in enumerate((10e6, 40e6, 10e6)))
    judged = with_groups(findings(usual=usual, step_ns=50e6), places)
    found = JudgedWindows(windows, judged, places, False).out_of_balance()

    assert found is not None
    assert (found.since_step, found.until_step, found.held.sum(), found.judged.sum()) == (80, None, 10, 20)


# -- what the sidecar has noted


def test_a_hang_in_progress() -> None:
    """Since when, by the alert: its time less for how long no step had been made then."""
    state = node([usual(57)] * 2, hang=hang(57), records=hung(), ended="")
    held = rows(state)["hang"]["held"]

    assert (held["since_step"], held["until_step"], held["windows_judged"]) == (57, None, None)
    assert (seconds(held["since"]), held["until"]) == (100.0, None)
    assert rows(node([usual(57)] * 2, hang=hang(57), ended=""))["hang"]["held"]["since_step"] == 57


def test_a_hang_that_went_by_is_first_if_it_cost_most() -> None:
    """With how long it lasted, its share of all steps' time, its rank, what to do, and the stacks read meanwhile."""
    stacks = {2: RankStack(("train.py:7 in load",), "")}
    loop = usual(200)
    loop[57] = {**BASE, "host": 60_000.0}
    report = checked(build("r", [node([loop], records=hung(60.0, over=True, stacks=stacks))]))
    row = report["verdicts"][0]

    assert row["text"] == (
        "The job hung in step 57 for 60.0 s, and went on: 95% of the time of all steps. Rank 2 did not enter it. "
        "Next: look at it."
    )
    assert (row["kind"], row["rank"], row["evidence"].went_on) == ("hang_ended", 2, True)
    assert (row["held"]["since_step"], row["held"]["until_step"]) == (57, 58)
    assert (seconds(row["held"]["since"]), seconds(row["held"]["until"])) == (100.0, 160.0)
    assert row["lost_s"] == pytest.approx(60.0)
    assert row["cost_share"] == pytest.approx(60 / report["steps"]["total_s"], abs=0.01)
    assert row["evidence"].stacks == stacks
    assert [each["kind"] for each in report["verdicts"]] == ["hang_ended", "compute_bound"], "its step is no second one"
    text = render(report, "x", columns=200, color=False)
    assert text.index("The job hung") < text.index("train.py:7 in load") < text.index("Computing")
    assert "  earlier " not in text


def test_a_short_hang_that_went_by_is_listed_as_earlier() -> None:
    loop = usual(20_000)
    loop[57] = {**BASE, "host": 12_000.0}
    report = checked(build("r", [node([loop], records=hung(12.0, over=True))]))

    assert report["verdicts"][-1]["text"] == "The job hung in step 57 for 12.0 s, and went on. Rank 2 did not enter it."
    assert "  earlier " in render(report, "x", columns=200, color=False)


@pytest.mark.parametrize("ended", ["closed", "died"])
@pytest.mark.parametrize("seen_to_end", [True, False])
def test_a_run_that_ended_in_a_hang(seen_to_end: bool, ended: str) -> None:
    """The hang comes first with its next action, before the death of its ranks, also where nobody saw its end."""
    report = build("r", [node([usual(57)] * 2, records=hung(60.0, over=seen_to_end), ended=ended)])
    row = report["verdicts"][0]

    assert row["kind"] == "hang_ended"
    assert ("died" in [each["kind"] for each in report["verdicts"]]) is (ended == "died")
    assert row["text"] == (
        "The job hung in step 57 for 60.0 s, and ended in it. Rank 2 did not enter it. Next: look at it."
    )
    text = render(report, "x", columns=110, color=False)
    assert "  earlier " not in text
    assert "The job hung in step 57" in text


def test_a_slow_link_that_is_found_no_more() -> None:
    log, link = FindingLog("run"), slow_links((3, 4))
    log.changes(0, NOTHING, None, PLACES, 5 * SECOND_NS, last_step=40, verdicts=[link])
    for at_s in (6, 90):
        log.changes(0, NOTHING, None, PLACES, at_s * SECOND_NS, last_step=at_s)
    row = rows(node([usual(200)] * 2, records=log.records))["slow_link_ended"]

    assert row["text"] == "No longer: It is slow."
    assert row["evidence"].ranks == (3, 4)
    assert (row["held"]["since_step"], row["held"]["until_step"]) == (40, 90)


def test_of_another_attempt_nothing_is_said() -> None:
    """The report is about the last one, whose steps have other numbers."""
    assert "hang_ended" not in rows(node([usual(200)], records=hung(over=True, attempt=1)))


# -- in words


def test_in_words() -> None:
    """Of windows, steps and times, each where it is known; a day that is not the run's first is named."""
    started = "2026-11-23T09:00:00.000+00:00"
    whole: Any = {
        "since_step": 64, "until_step": None, "windows_held": 14, "windows_judged": 15, "window_steps": 64,
        "since": "2026-11-23T09:14:02.500+00:00", "until": None,
    }  # fmt: skip
    over = {**whole, "until_step": 200, "until": "2026-11-24T01:02:03.000+00:00"}
    at_step = {**whole, "windows_held": None, "windows_judged": None, "since": None}

    assert held_words(whole, started) == "Held in 14 of 15 windows of 64 steps, since step 64 (09:14:02 UTC)."
    assert held_words(over, started) == (
        "Held in 14 of 15 windows of 64 steps, from step 64 to 199 (09:14:02 to 2026-11-24 01:02:03 UTC)."
    )
    assert held_words({**whole, "windows_held": 1, "windows_judged": 1, "window_steps": 8}, started).startswith(
        "Held in 1 of 1 window of 8 steps, "
    )
    assert held_words(at_step, started) == "Held since step 64."
    assert held_words(None, started) == ""


def test_earlier_in_this_run() -> None:
    """The report shows what is over, the newest few, and how many more there are."""
    past: list[Episode] = [episode(1, 20 * place, 20 * place + 10) for place in range(6)]
    text = render(build("r", [node([usual(160)] * 2, findings(*past, last_step=159))]), "x", columns=110, color=False)
    words = " ".join(text.partition("  earlier ")[2].split())

    assert words.startswith("Rank 1 was slow in the backward pass from step 100 to step 109: ")
    assert "It is over. Held in 2 of 20 windows of 8 steps, from step 100 to 109 (" in words
    assert "2 more: --json" in words


@given(st.lists(st.booleans(), max_size=40))
def test_longest(held: list[bool]) -> None:
    """No other part has more windows in which it held, less those in which it did not; it begins and ends with one."""

    def worth(begin: int, end: int) -> int:
        return sum(1 if each else -1 for each in held[begin:end])

    found = longest(held)
    best = max((worth(i, j) for i in range(len(held)) for j in range(i + 1, len(held) + 1)), default=0)
    assert (found is None) == (True not in held)
    if found is not None:
        assert worth(*found) == best
        assert held[found[0]]
        assert held[found[1] - 1]
