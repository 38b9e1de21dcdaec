"""Verdicts on how the steps spend their time.

The figures of a verdict are compared with the table and the true value, and its sentence has them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import pytest

from tests.support.facts import take_facts
from tests.support.reports import checked
from tests.support.tables import mixed_table
from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS, RankStatistics
from torchlens_perf.analysis.statistics.time_account import TimeAccount
from torchlens_perf.report.build import build_report
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.records import OWN_PARTS, PARTS, PASSES
from torchlens_perf.run.ring import Flag, record_dtype
from torchlens_perf.verdicts.node_state import NodeState, ProcessState
from torchlens_perf.verdicts.words.bottleneck import (
    TypicalStepEvidence,
    break_down_step,
    build_step_verdicts,
)
from torchlens_perf.verdicts.words.modules import computing_action
from torchlens_perf.view.specs import Quantity
from torchlens_perf.view.tables import build_tables

# Columns of the table by the kind of verdict on a use of time.
COLUMNS = {
    "data_bound": "data",
    "host_bound": "host code",
    "communication_bound": "comm wait",
    "lack_of_cpu": "CPU contention",
}
ROUNDING = 0.006  # Three figures.


def state_of(rank: int, ranks: int, steps: list[dict[str, Any]], **changed: Any) -> ProcessState:
    """Return a process with the given steps.

    A step has parts in ms, "flags", and "cpu" for the lack of a CPU in its forward part.
    """
    statistics = RankStatistics()
    statistics.add_records(np.zeros(0, record_dtype()), mixed_table(steps), [], 0)
    identity = Identity(
        "r", rank, rank, ranks, ranks, 0, "h", 10 + rank, 1, 1, False, "train.py", "", {}
    )
    facts = take_facts(changed)
    return ProcessState(
        identity, Anchor(0, 0, 0), statistics, ended="closed", facts=facts, **changed
    )


def report_on(*ranks: list[dict[str, Any]], **changed: Any) -> dict[str, Any]:
    states = [state_of(rank, len(ranks), steps, **changed) for rank, steps in enumerate(ranks)]
    return checked(
        build_report("r", [NodeState("h", {state.identity.key: state for state in states})])
    )


def mean_times(report: dict[str, Any]) -> dict[str, float]:
    """Return the means over the ranks of the times in the table of ranks, in seconds."""
    (table,) = [each for each in build_tables(cast("Any", report)) if each.key == "ranks"]
    times = [column for column in table.columns if column.quantity is Quantity.DURATION]
    return {each.title: float(np.mean([value or 0.0 for value in each.values])) for each in times}


def holds_typical(report: dict[str, Any]) -> str:
    """Check the verdict on the typical step against the table, and return its kind."""
    (row,) = [row for row in report["verdicts"] if isinstance(row.evidence, TypicalStepEvidence)]
    means, evidence, text = mean_times(report), row.evidence, row.sentence
    step_s, uses_s = evidence.typical_step_s, evidence.uses_s
    assert step_s == pytest.approx(means["step"], rel=ROUNDING)
    assert f"of a typical step of {format_duration(step_s)}" in text
    assert sum(uses_s.values()) <= step_s * (1 + ROUNDING), row
    for kind, column in COLUMNS.items():
        is_split = column != "CPU contention" and "CPU contention" in means
        if kind in uses_s and column in means and not is_split:
            assert uses_s[kind] == pytest.approx(means[column], rel=ROUNDING), row
    used_s = uses_s[row.kind]
    assert f"{format_percent(used_s / step_s)} ({format_duration(used_s)})" in text
    return str(row.kind)


def holds_long(row: dict[str, Any], report: dict[str, Any]) -> None:
    """Check count, excess, total, and share of all time of a verdict on long steps."""
    steps, evidence = report["steps"], row.evidence
    count, each_s, total_s = (
        evidence.long["count"],
        evidence.long["more_s"],
        evidence.long["total_s"],
    )
    assert evidence.long["share"] == pytest.approx(total_s / steps["total_s"])
    if evidence.long["period"] is None:
        assert total_s == pytest.approx(count * each_s)
    else:
        # One of the periodic steps may have been replaced by a step of another kind.
        expected = steps["count"] / evidence.long["period"]
        assert total_s / each_s == pytest.approx(expected, rel=0.5, abs=2)
    for figure in (each_s, total_s):
        assert format_duration(figure) in row.sentence
    assert f"{format_percent(evidence.long['share'])} of all step time" in row.sentence


def random_steps(rng: np.random.Generator, count: int, ranks: int) -> list[list[dict[str, Any]]]:
    """Return steps with random parts and noise, and sometimes other work, at random or
    regularly.
    """
    usual = dict(
        zip(
            ("data", "forward", "backward", "optimizer", "host"),
            rng.exponential(size=5) * 10,
            strict=True,
        )
    )
    if ranks > 1:
        usual["communication"] = float(rng.exponential() * 10)
    noise, lack = rng.choice([0.0, 0.02, 0.1]), rng.choice([None, 0.0, 20.0], p=[0.5, 0.2, 0.3])

    def step() -> dict[str, Any]:
        return {
            part: value * np.exp(noise * rng.standard_normal()) for part, value in usual.items()
        }

    loops = [[step() for _ in range(count)] for _ in range(ranks)]
    if lack is not None:
        for each in (each for loop in loops for each in loop):
            each["cpu"] = lack
            each["forward"] += lack
    for _ in range(rng.integers(0, 3)):
        part, more = str(rng.choice(list(usual))), float(rng.choice([50, 300, 5000]))
        flag = int(rng.choice([0, Flag.EVALUATION, Flag.CHECKPOINT, Flag.COMPILED]))
        every, begin = int(rng.integers(7, 40)), int(rng.integers(4, 20))
        regular = rng.random() < 0.5
        where = (
            range(begin, count, every)
            if regular
            else rng.choice(np.arange(4, count), 3, replace=False).tolist()
        )
        for number in where:
            for loop in loops:
                loop[number][part] += more
                loop[number]["flags"] = loop[number].get("flags", 0) | flag
    return loops


@pytest.mark.parametrize("seed", range(120))
def test_numbers_in_sentences_equal_those_in_the_table_for_random_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    loops = random_steps(rng, int(rng.integers(40, 300)), int(rng.choice([1, 1, 3])))
    report = report_on(*loops)
    holds_typical(report)
    for row in report["verdicts"]:
        if "of all step time" in row.sentence:
            holds_long(row, report)


@pytest.mark.parametrize("seed", range(40))
def test_largest_wait_is_the_bottleneck_if_it_is_large_enough(seed: int) -> None:
    """The wait takes a quarter of the step, or more than computing.

    If the largest wait is smaller, computing is the bottleneck.
    """
    rng = np.random.default_rng(1000 + seed)
    (loop,) = random_steps(rng, 100, 1)
    found = holds_typical(report_on(loop))
    longest_ms = 1.5 * float(np.median([duration_ms(step) for step in loop]))
    plain = [step for step in loop[WARM_UP_STEPS:] if duration_ms(step) < longest_ms]
    mean = {part: float(np.mean([step.get(part, 0.0) for step in plain])) for part in OWN_PARTS}
    lack = float(np.mean([step.get("cpu", 0.0) for step in plain]))
    step_ms = sum(mean.values())
    if lack >= 0.1 * step_ms:
        mean["forward"] -= lack
    waits = {
        "data_bound": mean["data"], "host_bound": mean["host"],
        "lack_of_cpu": lack if lack >= 0.1 * step_ms else 0.0,
    }  # fmt: skip
    computing = sum(mean[part] for part in ("forward", "backward", "optimizer"))
    kind, most = max(waits.items(), key=lambda item: item[1])
    close = any(
        abs(most - other) < 0.03 * step_ms
        for other in (0.25 * step_ms, computing, *waits.values())
        if other != most
    )
    if not close:
        assert found == (kind if most >= min(0.25 * step_ms, computing) else "compute_bound")


def duration_ms(step: dict[str, Any]) -> float:
    return sum(step.get(part, 0.0) for part in PARTS)


BASE = {"data": 1.0, "forward": 4.0, "backward": 8.0, "optimizer": 2.0, "host": 1.0}


def test_one_evaluation_does_not_change_the_share_of_host_code() -> None:
    """The evaluation has a separate verdict."""
    loop = [dict(BASE) for _ in range(103)]
    for number in (50, 100):
        loop[number] = {**BASE, "host": 901.0, "flags": Flag.EVALUATION | Flag.EVALUATED}
    long, typical = report_on(loop)["verdicts"]

    assert long.kind == "long_steps"
    assert (
        long.sentence
        == "2 of 103 steps (steps 50, 100) take 900 ms longer on average (evaluation): 1.80 s in"
        " total, 53% of all step time. Next: evaluate less often, or on fewer batches."
    )
    assert typical.sentence.startswith(
        "Computing (the backward pass 8.00 ms, the forward pass 4.00 ms, the optimizer 2.00 ms)"
        " takes 88% (14.0 ms) of a typical step of 16.0 ms. Next: "
    )


def outliers(report: dict[str, Any]) -> tuple[dict[str, int], str]:
    """Return the counts in the table of outlier steps, and its note."""
    (table,) = [each for each in build_tables(cast("Any", report)) if each.key == "outlier_steps"]
    kinds, counts = (column.values for column in table.columns[:2])
    return dict(zip(map(str, kinds), map(int, map(str, counts)), strict=True)), table.note


class TestKindsOfSteps:
    """Sentences on several frequent kinds of steps."""

    def test_two_frequent_kinds_of_steps_have_counts_and_times(self) -> None:
        loop = [dict(BASE)] * 3 + [dict(BASE)] * 45 + [{**BASE, "optimizer": 46.0}] * 55
        report = report_on(loop)
        (long,) = report["steps"]["long"]

        assert "Two kinds of steps: 55 take 60.0 ms, 45 take 16.0 ms." in " ".join(
            each.sentence for each in report["verdicts"]
        )

        assert (long["count"], long["more_s"]) == (55, pytest.approx(0.044))
        assert outliers(report) == (
            {"unknown cause": 55},
            "45 of 103 steps are typical, 3 are warm-up steps.",
        )

    def test_shorter_steps_are_mentioned_without_a_verdict(self) -> None:
        report = report_on([dict(BASE)] * 83 + [{**BASE, "backward": 1.0}] * 20)
        (verdict,) = report["verdicts"]
        assert "Two kinds of steps: 80 take 16.0 ms, 20 take 9.00 ms." in verdict.sentence
        assert outliers(report) == (
            {"shorter": 20},
            "80 of 103 steps are typical, 3 are warm-up steps.",
        )

    def test_steps_that_wait_for_a_cpu_are_no_separate_kind(self) -> None:
        loop = [{**BASE, "cpu": 0.0} for _ in range(100)]
        for number in (20, 33, 34, 41, 50, 58, 59, 60, 77, 80, 81, 93):
            loop[number] = {**BASE, "forward": 24.0, "cpu": 20.0}
        report = report_on(loop)
        texts = [each.sentence for each in report["verdicts"]]

        assert [(each["count"], each["part"]) for each in report["steps"]["long"]] == [(12, "cpu")]
        assert any("(most of it is CPU contention)" in text for text in texts)
        assert "kinds of steps" not in " ".join(texts)

    @pytest.mark.parametrize(
        ("part", "advice"),
        [
            (
                "backward",
                (
                    "find out what only one step in 2 does (steps 95, 97, 99, 101): perhaps another"
                    " backward pass, another optimizer, a larger batch, longer sequences."
                ),
            ),
            ("host", "see what the loop does in steps 95, 97, 99, 101"),
        ],
    )
    def test_longer_steps_with_a_period_are_a_kind_of_steps(self, part: str, advice: str) -> None:
        """The loop does additional work in every second step, such as training another model."""
        loop = [{**BASE, part: 60.0 if number % 2 else BASE[part]} for number in range(103)]
        texts = [each.sentence for each in report_on(loop)["verdicts"]]
        assert any(f"Next: {advice}" in text for text in texts), texts

    def test_outlier_table_counts_evaluations_and_other_long_steps(self) -> None:
        loop = [dict(BASE) for _ in range(150)]
        loop[40] = {**BASE, "host": 900.0, "flags": Flag.EVALUATION | Flag.EVALUATED}
        loop[90] = {**BASE, "data": 500.0}
        report = report_on(loop)
        assert outliers(report) == (
            {"evaluation": 1, "unknown cause": 1},
            "145 of 150 steps are typical, 3 are warm-up steps.",
        )
        assert "kinds of steps" not in " ".join(each.sentence for each in report["verdicts"])

    def test_longer_steps_that_may_have_waited_for_a_cpu_are_no_kind_of_steps(self) -> None:
        """Waits for a CPU are not measured in steps this short."""
        rng = np.random.default_rng(7)
        longer = set(rng.choice(np.arange(5, 200), 40, replace=False).tolist())
        loop = [{**BASE, "host": 30.0} if step in longer else dict(BASE) for step in range(200)]
        texts = [each.sentence for each in report_on(loop)["verdicts"]]

        assert any("whether they waited for a CPU is not measured" in text for text in texts)
        assert "kinds of steps" not in " ".join(texts)

    def test_three_longer_steps_are_too_few_for_a_kind_of_steps(self) -> None:
        loop = [*[dict(BASE)] * 17, *[{**BASE, "backward": 40.0}] * 3]
        assert "kinds of steps" not in " ".join(
            each.sentence for each in report_on(loop)["verdicts"]
        )

    @pytest.mark.parametrize(("typical", "named"), [(1, False), (4, False), (5, True)])
    def test_few_typical_steps_do_not_show_which_steps_are_long(
        self, typical: int, named: bool
    ) -> None:
        loop = [*[dict(BASE)] * (WARM_UP_STEPS + typical), {**BASE, "backward": 60.0}]
        texts = [each.sentence for each in report_on(loop)["verdicts"]]
        assert any(" longer" in text for text in texts) == named, texts

    @pytest.mark.parametrize("seed", range(30))
    def test_counts_and_times_of_kinds_add_up_to_all_steps(self, seed: int) -> None:
        rng = np.random.default_rng(5000 + seed)
        loops = random_steps(rng, int(rng.integers(40, 300)), 1)
        steps = report_on(*loops)["steps"]
        others = [*steps["long"], *steps["short"]]
        assert (
            steps["warm_up"] + steps["alike"] + sum(each["count"] for each in others)
            == steps["count"]
        )
        time_s = steps["alike"] * steps["alike_mean_s"] + sum(
            each["count"] * each["mean_s"] for each in others
        )
        assert time_s == pytest.approx(steps["total_s"])


class TestLongStepsAndCpus:
    """Sentences on irregular long steps that may only have waited for a CPU."""

    @staticmethod
    def text(
        usual: dict[str, float], longer: dict[str, float], steps: list[int], **changed: Any
    ) -> str:
        loop = [{**usual, **longer} if step in steps else dict(usual) for step in range(200)]
        texts = [each.sentence for each in report_on(loop, **changed)["verdicts"]]
        return next(str(text) for text in texts if "longer on" in text or "longer (" in text)

    @pytest.mark.parametrize(
        ("part", "where"), [("backward", "the backward pass"), ("host", "host code")]
    )
    def test_sentence_on_long_steps_says_that_cpu_waits_are_not_measured(
        self, part: str, where: str
    ) -> None:
        text = self.text(BASE, {part: 60.0}, [20, 53, 60, 97, 131])
        assert f"(most of it in {where}" in text
        assert "; whether they waited for a CPU is not measured)" in text
        assert "batch size" not in text
        assert text.endswith(
            "Next: see what the loop does in steps 53, 60, 97, 131, and what else kept the CPUs"
            " busy."
        )

    def test_sentence_on_one_long_step_says_that_its_cpu_wait_is_not_measured(self) -> None:
        text = self.text(BASE, {"backward": 600.0}, [53])
        assert (
            "(most of it in the backward pass; whether it waited for a CPU is not measured)" in text
        )
        assert text.endswith(
            "Next: see what the loop does in step 53, and what else kept the CPUs busy."
        )

    def test_sampled_lack_of_cpus_is_mentioned_for_long_steps(self) -> None:
        text = self.text(BASE, {"backward": 60.0}, [20, 53, 60, 97, 131], cpu_wait=[12.0, 20.0])
        assert "(most of it in the backward pass, while there are too few CPUs)" in text
        assert text.endswith(
            "Next: see whether steps 53, 60, 97, 131 still take longer with enough CPUs."
        )

    def test_equal_lack_of_a_cpu_in_all_steps_is_not_the_cause_of_long_steps(self) -> None:
        """The long steps lack a CPU for as long as the usual steps."""
        text = self.text({**BASE, "forward": 24.0, "cpu": 20.0}, {"backward": 600.0}, [53])
        assert "(most of it in the backward pass): 7.7% of all step time" in text
        assert text.endswith("Next: see what differs in step 53: batch size, sequence length.")

    def test_long_steps_measured_without_lack_of_a_cpu_have_no_note_on_cpus(self) -> None:
        text = self.text({**BASE, "cpu": 0.0}, {"backward": 600.0}, [53])
        assert text.endswith("Next: see what differs in step 53: batch size, sequence length.")


def test_regular_communication_of_local_sgd_is_not_blamed_on_one_rank() -> None:
    loop = [{**BASE, "communication": 60.0 if step % 4 == 0 else 0.01} for step in range(100)]
    (text,) = [
        each.sentence for each in report_on(loop, loop)["verdicts"] if each.kind == "long_steps"
    ]
    assert text.endswith(
        "Next: find out what only one step in 4 does (steps 84, 88, 92, 96): perhaps all ranks exchange"
        " data, or one rank does other work."
    )


def test_irregular_communication_of_local_sgd_is_not_blamed_on_one_rank() -> None:
    """On a busy machine, some steps with long communication are in another class."""
    loop = [
        {**BASE, "communication": 60.0 if step in (20, 24, 32, 36, 52, 56) else 0.4}
        for step in range(100)
    ]
    (text,) = [
        each.sentence for each in report_on(loop, loop)["verdicts"] if each.kind == "long_steps"
    ]
    assert text.endswith(
        "Next: see what differs in steps 32, 36, 52, 56: perhaps all ranks exchange data, or one rank"
        " does other work."
    )


def test_very_long_step_has_a_separate_verdict() -> None:
    """The very long step is not averaged with a step that is slightly long in the same part."""
    loop = [{**BASE, "communication": 1.0} for _ in range(319)]
    loop[130] = {**BASE, "communication": 60.0}
    loop[300] = {**BASE, "communication": 45_000.0}
    sentences = [
        each.sentence for each in report_on(loop, [dict(step) for step in loop])["verdicts"]
    ]
    (long,) = [text for text in sentences if " longer" in text]
    assert long.startswith(
        "1 of 319 steps (step 300) takes 45.0 s longer (most of it is comm wait): 89% of all step time"
    )


@pytest.mark.parametrize(
    ("part", "action"),
    [
        ("host", "look at these passes, and at what the loop does between them."),
        ("forward", "make fewer of these passes, or use larger batches in them."),
        ("data", "look at how these passes get their data."),
        (
            "communication",
            "find the rank that does other work in these steps while the others wait.",
        ),
    ],
)
def test_forward_passes_without_gradients_are_not_called_evaluation(part: str, action: str) -> None:
    """The passes may be rollouts or sampling, and the advice fits all of these."""
    loop = [
        {**BASE, part: 65.0, "flags": Flag.EVALUATION} if step % 8 == 7 else dict(BASE)
        for step in range(160)
    ]
    (long,) = [each for each in report_on(loop)["verdicts"] if each.kind == "long_steps"]
    assert "(forward passes without gradients: evaluation, rollouts or sampling" in long.sentence
    assert ("sampling, mostly " in long.sentence) is (part != "forward"), (
        "what took the time is said where it is another part"
    )
    assert long.sentence.endswith(f"Next: {action}")


REFERENCE = "of the step: a reference, teacher or EMA network, sampling or an evaluation."
GENERATION = "of the step, 32 for each backward pass: generation, sampling or an evaluation."


@pytest.mark.parametrize(
    ("name", "passes_ms", "calls", "what"),
    [
        (PASSES, 3.0, 1, REFERENCE),
        (PASSES, 3.0, 32, GENERATION),
        (PASSES, 0.5, 32, ""),
        ("encoder", 3.0, 1, ""),
    ],
)
def test_forward_passes_without_gradients_in_each_step_are_named(
    name: str, passes_ms: float, calls: int, what: str
) -> None:
    """A small part of the step is not worth a sentence, and no module of a model is called that."""
    report = report_on([dict(BASE) for _ in range(40)])
    row = {"name": name, "is_root": False, "own_s_per_step": passes_ms / 1e3, "has_untimed": False}
    modules = [{**row, "calls_per_step": calls}]
    (verdict,) = build_step_verdicts(cast("Any", {**report, "modules": modules}))
    assert (f"Forward passes without gradients take 19% (3.00 ms) {what}" in verdict.text) is bool(
        what
    )
    assert ("forward passes without gradients 3.00 ms" in verdict.text.split(". ")[0]) is bool(what)
    advice = "make fewer of the passes without gradients"
    assert (advice in verdict.action) is (name == PASSES)


def test_starved_forward_pass_that_is_mostly_generation_is_no_forward_pass_of_training() -> None:
    step = {**BASE, "forward": 44.0, "cpu": 40.0}
    report = report_on([step for _ in range(40)])
    row = {"name": PASSES, "is_root": False, "own_s_per_step": 0.03, "has_untimed": False}
    modules = [{**row, "calls_per_step": 32}]
    (verdict,) = build_step_verdicts(cast("Any", {**report, "modules": modules}))
    assert "The forward pass, mostly without gradients, takes " in verdict.text


def test_long_steps_of_one_kind_are_one_verdict() -> None:
    """A much longer step is included.

    The classes are joined before they are compared with other findings.
    """
    lengths = {40: 10.0, 80: 10.0, 120: 60.0, 160: 120.0}
    loop = [
        {
            **BASE,
            "forward": 4.0 + lengths.get(step, 0.0),
            "flags": Flag.EVALUATION * (step in lengths),
        }
        for step in range(200)
    ]
    (long,) = [each for each in report_on(loop)["verdicts"] if each.kind == "long_steps"]

    assert long.evidence.long["steps"] == [40, 80, 120, 160]
    assert long.lost_s == pytest.approx(0.2, rel=0.05)
    assert long.sentence.startswith("One step in 40 takes 50.0 ms longer on average")


@pytest.mark.parametrize(
    ("kind", "is_named"), [("garbage collection", True), ("sampled backward pass", False)]
)
def test_costly_garbage_collections_are_named_while_a_rank_is_slow(
    kind: str, is_named: bool
) -> None:
    """The cost of the slow rank is that of its usual steps."""
    loop = [{**BASE, "forward": 90.0 if at % 20 == 9 else 4.0} for at in range(200)]
    report = report_on(loop, loop)
    (long,) = report["steps"]["long"]
    report["steps"]["long"] = [{**long, "kinds": [kind]}]
    found = build_step_verdicts(cast("Any", report), waits_explained=True)

    assert ("long_steps" in [each.kind for each in found]) is is_named


def test_rollouts_of_two_lengths_are_periodic_although_old_steps_are_not_listed() -> None:
    loop = [dict(BASE) for _ in range(640)]
    for step in range(16, 640, 16):
        longer = 60.0 if step % 48 == 0 else 10.0
        loop[step] = {**BASE, "forward": 4.0 + longer, "flags": Flag.EVALUATION}
    (long,) = [each for each in report_on(loop)["verdicts"] if each.kind == "long_steps"]
    assert len(long.evidence.long["steps"]) < long.evidence.long["count"] == 39
    assert long.sentence.startswith("One step in 16 takes ")


def test_evaluations_of_two_lengths_that_stopped_are_not_periodic() -> None:
    loop = [dict(BASE) for _ in range(640)]
    for step in range(16, 200, 16):
        longer = 120.0 if step % 48 == 0 else 20.0
        loop[step] = {**BASE, "forward": 4.0 + longer, "flags": Flag.EVALUATION}
    (long,) = [each for each in report_on(loop)["verdicts"] if each.kind == "long_steps"]
    assert long.sentence.startswith("12 of 640 steps take ")


def test_unmeasured_wait_for_a_cpu_is_not_reported_as_zero() -> None:
    """Steps of a few milliseconds do not record this wait, but samples may show it."""
    evidence = report_on([dict(BASE)] * 60)["verdicts"][-1].evidence
    assert "lack_of_cpu" not in evidence.uses_s
    text = report_on([dict(BASE)] * 60, cpu_wait=[2.0, 20.0])["verdicts"][-1].sentence
    assert "These figures include CPU contention, which was not measured per step" in text
    assert "show 10% of the time. Next:" in text


def test_sentence_notes_that_long_steps_differ_between_ranks() -> None:
    """The count is a mean over the ranks, and step numbers of all ranks are listed."""
    ranks = [[dict(BASE) for _ in range(103)] for _ in range(2)]
    for rank, numbers in enumerate(((30, 50), (50, 100))):
        for number in numbers:
            ranks[rank][number] = {**BASE, "host": 901.0, "flags": Flag.EVALUATION}

    (long,) = [each for each in report_on(*ranks)["verdicts"] if each.kind == "long_steps"]
    assert long.sentence.startswith(
        "2 of 103 steps (which ones differs between ranks: steps 30, 50, 100) take 900 ms longer "
    )


def test_step_with_a_call_of_this_package_is_attributed_to_it() -> None:
    """w.step_table() imported a library, which triggered the garbage collector."""
    usual, asked = {"forward": 5.0}, {"forward": 5.0, "tool": 900.0, "flags": int(Flag.COLLECTED)}
    report = report_on([*[usual] * 40, asked, *[usual] * 40])
    (said,) = (row.sentence for row in report["verdicts"] if row.kind == "long_steps")

    assert "takes 900 ms longer (most of it is work of torchlens_perf)" in said
    assert (
        "Next: if the loop requests results (w.summary(), w.step_table(), a display), do so less"
        " often" in said
    )
    assert "garbage" not in said


def test_lack_of_a_cpu_for_half_of_the_time_is_the_bottleneck() -> None:
    loop = [{**BASE, "forward": 20.0, "cpu": 16.0} for _ in range(60)]
    verdicts = report_on(loop, [dict(step) for step in loop])["verdicts"]

    assert verdicts[0].kind == "lack_of_cpu"
    assert verdicts[0].sentence.startswith(
        "CPU contention takes 50% (16.0 ms) of a typical step of 32.0 ms; apart from it, computing 44% (14.0"
        " ms). The forward pass takes 20.0 ms, 62% of the step; for 80% of that time, it waited for a CPU."
        " Next: see what "
    )


@pytest.mark.parametrize(
    ("communication_ms", "kind"), [(12.0, "lack_of_cpu"), (14.0, "communication_bound")]
)
def test_cpu_contention_explains_waits_for_other_ranks_that_are_nearly_as_long(
    communication_ms: float, kind: str
) -> None:
    """Ranks take turns to wait for a CPU, and the other rank waits meanwhile."""
    loop = [{**BASE, "forward": 14.0, "cpu": 10.0, "communication": communication_ms}] * 60
    assert report_on(loop, loop)["verdicts"][0].kind == kind


def test_longest_part_is_named_where_all_waits_for_a_cpu_are_the_bottleneck() -> None:
    """The sentence is about the job, too: the optimizer's step is its longest part."""
    starved = {**BASE, "optimizer": 11.0, "cpu": 10.0, "cpu_in": "optimizer"}
    verdict = report_on([starved] * 60)["verdicts"][0]

    assert verdict.text == (
        "CPU contention takes 40% (10.0 ms) of a typical step of 25.0 ms; apart from it, computing 52% (13.0 ms)."
        " The optimizer takes 11.0 ms, 44% of the step; for 91% of that time, it waited for a CPU."
    )


