"""Classes of steps by kind and duration: the typical step and longer ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.saved import save_and_load
from tests.support.tables import mixed_table
from torchlens_perf.analysis.statistics.step_mix import (
    LACK_OF_CPU,
    MEASURED,
    StepClasses,
    StepMix,
    classify_steps,
)
from torchlens_perf.analysis.statistics.time_account import CPU
from torchlens_perf.run.records import WITHOUT_GRADIENTS, StepTable
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.node_state import encode_json

MS = 1e6
NORMAL = {"data": 1.0, "forward": 4.0, "backward": 8.0, "optimizer": 2.0, "host": 1.0}  # 16 ms


def mix_of(*tables: StepTable) -> StepMix:
    mix = StepMix()
    for each in tables:
        mix.add_steps(each)
    return mix


def classes(steps: Sequence[dict[str, Any]], **how: Any) -> StepClasses:
    return classify_steps([mix_of(mixed_table(steps, **how))])


def loop(count: int, **others: dict[str, Any]) -> list[dict[str, Any]]:
    """Return normal steps and some others.

    `others` maps "everyN" to the steps that replace every Nth one.
    """
    steps = []
    for number in range(count):
        step = dict(NORMAL)
        for every, other in others.items():
            if number % int(every.removeprefix("every")) == int(every.removeprefix("every")) - 1:
                step = {**NORMAL, **other}
        steps.append(step)
    return steps


def test_parts_of_the_typical_step_add_up_to_its_duration() -> None:
    """The typical step is close to the median, with any noise."""
    found = classes(loop(500), noise=0.1)
    assert found.typical is not None
    assert sum(found.typical.account.parts_ns.values()) == pytest.approx(
        found.typical.duration_ns, rel=1e-9
    )
    assert found.typical.duration_ns == pytest.approx(16 * MS, rel=0.02)
    assert found.typical.account.parts_ns["backward"] == pytest.approx(8 * MS, rel=0.02)
    assert (found.count, found.long) == (500, ())


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
def test_single_long_step_does_not_change_the_typical_step(noise: float) -> None:
    usual = classes(loop(60), noise=noise).typical
    odd = classes([*loop(59), {**NORMAL, "host": 5000.0}], noise=noise)

    assert usual is not None
    assert odd.typical is not None
    assert odd.typical.duration_ns == pytest.approx(usual.duration_ns, rel=0.02)
    assert odd.typical.account.parts_ns["host"] == pytest.approx(1 * MS, rel=0.1)
    (long,) = odd.long
    assert (long.kinds, long.part, long.count, long.steps, long.period) == (
        (),
        "host",
        1,
        (59,),
        None,
    )


@pytest.mark.parametrize(
    ("flag", "kind"),
    [
        (Flag.EVALUATION | Flag.EVALUATED, "evaluation"),
        (Flag.EVALUATION, WITHOUT_GRADIENTS),
        (Flag.CHECKPOINT, "saving"),
        (Flag.COMPILED, "compilation"),
        (Flag.CAPTURED, "capture"),
        (Flag.COLLECTED, "garbage collection"),
    ],
)
def test_flagged_long_steps_are_a_class_with_their_cost(flag: Flag, kind: str) -> None:
    """A class has its count, typical excess, longest part and total cost."""
    found = classes(loop(200, every50={"host": 201.0, "flags": flag}), noise=0.02)
    (long,) = found.long

    assert (long.kinds, long.part, long.count, long.period) == ((kind,), "host", 4, 50)
    assert long.steps == (49, 99, 149, 199)
    assert long.more_ns == pytest.approx(200 * MS, rel=0.05)
    assert long.total_ns == pytest.approx(4 * long.more_ns)
    assert found.total_ns == pytest.approx((200 * 16 + 800) * MS, rel=0.05)


def test_steps_with_several_flags_are_one_class() -> None:
    """An evaluation followed by saving is one class.

    A flag with little effect is not in its name.
    """
    flags = Flag.EVALUATION | Flag.EVALUATED | Flag.CHECKPOINT
    found = classes(
        [
            *loop(40),
            {**NORMAL, "host": 90.0, "flags": flags},
            {**NORMAL, "host": 90.0, "flags": flags | Flag.SAMPLED},
        ]
    )
    (long,) = found.long

    assert (long.kinds, long.count) == (("evaluation", "saving"), 2)


def test_flagged_steps_of_usual_duration_are_no_class() -> None:
    assert classes(loop(100, every16={"flags": Flag.SAMPLED})).long == ()


@pytest.mark.parametrize(
    "part", ["data", "forward", "backward", "optimizer", "communication", "host"]
)
def test_long_steps_without_flags_are_named_by_their_longer_part(part: str) -> None:
    (long,) = classes(loop(120, every30={part: 100.0}), noise=0.03).long
    assert (long.kinds, long.part, long.count, long.period) == ((), part, 4, 30)


def test_long_steps_with_different_longer_parts_are_separate_classes() -> None:
    """The most expensive class comes first."""
    found = classes(loop(210, every10={"data": 61.0}, every70={"host": 201.0}))
    assert [(each.part, each.count) for each in found.long] == [("data", 18), ("host", 3)]
    assert [each.total_ns for each in found.long] == pytest.approx([18 * 60 * MS, 3 * 200 * MS])


@pytest.mark.parametrize(
    "numbers", [(7, 8, 30, 77), (59, 62, 65, 68)], ids=["irregular", "for a while"]
)
def test_class_of_steps_that_do_not_recur_until_the_end_has_no_period(
    numbers: tuple[int, ...],
) -> None:
    """The class has the count and the numbers of the steps."""
    steps = loop(120)
    for number in numbers:
        steps[number] = {**NORMAL, "host": 300.0}
    (long,) = classes(steps).long
    assert (long.steps, long.period) == (numbers, None)


def test_more_work_in_every_fourth_step_is_a_class_with_a_period() -> None:
    """Most steps are typical."""
    found = classes(loop(400, every4={"backward": 30.0}), noise=0.05)
    assert found.typical is not None
    assert found.typical.duration_ns == pytest.approx(16 * MS, rel=0.05)
    assert [(each.part, each.count, each.period) for each in found.long] == [("backward", 100, 4)]


def test_steps_of_evenly_spread_durations_are_one_class() -> None:
    """The steps take from 10 to 40 ms, equally often. No step is left out as too long."""
    rng = np.random.default_rng(1)
    found = classes([{"forward": each} for each in rng.uniform(10, 40, 600)])
    assert found.long == ()
    assert found.typical is not None
    assert found.typical.duration_ns == pytest.approx(25 * MS, rel=0.05)


def test_inference_steps_are_typical_if_there_are_no_others() -> None:
    """In a training run, inference is a separate class with a name."""
    inference = {"forward": 2.0, "flags": Flag.INFERENCE}
    alone = classes([dict(inference) for _ in range(50)])
    assert alone.typical is not None
    assert (alone.typical.count, alone.long) == (50, ())
    before = classes([*[{"forward": 90.0, "flags": Flag.INFERENCE}] * 5, *loop(50)])
    assert [each.kinds for each in before.long] == [("inference",)]


class TestKindsOfSteps:
    """Classes of steps that differ in kind, whichever class is the largest."""

    @pytest.mark.parametrize("short", range(42, 61))
    def test_two_kinds_of_steps_are_found_for_any_ratio(self, short: int) -> None:
        """One step more or less of a kind does not change the typical step."""
        found = classes([*[{"forward": 20.0}] * short, *[{"forward": 60.0}] * (100 - short)])
        assert found.typical is not None
        assert (found.typical.count, round(found.typical.duration_ns / MS)) == (short, 20)
        assert [(each.count, round(each.more_ns / MS)) for each in found.long] == [
            (100 - short, 40)
        ]
        assert found.short == ()

    @pytest.mark.parametrize("steps", [126, 127, 128])
    def test_classes_of_alternating_steps_are_the_same_for_any_last_step(self, steps: int) -> None:
        """An actor is trained in every second step."""
        found = classes(
            [{"forward": 9.0, "optimizer": 18.0 * (number % 2)} for number in range(steps)]
        )
        (long,) = found.long
        assert (long.period, long.part, round(long.more_ns / MS)) == (2, "optimizer", 18)

    def test_less_frequent_shorter_steps_are_a_class(self) -> None:
        """A warm cache or short sequences make some steps shorter."""
        found = classes([*[{"forward": 60.0}] * 80, *[{"forward": 20.0}] * 20])
        (short,) = found.short
        assert (
            short.count,
            short.part,
            round(short.more_ns / MS),
            round(short.duration_ns / MS),
        ) == (
            20,
            "forward",
            -40,
            20,
        )
        assert (found.typical and found.typical.count, found.long) == (80, ())

    def test_three_step_durations_are_three_classes(self) -> None:
        """Sequence lengths in three buckets give three durations."""
        found = classes([{"forward": 10.0 * 3 ** (number % 3)} for number in range(90)])
        assert found.typical is not None
        assert (found.typical.count, round(found.typical.duration_ns / MS)) == (30, 10)
        assert sorted((each.count, round(each.duration_ns / MS)) for each in found.long) == [
            (30, 30),
            (30, 90),
        ]

    def test_flagged_steps_of_usual_duration_count_in_the_typical_class(self) -> None:
        found = classes(loop(100, every10={"flags": Flag.EVALUATION}))
        assert (found.typical and found.typical.count, found.long, found.short) == (100, (), ())

    def test_ranks_of_different_speed_make_no_separate_classes(self) -> None:
        """Each rank's steps are compared with its own typical step."""
        fast, slow = ([{"forward": each}] * 60 for each in (20.0, 60.0))
        found = classify_steps([mix_of(mixed_table(steps)) for steps in (fast, slow)])
        assert (found.typical and found.typical.count, found.long, found.short) == (60, (), ())


