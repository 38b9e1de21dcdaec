"""Verdicts are ordered by their cost on every screen, and one cause has one verdict."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.report.test_held import node, slow_data, usual
from tests.support.findings import MS, episode, findings
from tests.support.reports import checked
from tests.verdicts.words.test_bottleneck import BASE
from torchlens_perf.page.notebook import results_as_json
from torchlens_perf.page.sections.verdicts import build_verdicts_section as cards
from torchlens_perf.report.build import build_report
from torchlens_perf.run.records import WITHOUT_GRADIENTS
from torchlens_perf.run.ring import Flag
from torchlens_perf.top.overview import all_finding_lines
from torchlens_perf.top.reading import View
from torchlens_perf.verdicts.node_state import NodeState
from torchlens_perf.verdicts.stragglers.findings import UsualTimes
from torchlens_perf.view.headline import build_headlines
from torchlens_perf.view.markup import to_html
from torchlens_perf.view.terminal import render_full, render_short


def report_on(state: NodeState) -> dict[str, Any]:
    return checked(build_report("r", [state]))


def heads(report: dict[str, Any]) -> list[str]:
    return [row.text for row in report["verdicts"]]


def shown_in_order(text: str, parts: list[str]) -> bool:
    """Return True if the text contains all parts in the given order."""
    words, places = " ".join(text.split()), []
    for part in parts:
        places.append(words.find(part))
    return -1 not in places and places == sorted(places)


def several() -> NodeState:
    """Return a run with three problems: waits for data, longer evaluations, and short saves.

    Two ranks wait in each step. The evaluations cost more in total.
    """
    loop = [{**BASE, "data": 6.0} for _ in range(200)]
    for step in range(10, 200, 20):
        loop[step] = {**loop[step], "host": 300.0, "flags": int(Flag.EVALUATION)}
    for step in range(15, 200, 40):
        loop[step] = {**loop[step], "host": 80.0, "flags": int(Flag.CHECKPOINT)}
    return node([loop] * 2, findings(last_step=199, compared=2))


def test_every_screen_sorts_verdicts_by_cost() -> None:
    """The screens are JSON, terminal, short report, page, notebook, summary and `top`."""
    report = report_on(several())
    kinds = [(row.kind, row.phase) for row in report["verdicts"]]
    lost = [row.lost_s for row in report["verdicts"]]
    first_words = [head[:40] for head in heads(report)]

    assert [kind for kind, _ in kinds] == ["long_steps", "data_bound", "long_steps", "none"]
    assert lost == sorted(lost, reverse=True)
    assert shown_in_order(render_full(report, "x", columns=250, color=False), first_words)
    short_words = [first_words[0], "BOTTLENECK data loading", first_words[2]]
    assert shown_in_order(render_short(report, "x", columns=250, color=False), short_words)
    in_cell = json.loads(results_as_json(report, "x", ""))
    assert [each["text"] for each in in_cell["summary"]["verdicts"]] == heads(report)
    found = build_headlines(report)  # type: ignore[arg-type]
    sentences = [headline.sentence for headline in found]
    assert shown_in_order(in_cell["html"], sentences)
    page = to_html(cards({"report": report, "headlines": found}))  # type: ignore[typeddict-item]
    assert shown_in_order(page, sentences)
    in_top = " ".join(
        line.plain for line in all_finding_lines(View("x", report, tuple(found)), 4000)
    )  # type: ignore[arg-type]
    assert shown_in_order(in_top, sentences)


@pytest.mark.parametrize("seed", range(30))
def test_verdicts_on_random_faults_are_sorted_by_lost_time(seed: int) -> None:
    """The loss of each verdict equals the delay that was planted."""
    rng = np.random.default_rng(seed)
    loop = [{**BASE, "data": float(rng.choice([1.0, 10.0, 40.0]))} for _ in range(1)] * 300
    loop = [dict(step) for step in loop]
    planted = {}
    for flag, kind, begin in (
        (Flag.EVALUATION, WITHOUT_GRADIENTS, 7),
        (Flag.CHECKPOINT, "saving", 11),
    ):
        every, more = int(rng.integers(15, 60)), float(rng.choice([100.0, 800.0, 3000.0]))
        where = range(begin, 300, every)
        planted[kind] = sum(more for step in where if "flags" not in loop[step]) / 1e3
        for step in where:
            if "flags" not in loop[step]:
                loop[step] = {**loop[step], "host": loop[step]["host"] + more, "flags": int(flag)}
    report = report_on(node([loop]))
    lost = [row.lost_s for row in report["verdicts"]]
    of_kind = {
        row.evidence.long["kinds"][0]: row for row in report["verdicts"] if row.kind == "long_steps"
    }

    assert lost == sorted(lost, reverse=True)
    for kind, row in of_kind.items():
        assert row.lost_s == pytest.approx(planted[kind], rel=0.05)


def test_ended_verdict_is_not_first_although_it_cost_most() -> None:
    """A run that waited for data in most of its steps now computes.

    Computing is the first verdict.
    """
    report = report_on(node([slow_data(0, 320, 400)]))

    assert [row.kind for row in report["verdicts"]] == ["compute_bound", "data_bound"]
    assert heads(report)[0].startswith("Since step 320, computing takes 8")
    assert heads(report)[0].endswith(
        "% (14.0 ms) of a step of 16.0 ms; before, a step took 35.0 ms."
    )
    assert report["verdicts"][0].sentence.endswith(" which then times its modules.")


def test_verdict_on_one_of_two_equal_waits_is_valid_to_the_end() -> None:
    """The order of the two waits varies between windows by chance."""
    rng = np.random.default_rng(3)
    loop = [{**BASE, "data": 10 + rng.normal(), "host": 10 + rng.normal()} for _ in range(200)]
    (row,) = report_on(node([loop]))["verdicts"]

    assert row.held.until_step is None
    assert row.held.windows_held >= 0.9 * row.held.windows_judged


class TestOneCause:
    def test_bottleneck_of_the_run_is_not_reported_again_for_a_part(self) -> None:
        """The run waited for a CPU and for data, later mostly for data.

        Only one verdict is about the wait for data.
        """
        loop = [{**BASE, "forward": 24.0, "cpu": 20.0, "data": 14.0} for _ in range(200)]
        for step in range(120, 200):
            loop[step] = {**BASE, "forward": 14.0, "cpu": 10.0, "data": 22.0}
        report = report_on(node([loop]))

        assert len([head for head in heads(report) if "ata loading" in head]) == 1
        assert heads(report)[0].startswith(
            "Since step 120, data loading takes 47% (22.0 ms) of a step of 47.0 ms; "
        )
        assert (
            "of a typical step of 48.4 ms; apart from it, computing 29% (14.0 ms). The"
            in heads(report)[1]
        )

    def test_bottleneck_of_a_part_is_not_reported_if_the_whole_run_has_it(self) -> None:
        loop = [{**BASE, "data": 10.0, "host": 12.0 if step < 300 else 30.0} for step in range(400)]
        for step in range(100, 150):
            loop[step]["data"] = 40.0
        report = report_on(node([loop]))
        assert len([head for head in heads(report) if "; data loading 28%" in head]) == 1
        assert not any("ata loading takes" in head for head in heads(report))

    def test_cpu_contention_of_all_ranks_is_one_verdict(self) -> None:
        """The verdict has the rank that waits longest."""
        loops = [
            [{**BASE, "forward": 30.0 + more, "cpu": 26.0 + more} for _ in range(100)]
            for more in (0.0, 5.0)
        ]
        slow = episode(
            1, 0, from_start=True, phase="cpu", last_step=99, excess_ns=5 * MS, cost_ns=5 * MS
        )
        report = report_on(node(loops, findings(slow, last_step=99, compared=2)))

        assert [row.kind for row in report["verdicts"]] == ["lack_of_cpu"]
        assert heads(report)[0].endswith(" Rank 1 waits longest.")
        assert report["verdicts"][0].rank == 1

    def test_cpu_contention_of_one_rank_is_reported_as_a_slow_rank(self) -> None:
        """The mean contention over all ranks is only due to this rank."""
        loops = [
            [{**BASE, "forward": 4.0 + more, "cpu": more} for _ in range(100)]
            for more in (0.0, 20.0)
        ]
        slow = episode(
            1, 0, from_start=True, phase="cpu", last_step=99, excess_ns=20 * MS, cost_ns=20 * MS
        )
        report = report_on(node(loops, findings(slow, last_step=99, compared=2)))

        assert [row.kind for row in report["verdicts"]] == ["straggler"]

    @pytest.mark.parametrize("until", [None, 180])
    def test_waiting_for_a_slow_rank_is_no_separate_verdict(self, until: int | None) -> None:
        """The rank is slow now, or was slow for most of the run."""
        parts = {"communication": 20.0}, {"backward": 28.0}
        loops = [[{**BASE, **each} for _ in range(200)] for each in parts]
        for loop in loops:
            loop[until or 200 :] = usual(200 - (until or 200))
        slow = episode(1, 0, until, from_start=True, last_step=199)
        report = report_on(node(loops, findings(slow, last_step=199, compared=2)))

        assert "communication_bound" not in {row.kind for row in report["verdicts"]}
        assert not any("omm wait" in head for head in heads(report))

    def test_waiting_for_another_pipeline_stage_is_no_separate_verdict(self) -> None:
        """Larger gradient buckets would not help a stage that waits because it has little work."""
        loops = [
            [{**BASE, **parts} for _ in range(100)]
            for parts in ({"communication": 30.0}, {"forward": 34.0})
        ]
        usual_of = (
            UsualTimes("first", "0", 16 * MS, 30 * MS),
            UsualTimes("second", "1", 46 * MS, 1 * MS),
        )
        report = report_on(
            node(loops, findings(last_step=99, compared=0, usual=usual_of, step_ns=46 * MS))
        )
        kinds = [row.kind for row in report["verdicts"]]

        assert "not_compared" in kinds
        assert "communication_bound" not in kinds
        assert any("Rank 1 has 46.0 ms of work a step" in head for head in heads(report))

    def test_small_straggler_does_not_hide_a_larger_loss_of_all_ranks(self) -> None:
        """All ranks wait 30 ms for data, and one rank computes 2 ms longer.

        The waits and the slow rank are reported, the waits first. Also the short report has what to do
        about the rank, because the waits may be due to the machine.
        """
        loops = [
            [{**BASE, "data": 30.0, "backward": 8.0 + more} for _ in range(100)]
            for more in (0.0, 2.0)
        ]
        for step in loops[0]:
            step["communication"] = 2.0
        slow = episode(1, 0, from_start=True, last_step=99, excess_ns=2 * MS, cost_ns=2 * MS)
        report = report_on(node(loops, findings(slow, last_step=99, compared=2)))

        assert [row.kind for row in report["verdicts"]] == ["data_bound", "straggler"]
        short = render_short(report, "x", columns=118, color=False)
        assert short.count("\n  next ") == 2
        assert short.index("SLOW RANK") < short.rindex("\n  next ")


@pytest.mark.parametrize(
    "parts", [{"data": 30.0, "host": 12.0}, {"forward": 40.0, "cpu": 30.0, "data": 20.0}, {}]
)
def test_cost_of_a_verdict_equals_the_first_figure_of_its_sentence(parts: dict[str, float]) -> None:
    """The cost is not a sum of several figures."""
    row, *_ = report_on(node([[{**BASE, **parts} for _ in range(60)]]))["verdicts"]
    share = float(row.sentence.partition(" takes ")[2].partition("%")[0]) / 100

    assert row.cost_share == pytest.approx(share if parts else 0.0, abs=0.006)
    assert row.cost_s_per_step == pytest.approx(row.cost_share * row.evidence.typical_step_s)