def test_part_whose_work_waits_for_cpus_is_named_with_its_whole_time() -> None:
    """Busy CPUs do not hide what the job does: most of the step is data loading."""
    starved = {**BASE, "data": 60.0, "cpu": 54.0, "cpu_in": "data"}
    first, second = report_on([starved] * 60)["verdicts"]

    assert (first.kind, first.cost_s_per_step) == ("data_bound", pytest.approx(0.060))
    assert first.text == (
        "Data loading takes 80% (60.0 ms, of which 90% waited for a CPU) of a typical step of 75.0 ms;"
        " computing 19% (14.0 ms)."
    )
    assert first.held.since_step == 0
    assert (second.kind, second.cost_s_per_step) == ("lack_of_cpu", pytest.approx(0.054))
    assert second.text == (
        "CPU contention takes 72% (54.0 ms) of a typical step of 75.0 ms: 100% of it in data"
        " loading."
    )
    assert second.action.startswith("see what else keeps the CPUs busy")


def test_phases_in_a_sentence_are_those_of_the_table() -> None:
    """The table has their waits for a CPU in a column of their own, so the sentence names them."""
    report = report_on([{**BASE, "data": 60.0, "forward": 20.0, "cpu": 2.0}] * 60)
    first, times = report["verdicts"][0], mean_times(report)

    assert times["forward"] == pytest.approx(0.018, rel=ROUNDING)
    assert f"computing (the forward pass {format_duration(times['forward'])}, " in first.text
    assert ", of which 6.7% waited for a CPU)" in first.text