class TestDurationsWithinAClass:
    """Classes whose mean duration describes all their steps."""

    @pytest.mark.parametrize(
        "flags", [0, Flag.EVALUATION, Flag.CHECKPOINT, Flag.EVALUATION | Flag.COMPILED]
    )
    def test_one_huge_step_is_not_averaged_with_others_of_its_kind(self, flags: int) -> None:
        """One step takes 45 s, and another of the same kind 100 ms."""
        steps = loop(300)
        steps[130] = {**NORMAL, "host": 100.0, "flags": flags}
        steps[250] = {**NORMAL, "host": 45_000.0, "flags": flags}
        found = classes(steps)
        assert [(each.count, each.steps) for each in found.long] == [(1, (250,)), (1, (130,))]
        assert found.long[0].more_ns == pytest.approx(45_000 * MS, rel=0.01)

    def test_huge_step_is_a_class_if_others_with_its_flag_are_short(self) -> None:
        """Other steps with the long step's flag are as short as typical steps."""
        steps = loop(300, every50={"flags": Flag.EVALUATION})
        steps[149] = {**NORMAL, "host": 45_000.0, "flags": Flag.EVALUATION}
        (long,) = classes(steps).long
        assert (long.count, long.steps) == (1, (149,))

    def test_long_waits_are_not_averaged_with_short_ones(self) -> None:
        """All ranks wait once for 45 s, and sometimes for 60 ms."""
        waits = loop(200, every40={"communication": 60.0})
        waits[120] = {**NORMAL, "communication": 45_000.0}
        found = classify_steps([mix_of(mixed_table(waits)) for _ in range(2)])
        assert [(each.count, each.steps[0]) for each in found.long] == [(1, 120), (5, 39)]

    def test_evaluations_of_similar_duration_are_one_class(self) -> None:
        """The evaluations take from 0.5 to 1.2 s."""
        steps = loop(400)
        for number, ms in zip(range(20, 400, 40), np.linspace(500, 1200, 10), strict=True):
            steps[number] = {**NORMAL, "host": float(ms), "flags": Flag.EVALUATION}
        (long,) = classes(steps).long
        assert long.count == 10

    @pytest.mark.parametrize("flags", [Flag.EVALUATION, Flag.EVALUATION | Flag.CHECKPOINT])
    def test_slow_evaluations_at_irregular_steps_are_no_separate_class(self, flags: int) -> None:
        steps = loop(400, every20={"host": 500.0, "flags": flags})
        for number in (59, 259, 299):
            steps[number]["host"] = 1_400.0
        (long,) = classes(steps).long
        assert (long.count, long.period) == (20, 20)

    def test_evaluations_of_irregular_durations_are_one_class(self) -> None:
        """Other programs may keep a machine busy for a while."""
        sizes = np.linspace(600, 1_700, 14)
        steps = loop(260)
        for place, number in enumerate(range(19, 260, 16)):
            host = float(sizes[place - 2]) if place >= 2 else 3_000.0
            steps[number] = {**NORMAL, "host": host, "flags": Flag.EVALUATION}
        (long,) = classes(steps).long
        assert (long.count, long.period) == (len(range(19, 260, 16)), 16)

    def test_few_evaluations_with_a_common_period_are_one_class(self) -> None:
        steps = loop(80)
        for number, host in ((19, 4_900.0), (39, 1_600.0), (59, 1_650.0)):
            steps[number] = {**NORMAL, "host": host, "flags": Flag.EVALUATION}
        (long,) = classes(steps).long
        assert (long.count, long.period) == (3, 20)

    def test_longer_evaluations_at_regular_steps_are_a_separate_class(self) -> None:
        steps = loop(800, every20={"host": 500.0, "flags": Flag.EVALUATION})
        for number in range(159, 800, 160):
            steps[number]["host"] = 1_400.0
        assert sorted((each.count, each.period) for each in classes(steps).long) == [
            (5, 160),
            (35, 20),
        ]

    def test_much_slower_steps_of_unknown_kind_are_a_separate_class(self) -> None:
        steps = loop(400, every20={"host": 500.0})
        for number in (59, 259, 299):
            steps[number]["host"] = 1_400.0
        assert sorted(each.count for each in classes(steps).long) == [3, 17]


