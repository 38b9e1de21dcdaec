"""Steps by kind and duration: the typical one, and classes of longer ones, out of every mix of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.saved import saved
from tests.support.tables import mixed_table
from torchlens_perf.analysis.node_state import encode
from torchlens_perf.analysis.statistics.step_mix import LACK_OF_CPU, StepClasses, StepMix, classify
from torchlens_perf.run.records import StepTable
from torchlens_perf.run.ring import Flag

MS = 1e6
NORMAL = {"data": 1.0, "forward": 4.0, "backward": 8.0, "optimizer": 2.0, "host": 1.0}  # 16 ms


def mix_of(*tables: StepTable) -> StepMix:
    mix = StepMix()
    for each in tables:
        mix.add(each)
    return mix


def classes(steps: Sequence[dict[str, Any]], **how: Any) -> StepClasses:
    return classify([mix_of(mixed_table(steps, **how))])


def loop(count: int, **others: dict[str, Any]) -> list[dict[str, Any]]:
    """Normal steps; others: by "everyN", the steps in their place."""
    steps = []
    for number in range(count):
        step = dict(NORMAL)
        for every, other in others.items():
            if number % int(every.removeprefix("every")) == int(every.removeprefix("every")) - 1:
                step = {**NORMAL, **other}
        steps.append(step)
    return steps


def test_typical_step_adds_up() -> None:
    """Its parts are its duration, whatever the noise; and it is about the median."""
    found = classes(loop(500), noise=0.1)
    assert found.typical is not None
    assert sum(found.typical.parts_ns.values()) == pytest.approx(found.typical.duration_ns, rel=1e-9)
    assert found.typical.duration_ns == pytest.approx(16 * MS, rel=0.02)
    assert found.typical.parts_ns["backward"] == pytest.approx(8 * MS, rel=0.02)
    assert (found.count, found.long) == (500, ())


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
def test_one_odd_step_changes_nothing(noise: float) -> None:
    """Where a mean over all steps would be decided by it."""
    usual = classes(loop(60), noise=noise).typical
    odd = classes([*loop(59), {**NORMAL, "host": 5000.0}], noise=noise)

    assert usual is not None
    assert odd.typical is not None
    assert odd.typical.duration_ns == pytest.approx(usual.duration_ns, rel=0.02)
    assert odd.typical.parts_ns["host"] == pytest.approx(1 * MS, rel=0.1)
    (long,) = odd.long
    assert (long.kinds, long.part, long.count, long.steps, long.period) == ((), "host", 1, (59,), None)


@pytest.mark.parametrize(
    ("flag", "kind"),
    [
        (Flag.EVALUATION, "evaluation"),
        (Flag.CHECKPOINT, "saving"),
        (Flag.COMPILED, "compilation"),
        (Flag.CAPTURED, "capture"),
        (Flag.COLLECTED, "garbage collection"),
        (Flag.SAMPLED, "sampled backward pass"),
    ],
)
def test_what_long_steps_do(flag: Flag, kind: str) -> None:
    """By their flags: how often, how much longer, where, and what they cost in all."""
    found = classes(loop(200, every50={"host": 201.0, "flags": flag}), noise=0.02)
    (long,) = found.long

    assert (long.kinds, long.part, long.count, long.period) == ((kind,), "host", 4, 50)
    assert long.steps == (49, 99, 149, 199)
    assert long.more_ns == pytest.approx(200 * MS, rel=0.05)
    assert long.total_ns == pytest.approx(4 * long.more_ns)
    assert found.total_ns == pytest.approx((200 * 16 + 800) * MS, rel=0.05)


def test_several_flags_are_one_class() -> None:
    """As where an evaluation is followed by saving; what matters little is not named beside them."""
    flags = Flag.EVALUATION | Flag.CHECKPOINT
    found = classes(
        [*loop(40), {**NORMAL, "host": 90.0, "flags": flags}, {**NORMAL, "host": 90.0, "flags": flags | Flag.SAMPLED}]
    )
    (long,) = found.long

    assert (long.kinds, long.count) == (("evaluation", "saving"), 2)


def test_flagged_steps_that_take_no_longer_are_no_class() -> None:
    """A sampled step that is as long as the others."""
    assert classes(loop(100, every16={"flags": Flag.SAMPLED})).long == ()


@pytest.mark.parametrize("part", ["data", "forward", "backward", "optimizer", "communication", "host"])
def test_where_long_steps_take_longer(part: str) -> None:
    """Without any flag: the part that grew."""
    (long,) = classes(loop(120, every30={part: 100.0}), noise=0.03).long
    assert (long.kinds, long.part, long.count, long.period) == ((), part, 4, 30)


def test_long_steps_of_different_places_are_classes_of_their_own() -> None:
    """The costliest first."""
    found = classes(loop(210, every10={"data": 61.0}, every70={"host": 201.0}))
    assert [(each.part, each.count) for each in found.long] == [("data", 18), ("host", 3)]
    assert [each.total_ns for each in found.long] == pytest.approx([18 * 60 * MS, 3 * 200 * MS])


def test_irregular_steps_have_no_period() -> None:
    """Only their number, and which they were."""
    steps = loop(100)
    for number in (7, 8, 30, 77):
        steps[number] = {**NORMAL, "host": 300.0}
    (long,) = classes(steps).long
    assert (long.steps, long.period) == ((7, 8, 30, 77), None)


def test_taking_turns() -> None:
    """A loop that does more in every fourth step: most steps are typical, and the others have their period."""
    found = classes(loop(400, every4={"backward": 30.0}), noise=0.05)
    assert found.typical is not None
    assert found.typical.duration_ns == pytest.approx(16 * MS, rel=0.05)
    assert [(each.part, each.count, each.period) for each in found.long] == [("backward", 100, 4)]


def test_steps_of_all_lengths_are_one_class() -> None:
    """Variable work: from 10 to 40 ms alike, nothing is cut off."""
    rng = np.random.default_rng(1)
    found = classes([{"forward": each} for each in rng.uniform(10, 40, 600)])
    assert found.long == ()
    assert found.typical is not None
    assert found.typical.duration_ns == pytest.approx(25 * MS, rel=0.05)


def test_inference_is_typical_where_it_is_all_there_is() -> None:
    """And a class of its own, with its name, in a training run."""
    inference = {"forward": 2.0, "flags": Flag.INFERENCE}
    alone = classes([dict(inference) for _ in range(50)])
    assert alone.typical is not None
    assert (alone.typical.count, alone.long) == (50, ())
    before = classes([*[{"forward": 90.0, "flags": Flag.INFERENCE}] * 5, *loop(50)])
    assert [each.kinds for each in before.long] == [("inference",)]


class TestLackOfCpu:
    def test_is_told_apart(self) -> None:
        """In each part of the typical step."""
        found = classes([{**NORMAL, "forward": 24.0, "cpu": 20.0} for _ in range(30)])
        assert found.typical is not None
        assert found.typical.ready_ns is not None
        assert found.typical.ready_ns["forward"] == pytest.approx(20 * MS)
        assert found.typical.parts_ns["forward"] == pytest.approx(24 * MS)

    def test_not_measured_is_not_none(self) -> None:
        """Where fewer than half of the steps tell."""
        found = classes([*[{**NORMAL, "cpu": 1.0}] * 10, *loop(30)])
        assert found.typical is not None
        assert found.typical.ready_ns is None

    def test_is_where_long_steps_are_long(self) -> None:
        """Not the part that it happened to be in."""
        steps = [{**NORMAL, "cpu": 0.0} for _ in range(60)]
        steps[20] = {**NORMAL, "forward": 204.0, "cpu": 200.0}
        (long,) = classes(steps).long
        assert long.part == LACK_OF_CPU


class TestSeveralRanks:
    def test_counts_are_those_of_one(self) -> None:
        """All ranks do the same: the numbers are those of each of them."""
        one = loop(100, every25={"host": 101.0, "flags": Flag.EVALUATION})
        (alone,) = classes(one).long
        together = classify([mix_of(mixed_table(one)) for _ in range(4)])
        (long,) = together.long
        assert (together.count, long.count, long.period) == (100, alone.count, 25)
        assert long.total_ns == pytest.approx(alone.total_ns)

    def test_who_waits_for_an_evaluation(self) -> None:
        """One rank evaluates, and the others wait for it in communication: one class, with the reason."""
        evaluates = loop(100, every25={"host": 101.0, "flags": Flag.EVALUATION})
        waits = loop(100, every25={"communication": 100.0})
        (long,) = classify([mix_of(mixed_table(steps)) for steps in (evaluates, waits, waits)]).long
        assert (long.kinds, long.count, long.period) == (("evaluation",), 4, 25)

    def test_waiting_for_nobody_that_is_known(self) -> None:
        """Stays what it is."""
        waits = loop(100, every25={"communication": 100.0})
        (long,) = classify([mix_of(mixed_table(waits)), mix_of(mixed_table(waits))]).long
        assert (long.kinds, long.part, long.count) == ((), "communication", 4)


def test_nothing() -> None:
    """No step, no class."""
    assert classify([]) == classify([StepMix()]) == StepClasses(0, 0.0, None, ())


steps_of_any_kind = st.lists(
    st.fixed_dictionaries(
        {part: st.floats(0.0, 500.0) for part in ("data", "forward", "backward", "host", "communication")},
        optional={"flags": st.sampled_from([0, *Flag]), "cpu": st.floats(0.0, 50.0)},
    ),
    min_size=1,
    max_size=80,
)


@given(steps_of_any_kind, st.integers(1, 79))
def test_merging_is_adding(steps: list[dict[str, Any]], cut: int) -> None:
    """In two pieces, through a file, or at once: the same classes."""
    whole = mix_of(mixed_table(steps))
    pieces = mix_of(mixed_table(steps[:cut]))
    rest = mix_of(mixed_table(steps[cut:], first_step=cut))
    pieces.merge(saved(rest))

    expected, found = classify([whole]), classify([pieces])
    assert found.count == expected.count
    assert found.total_ns == pytest.approx(expected.total_ns)
    assert [dataclasses.astuple(each)[:3] for each in found.long] == [
        dataclasses.astuple(each)[:3] for each in expected.long
    ]


@given(steps_of_any_kind)
def test_every_mix_is_described_truthfully(steps: list[dict[str, Any]]) -> None:
    """The typical step adds up; classes are disjoint and longer, and what they cost is a part of the time."""
    given_table = mixed_table(steps)
    found = classes(steps)
    typical = found.typical
    assert typical is not None
    assert sum(typical.parts_ns.values()) == pytest.approx(typical.duration_ns, rel=1e-6, abs=100)
    assert given_table.duration_ns.min() - 1 <= typical.duration_ns <= given_table.duration_ns.max() + 1
    assert found.total_ns == pytest.approx(given_table.duration_ns.sum())
    assert typical.count + sum(each.count for each in found.long) <= found.count == len(steps)
    assert sum(each.total_ns for each in found.long) <= found.total_ns * (1 + 1e-9)
    for each in found.long:
        assert each.more_ns > 0
        assert len(set(each.steps)) == len(each.steps) <= each.count
        longer = given_table.duration_ns[list(each.steps)].mean() - typical.duration_ns
        if len(each.steps) == each.count:
            assert each.more_ns == pytest.approx(longer, rel=1e-6, abs=100)


def test_size_is_bounded() -> None:
    """However many durations there are."""
    rng = np.random.default_rng(0)
    mix = StepMix()
    for first in range(0, 100_000, 20_000):
        durations = np.exp(rng.uniform(0, 22, 20_000)) / 1e6
        mix.add(mixed_table([{"forward": each, "flags": 1 << int(rng.integers(7, 16))} for each in durations], first))
    assert len(encode(mix)) < 150_000
    assert classify([mix]).count == 100_000