def test_data_loading_next_to_contention_of_other_parts_is_the_second_verdict() -> None:
    starved = {**BASE, "data": 20.0, "forward": 40.0, "cpu": 30.0}
    first, second = report_on([starved] * 60)["verdicts"]

    assert (first.kind, first.cost_s_per_step) == ("lack_of_cpu", pytest.approx(0.030))
    assert (second.kind, second.cost_s_per_step) == ("data_bound", pytest.approx(0.020))
    assert second.text == "Data loading takes 28% (20.0 ms) of a typical step of 71.0 ms."
    assert second.action.startswith("see what takes the time of a batch")


def test_section_next_to_contention_is_the_second_verdict_with_its_own_action() -> None:
    report: Any = report_on([{**BASE, "host": 20.0, "forward": 40.0, "cpu": 30.0}] * 60)
    report["sections"] = [{"name": "tokenize", "host_s_per_typical_step": 0.019}]
    first, second = build_step_verdicts(report)

    assert (first.kind, second.kind) == ("lack_of_cpu", "host_bound")
    assert second.text == 'Section "tokenize" takes 27% (19.0 ms) of a typical step of 71.0 ms.'
    assert second.action.startswith('make section "tokenize" cheaper')


@pytest.mark.parametrize(
    ("data_ms", "kind"), [(40.0, "lack_of_cpu"), (60.0, "data_bound"), (75.0, "data_bound")]
)
def test_contention_of_all_parts_is_first_unless_a_part_takes_half_of_the_step(
    data_ms: float, kind: str
) -> None:
    """Waits for a CPU take 60 % of each part."""
    parts = {"data": data_ms, "forward": 100.0 - data_ms}
    spread = [{**parts, "cpu": 0.6 * ms, "cpu_in": part} for part, ms in parts.items()]
    tables = [mixed_table([each] * 60) for each in spread]
    ready_ns = tables[0].ready_ns + tables[1].ready_ns
    table = dataclasses.replace(tables[0], ready_ns=ready_ns)
    found = break_down_step(TimeAccount.from_parts(table.parts_ns[0], table.ready_ns[0]))

    assert found.limit.kind == kind
    assert found.is_limited_by(kind)
    kinds = {"lack_of_cpu", "data_bound", "compute_bound"}
    assert {each for each in kinds if found.is_limited_by(each)} == {kind}