class TestCauses:
    """Causes of long steps: the extra time must be in the affected part and plausibly long."""

    @pytest.mark.parametrize("part", ["data", "host", "optimizer", "communication"])
    def test_stall_outside_sampled_parts_is_not_blamed_on_sampling(self, part: str) -> None:
        """The same stall in every 16th step, one of which is sampled, is one class."""
        steps = loop(64)
        for number in (8, 24, 40, 56):
            steps[number] = {**NORMAL, part: 100.0, "flags": Flag.SAMPLED if number == 8 else 0}
        (long,) = classes(steps).long
        assert (long.kinds, long.part, long.steps) == ((), part, (8, 24, 40, 56))

    def test_sampled_steps_with_longer_backward_passes_are_a_class(self) -> None:
        """All sampled steps have longer backward passes."""
        (long,) = classes(loop(128, every16={"backward": 16.0, "flags": Flag.SAMPLED})).long
        assert (long.kinds, long.count) == (("sampled backward pass",), 8)

    @pytest.mark.parametrize("more", [16.0, 500.0])
    def test_stall_in_one_sampled_backward_pass_is_not_blamed_on_sampling(
        self, more: float
    ) -> None:
        """The extra time is not caused by sampling, because other sampled steps are shorter."""
        steps = loop(128, every16={"flags": Flag.SAMPLED})
        steps[31] = {**NORMAL, "backward": 8.0 + more, "flags": Flag.SAMPLED}
        (long,) = classes(steps).long
        assert (long.kinds, long.part) == ((), "backward")

    @pytest.mark.parametrize(
        ("flag", "part"),
        [
            (Flag.CHECKPOINT, "data"), (Flag.CHECKPOINT, "forward"), (Flag.COMPILED, "data"),
            (Flag.COMPILED, "communication"), (Flag.EVALUATION, "backward"), (Flag.EVALUATION, "optimizer"),
            (Flag.COLLECTED, "communication"), (Flag.SKIPPED, "host"), (Flag.COLLECTED, "tool"),
        ],
    )  # fmt: skip
    def test_extra_time_in_an_unaffected_part_has_no_cause(self, flag: Flag, part: str) -> None:
        """The flagged work does not happen in the part with the extra time."""
        (long,) = classes(loop(120, every30={part: 100.0, "flags": flag})).long
        assert (long.kinds, long.part) == ((), part)

    @pytest.mark.parametrize(
        ("flag", "kinds"),
        [(Flag.SAMPLED, ()), (Flag.EVALUATION, ()), (Flag.SKIPPED, ("skipped update",))],
    )
    def test_additional_work_is_not_the_cause_of_shorter_steps(
        self, flag: Flag, kinds: tuple[str, ...]
    ) -> None:
        (short,) = classes(
            loop(120, every30={"forward": 0.0, "backward": 1.0, "flags": flag})
        ).short
        assert short.kinds == kinds

    @pytest.mark.parametrize(
        ("flag", "measured_ms", "kinds"),
        [
            (Flag.COLLECTED, 1.0, ()), (Flag.COLLECTED, 80.0, ("garbage collection",)),
            (Flag.CHECKPOINT, 2.0, ()), (Flag.CHECKPOINT, 80.0, ("saving",)),
            (Flag.CHECKPOINT, 0.0, ("saving",)),
        ],
    )  # fmt: skip
    def test_flag_is_the_cause_only_if_its_measured_time_explains_the_excess(
        self, flag: Flag, measured_ms: float, kinds: tuple[str, ...]
    ) -> None:
        """Saving without torch.save() is not measured."""
        table = mixed_table(loop(120, every30={"host": 101.0, "flags": flag}))
        explained = np.zeros((len(table), len(MEASURED)), np.int64)
        explained[(table.flags & flag) != 0, list(MEASURED).index(flag)] = int(measured_ms * MS)
        mix = StepMix()
        mix.add_steps(table, explained)
        (long,) = classify_steps([save_and_load(mix)]).long
        assert long.kinds == kinds