def test_sampled_lack_of_a_cpu_is_the_bottleneck_of_short_steps() -> None:
    short = [{part: value / 10 for part, value in BASE.items()} for _ in range(60)]
    (verdict,) = report_on(short, cpu_wait=[12.0, 20.0])["verdicts"]
    (quiet,) = report_on(short, cpu_wait=[1.0, 20.0])["verdicts"]

    assert verdict.sentence.startswith(
        "In 60% of one-second samples, a rank's main thread was ready to run but had no CPU"
    )
    assert quiet.kind == "compute_bound"


@pytest.mark.parametrize(
    ("parts", "kind", "next_words"),
    [
        (
            {"data": 2.0, "host": 6.0},
            "host_bound",
            'time parts of it with torchlens_perf.section("name").',
        ),
        ({"data": 6.0, "host": 2.0}, "data_bound", "a batch"),
        ({"data": 2.0}, "compute_bound", "times its modules"),
        ({"data": 3.5}, "compute_bound", "a batch"),
        ({"data": 0.5, "host": 0.5}, "compute_bound", "times its modules"),
        ({"communication": 9.0}, "communication_bound", "operations"),
    ],
)
def test_advice_is_about_the_bottleneck_or_the_largest_wait(
    parts: dict[str, float], kind: str, next_words: str
) -> None:
    verdict = report_on([{**BASE, **parts} for _ in range(60)])["verdicts"][-1]
    assert verdict.kind == kind
    assert next_words in verdict.action


class TestOtherThreads:
    @staticmethod
    def report(
        parts: dict[str, float], elsewhere_ms: dict[str, float], **changed: Any
    ) -> dict[str, Any]:
        """Return a report on steps with the given parts, and time of other threads by phase."""
        state = state_of(0, 1, [{**BASE, **parts} for _ in range(60)], **changed)
        steps = state.statistics.step.count
        state.statistics.other_threads_ns = {
            phase: int(ms * 1e6 * steps) for phase, ms in elsewhere_ms.items()
        }
        return checked(build_report("r", [NodeState("h", {state.identity.key: state})]))

    def verdict(
        self, parts: dict[str, float], elsewhere_ms: dict[str, float], **changed: Any
    ) -> dict[str, Any]:
        verdict: dict[str, Any] = self.report(parts, elsewhere_ms, **changed)["verdicts"][-1]
        return verdict

    @pytest.mark.parametrize("phase", ["data", "forward", "backward"])
    def test_host_code_is_not_the_bottleneck_while_other_threads_work(self, phase: str) -> None:
        """In its host code, the recorded thread may wait for the other threads."""
        verdict = self.verdict({"host": 40.0}, {phase: 30.0})

        assert (verdict.kind, verdict.cost_share) == ("not_known", None)
        assert "30.0 ms a step" in verdict.sentence
        assert "spends 73% (40.0 ms) of a step outside its own phases" in verdict.sentence
        assert ("enter watch()" in verdict.sentence, "batches" in verdict.sentence) == (
            phase != "data",
            phase == "data",
        )
        assert "Host code" not in verdict.sentence
        assert "logging" not in verdict.sentence
        assert verdict.evidence.other_threads_s == {phase: pytest.approx(0.03)}

    @pytest.mark.parametrize(
        ("parts", "elsewhere_ms", "kind"),
        [({"host": 40.0}, {}, "host_bound"), ({"host": 40.0}, {"forward": 1.0}, "host_bound"),
         ({"host": 0.1}, {"forward": 30.0}, "compute_bound"), ({"data": 40.0}, {"forward": 30.0}, "data_bound")],
    )  # fmt: skip
    def test_other_bottlenecks_are_reported_while_other_threads_work(
        self, parts: dict[str, float], elsewhere_ms: dict[str, float], kind: str
    ) -> None:
        """Work on other threads explains only time outside the phases."""
        assert self.verdict(parts, elsewhere_ms).kind == kind

    @pytest.mark.parametrize(
        ("elsewhere_ms", "noted"), [({"forward": 30.0, "data": 1.0}, True), ({}, False)]
    )
    def test_work_on_other_threads_is_always_in_a_note(
        self, elsewhere_ms: dict[str, float], noted: bool
    ) -> None:
        """The note is also given if the verdict is not about other threads."""
        notes = self.report({"data": 40.0}, elsewhere_ms)["quality"]["notes"]

        note = "other threads also worked (the forward pass 30.0 ms, data loading 1.00 ms a step)"
        assert any(each.startswith(note) for each in notes) is noted, notes