class TestLackOfCpu:
    def test_lack_of_a_cpu_is_counted_for_each_part_of_the_typical_step(self) -> None:
        found = classes([{**NORMAL, "forward": 24.0, "cpu": 20.0} for _ in range(30)])
        assert found.typical is not None
        assert found.typical.account.is_measured
        assert found.typical.account.sum_ns(["forward"], [CPU]) == pytest.approx(20 * MS)
        assert found.typical.account.parts_ns["forward"] == pytest.approx(24 * MS)

    def test_lack_of_a_cpu_is_unknown_if_fewer_than_half_of_the_steps_measured_it(self) -> None:
        found = classes([*[{**NORMAL, "cpu": 1.0}] * 10, *loop(30)])
        assert found.typical is not None
        assert not found.typical.account.is_measured

    def test_class_of_long_steps_is_named_after_their_lack_of_a_cpu(self) -> None:
        """The class is named after the lack of a CPU, not after the part in which it occurred."""
        steps = [{**NORMAL, "cpu": 0.0} for _ in range(60)]
        steps[20] = {**NORMAL, "forward": 204.0, "cpu": 200.0}
        (long,) = classes(steps).long
        assert long.part == LACK_OF_CPU

    def test_work_that_grew_with_its_waits_for_a_cpu_is_named_by_its_part(self) -> None:
        """All forward passes run for a sixth of their time; one of them does eight times the work."""
        steps = [{**NORMAL, "forward": 24.0, "cpu": 20.0} for _ in range(60)]
        steps[20] = {**NORMAL, "forward": 192.0, "cpu": 160.0}
        (long,) = classes(steps).long
        assert (long.kinds, long.part) == ((), "forward")

    @pytest.mark.parametrize(
        ("flag", "kinds"),
        [(Flag.COLLECTED, ("garbage collection",)), (Flag.CHECKPOINT, ("saving",))],
    )
    def test_work_that_waits_for_a_cpu_is_the_cause(
        self, flag: Flag, kinds: tuple[str, ...]
    ) -> None:
        """The work ran for 20 of 200 ms, and waited for a CPU in the rest."""
        steps = [{**NORMAL, "cpu": 0.0} for _ in range(60)]
        busy = {"host": 201.0, "cpu": 180.0, "cpu_in": "host", "flags": flag}
        for step in (20, 40):
            steps[step] = {**NORMAL, **busy}
        (long,) = classes(steps).long
        assert (long.kinds, long.part) == (kinds, "host")

    def test_work_elsewhere_is_not_the_cause_of_waits_for_a_cpu(self) -> None:
        steps = [{**NORMAL, "cpu": 0.0} for _ in range(60)]
        for step in (20, 40):
            steps[step] = {**NORMAL, "backward": 208.0, "cpu": 190.0, "cpu_in": "backward"}
            steps[step] |= {"flags": Flag.CHECKPOINT}
        (long,) = classes(steps).long
        assert (long.kinds, long.part) == ((), LACK_OF_CPU)