class TestWaitsInCommunication:
    """Equal waits of all ranks, which a slow link of one rank may cause."""

    @staticmethod
    def text(*waits_ms: float) -> str:
        ranks = [[{**BASE, "communication": wait_ms} for _ in range(60)] for wait_ms in waits_ms]
        (verdict,) = (
            each for each in report_on(*ranks)["verdicts"] if each.kind == "communication_bound"
        )
        return str(verdict.sentence)

    def test_equal_communication_waits_of_all_ranks_have_a_note_on_slow_links(self) -> None:
        assert (
            ". All ranks wait about equally long. A slow link of one rank would look the same."
            " Next:" in self.text(30.0, 33.0)
        )

    @pytest.mark.parametrize("waits_ms", [(30.0,), (20.0, 40.0)])
    def test_unequal_communication_waits_of_ranks_have_no_note_on_slow_links(
        self, waits_ms: tuple[float, ...]
    ) -> None:
        assert "slow link" not in self.text(*waits_ms)


class TestOnADevice:
    def test_bottleneck_is_unknown_without_device_times(self) -> None:
        """Host times are not presented as the answer."""
        verdict = report_on([{**BASE, "host": 40.0} for _ in range(60)], compute_device="xpu")[
            "verdicts"
        ][-1]

        assert (verdict.kind, verdict.cost_share) == ("not_known", None)
        assert verdict.sentence.startswith(
            "What limits the step is not known: the work is on a device (xpu), and only host time"
            " was recorded. By the host's clock, host code between the phases takes 73% (40.0 ms) of a typical step,"
            " but the host may be waiting for the device there."
        )

    def test_report_notes_that_ranks_were_not_compared(self) -> None:
        """The report does not claim that no rank is slow."""
        verdict = report_on(*[[dict(BASE) for _ in range(60)]] * 2, compute_device="cuda")[
            "verdicts"
        ][0]

        assert verdict.kind == "not_compared"
        assert verdict.sentence.startswith(
            "The ranks were not compared: their work is on a device (GPU), and only host time is"
            " known."
        )
        assert "slow rank" not in verdict.sentence