class TestSeveralRanks:
    def test_step_counts_of_classes_are_those_of_one_rank(self) -> None:
        """All ranks make each step together, so the ranks' counts must not be added up."""
        one = loop(100, every25={"host": 101.0, "flags": Flag.EVALUATION})
        (alone,) = classes(one).long
        together = classify_steps([mix_of(mixed_table(one)) for _ in range(4)])
        (long,) = together.long
        assert (together.count, long.count, long.period) == (100, alone.count, 25)
        assert long.total_ns == pytest.approx(alone.total_ns)

    def test_wait_for_one_ranks_evaluation_is_one_class_with_its_cause(self) -> None:
        """The other ranks wait in communication while one rank evaluates."""
        evaluates = loop(100, every25={"host": 101.0, "flags": Flag.EVALUATION | Flag.EVALUATED})
        waits = loop(100, every25={"communication": 100.0})
        (long,) = classify_steps(
            [mix_of(mixed_table(steps)) for steps in (evaluates, waits, waits)]
        ).long
        assert (long.kinds, long.part, long.count, long.period) == (("evaluation",), "host", 4, 25)

    def test_one_evaluation_is_one_class_although_ranks_differ_in_longer_parts(self) -> None:
        """On a busy machine, one rank has a longer forward pass, and another one more host code or
        lack of a CPU.
        """
        flags, ranks = int(Flag.EVALUATION), []
        for longer in ({"forward": 900.0}, {"host": 950.0}, {"forward": 800.0, "cpu": 780.0}):
            steps = [{**NORMAL, "cpu": 0.0} for _ in range(60)]
            for step in (20, 40):
                steps[step] = {**steps[step], **longer, "flags": flags}
            ranks.append(mix_of(mixed_table(steps)))
        (long,) = classify_steps(ranks).long

        assert (long.kinds, long.count, long.steps) == ((WITHOUT_GRADIENTS,), 2, (20, 40))
        assert long.part == "forward"

    def test_wait_without_a_known_cause_is_shown_as_communication(self) -> None:
        waits = loop(100, every25={"communication": 100.0})
        (long,) = classify_steps([mix_of(mixed_table(waits)), mix_of(mixed_table(waits))]).long
        assert (long.kinds, long.part, long.count) == ((), "communication", 4)


def test_mix_without_steps_has_no_classes() -> None:
    assert (
        classify_steps([]) == classify_steps([StepMix()]) == StepClasses(0, 0.0, None, 0.0, (), ())
    )


def spread_of(found: StepClasses, table: StepTable) -> float:
    """Return the largest difference in duration between steps of the typical class."""
    assert found.typical is not None
    apart = {step for each in (*found.long, *found.short) for step in each.steps}
    alike = [
        each
        for step, each in zip(table.step.tolist(), table.duration_ns.tolist(), strict=True)
        if step not in apart
    ]
    return max(0.25 * found.typical.duration_ns, max(alike) - found.typical.duration_ns)


steps_of_any_kind = st.lists(
    st.fixed_dictionaries(
        {
            part: st.floats(0.0, 500.0)
            for part in ("data", "forward", "backward", "host", "communication")
        },
        optional={"flags": st.sampled_from([0, *Flag]), "cpu": st.floats(0.0, 50.0)},
    ),
    min_size=1,
    max_size=80,
)


@given(steps_of_any_kind, st.integers(1, 79))
def test_mix_of_two_pieces_equals_a_mix_of_all_steps(steps: list[dict[str, Any]], cut: int) -> None:
    """Steps are added in two pieces, with a file in between, or at once."""
    whole = mix_of(mixed_table(steps))
    pieces = save_and_load(mix_of(mixed_table(steps[:cut])))
    pieces.add_steps(mixed_table(steps[cut:], first_step=cut))

    expected, found = classify_steps([whole]), classify_steps([pieces])
    assert found.count == expected.count
    assert found.total_ns == pytest.approx(expected.total_ns)
    assert [dataclasses.astuple(each)[:3] for each in found.long] == [
        dataclasses.astuple(each)[:3] for each in expected.long
    ]