@pytest.mark.parametrize(
    ("rows", "deeper", "advice"),
    [
        (
            [("Net", True, False)],
            True,
            (
                "look first at Net, the module with the most time of its own (12.0 ms of the forward pass"
                " in each step);"
                " modules=1 shows what is inside."
            ),
        ),
        (
            [("Net", True, False)],
            False,
            (
                "look at a trace of Net: torchlens-perf capture, while the job runs. No module"
                " inside can be timed."
            ),
        ),
        (
            [("Net", True, False), ("blocks.0", False, True)],
            True,
            (
                "look at the code of Net's own forward(), outside of its modules: time parts of it"
                ' with torchlens_perf.section("name").'
            ),
        ),
        (
            [("blocks.0", False, True), ("Net", True, False)],
            True,
            (
                "look first at blocks.0, the module with the most time of its own (12.0 ms of the forward pass"
                " in each step);"
                ' modules=["blocks.0.*"] shows what is inside.'
            ),
        ),
        (
            [("head", False, False), ("blocks.0", False, True)],
            True,
            "look first at head, the module with the most time of its own (12.0 ms of the forward pass"
            " in each step).",
        ),
        (
            [("4", False, False), ("Net", True, False)],
            False,
            "look first at module 4, the module with the most time of its own (12.0 ms of the forward pass"
            " in each step).",
        ),
    ],
)
def test_advised_modules_pattern_matches_existing_modules(
    rows: list[tuple[str, bool, bool]], deeper: bool, advice: str
) -> None:
    """Module names do not begin with the class of the whole model, and a leaf has no modules
    inside.
    """
    modules = [
        {
            "name": name,
            "is_root": is_root,
            "has_untimed": has_untimed,
            "own_s_per_step": 0.012,
            "device_own_s_per_step": None,
        }
        for name, is_root, has_untimed in rows
    ]
    facts: Any = {"modules": modules, "run": {"deeper_modules": deeper, "judged_by": "host"}}

    assert computing_action(facts) == advice