@given(steps_of_any_kind)
def test_counts_and_times_of_classes_add_up_to_those_of_all_steps(
    steps: list[dict[str, Any]],
) -> None:
    """The parts of the typical step also add up to its duration."""
    given_table = mixed_table(steps)
    found = classes(steps)
    typical = found.typical
    assert typical is not None
    assert sum(typical.account.parts_ns.values()) == pytest.approx(
        typical.duration_ns, rel=1e-6, abs=100
    )
    assert (
        given_table.duration_ns.min() - 1
        <= typical.duration_ns
        <= given_table.duration_ns.max() + 1
    )
    assert found.total_ns == pytest.approx(given_table.duration_ns.sum())
    others = [*found.long, *found.short]
    assert typical.count + sum(each.count for each in others) == found.count == len(steps)
    time_ns = typical.count * found.alike_mean_ns + sum(
        each.count * each.duration_ns for each in others
    )
    assert time_ns == pytest.approx(found.total_ns)
    assert sum(each.total_ns for each in found.long) <= found.total_ns * (1 + 1e-9)
    assert all(each.more_ns < 0 for each in found.short)
    assert all(each.more_ns > 0 for each in found.long)
    for each in others:
        assert each.more_ns == pytest.approx(
            each.duration_ns - typical.duration_ns, rel=1e-6, abs=100
        )
        durations_ns = given_table.duration_ns[list(each.steps)] - typical.duration_ns
        # The steps of a class have similar additional times, so their mean describes each of them.
        if len(each.steps) == each.count > 1:
            assert np.abs(durations_ns).max() <= 4.2 * max(
                np.abs(durations_ns).min(), spread_of(found, given_table)
            )
        assert len(set(each.steps)) == len(each.steps) <= each.count
        longer = given_table.duration_ns[list(each.steps)].mean() - typical.duration_ns
        if len(each.steps) == each.count:
            assert each.more_ns == pytest.approx(longer, rel=1e-6, abs=100)


def test_number_of_histogram_bins_is_limited() -> None:
    rng = np.random.default_rng(0)
    mix = StepMix()
    for first in range(0, 40_000, 20_000):
        durations = np.exp(rng.uniform(0, 22, 20_000)) / 1e6
        mix.add_steps(
            mixed_table(
                [{"forward": each, "flags": 1 << int(rng.integers(7, 16))} for each in durations],
                first,
            )
        )
    assert len(encode_json(mix)) < 150_000
    assert classify_steps([mix]).count == 40_000
