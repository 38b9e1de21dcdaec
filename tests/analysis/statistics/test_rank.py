"""Statistics of a rank and its history in windows of steps."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.saved import save_and_load
from tests.support.tables import MS, mixed_table, records, step_table
from torchlens_perf.analysis.statistics.rank import (
    FIRST_WINDOW_STEPS,
    MAX_WINDOWS,
    WARM_UP_STEPS,
    RankStatistics,
    WindowHistory,
)
from torchlens_perf.run.records import PARTS, StepTable
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.verdicts.node_state import encode_json

NO_RECORDS = records([])


def test_windows_are_medians_of_aligned_steps() -> None:
    """A window begins at a multiple of its width. Outliers do not change its medians."""
    history = WindowHistory()
    steps = (
        [{"forward": 10}] * 7
        + [{"forward": 500}]
        + [{"forward": 20, "data": 2}] * 8
        + [{"forward": 1}]
    )
    history.add_steps(step_table(steps))
    windows = history.to_windows()

    assert windows.first_step.tolist() == [0, 8]
    assert windows.duration_ns.tolist() == [10 * MS, 22 * MS]
    assert windows.parts_ns[:, PARTS.index("data")].tolist() == [0, 2 * MS]


def test_window_in_progress_is_used_once_half_of_its_steps_exist() -> None:
    history = WindowHistory()
    history.add_steps(step_table([{"forward": 1}] * (FIRST_WINDOW_STEPS + 3)))
    assert len(history.to_windows().first_step) == 1
    history.add_steps(step_table([{"forward": 1}], first_step=FIRST_WINDOW_STEPS + 3))
    assert len(history.to_windows().first_step) == 2


@pytest.mark.parametrize("flag", [Flag.EVALUATION, Flag.SKIPPED, Flag.SAMPLED])
def test_steps_with_other_work_are_not_in_windows(flag: Flag) -> None:
    history = WindowHistory()
    history.add_steps(step_table([{"forward": 900}] * 4, flags=int(flag)))
    history.add_steps(step_table([{"forward": 10}] * 4, first_step=4))

    assert history.to_windows().duration_ns.tolist() == [10 * MS]


def test_number_of_windows_is_bounded_in_a_long_run() -> None:
    """Above the maximum number, neighbors are merged and the width doubles.

    Values stay the same.
    """
    history = WindowHistory()
    for first in range(0, 100_000, 1000):
        history.add_steps(step_table([{"forward": 10}] * 1000, first_step=first))
    windows = history.to_windows()

    assert len(windows.first_step) <= MAX_WINDOWS + 1
    assert windows.width == 256
    assert (windows.first_step % windows.width == 0).all()
    assert set(windows.duration_ns.tolist()) == {10.0 * MS}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 9))
def test_windows_are_the_same_however_steps_are_split_into_batches(
    durations: list[int], size: int
) -> None:
    """Steps are added one by one or in pieces of any size."""
    whole, pieces = WindowHistory(), WindowHistory()
    steps = mixed_table([{"forward": duration, "cpu": duration / 2} for duration in durations])
    whole.add_steps(steps)
    for first in range(0, len(steps), size):
        pieces.add_steps(steps.select_rows(slice(first, first + size)))

    assert encode_json(whole) == encode_json(pieces)


def test_warm_up_steps_are_counted_but_in_no_distribution() -> None:
    """Warm-up steps are in no distribution of steps, phases or modules."""
    statistics = RankStatistics()
    steps = step_table([{"forward": 500}] * WARM_UP_STEPS + [{"forward": 10}] * 5, first_step=20)
    rows = [(Kind.MODULE, 1, step, 9) for step in range(20, 20 + WARM_UP_STEPS + 5)]
    statistics.add_records(records(rows), steps, ["", "block"], lost=0)

    assert statistics.warm_up.max_ns == 500 * MS
    assert (statistics.step.count, statistics.step.max_ns) == (5, 10 * MS)
    assert statistics.parts["forward"].sum_ns == 50 * MS
    assert statistics.modules["block"].count == 5
    assert (statistics.counted_steps, statistics.records, statistics.coverage) == (
        WARM_UP_STEPS + 5,
        len(rows),
        1.0,
    )


def test_lost_steps_lower_the_coverage() -> None:
    statistics = RankStatistics()
    statistics.add_records(NO_RECORDS, step_table([{}] * 10), [], lost=0)
    statistics.add_records(NO_RECORDS, step_table([{}] * 5, first_step=15), [], lost=321)

    assert statistics.coverage == 15 / 20
    assert statistics.lost == 321


def test_modules_outside_normal_forward_passes_do_not_count() -> None:
    """Modules do not count in an evaluation, in recomputation, on another thread or in the
    warm-up.
    """
    statistics = RankStatistics()
    rows = [(Kind.MODULE, 1, step, 10 * step) for step in (1, 5, 6, 7)]
    rows += [
        (Kind.FORWARD, 0, 7, 200),
        (Kind.MODULE, 1, 8, 3),
        (Kind.RECOMPUTE, 0, 8, 5),
        (Kind.MODULE, 1, 8, 7),
    ]
    made = records([*rows, (Kind.FORWARD, 0, 8, 9)])
    made["flags"][1] = Flag.OTHER_THREAD
    flags = np.zeros(9, np.int64)
    flags[6] = Flag.EVALUATION
    statistics.add_records(
        made,
        dataclasses.replace(step_table([{}] * 9), flags=flags),
        ["forward Net", "block"],
        lost=0,
    )

    assert (statistics.modules["block"].count, statistics.modules["block"].sum_ns) == (2, 77)
    assert statistics.usual_steps == 5
    alike = statistics.sums_of_typical_steps()
    assert (alike.steps, alike.modules["block"], alike.forward_ns) == (5, 77, 209)


def test_mean_module_times_are_those_of_timed_steps() -> None:
    """Half of the steps have no times of modules. The model's own call is timed in all of them."""
    statistics, thinned = RankStatistics(), [step % 2 == 1 for step in range(43)]
    rows = []
    for step, without in enumerate(thinned):
        rows += [] if without else [(Kind.MODULE, 1, step, 6)]
        rows += [(Kind.FORWARD, 0, step, 10)]
    made = records(rows)
    made["nested_ns"] = np.where((made["kind"] == Kind.FORWARD) & (made["step"] % 2 == 0), 6, 0)
    flags = np.where(thinned, int(Flag.WITHOUT_MODULES), 0)
    table = dataclasses.replace(step_table([{"forward": 1}] * 43), flags=flags)
    statistics.add_records(made, table, ["forward Net", "block"], lost=0)

    assert (statistics.usual_steps, statistics.module_steps) == (40, 20)
    assert statistics.mean_module_times_ns() == {"block": 6, "Net": 4}
    alike = statistics.sums_of_typical_steps()
    assert (alike.modules, alike.forward_ns) == ({"block": 120, "Net": 80}, 200)
    assert len(statistics.mix.bins_by_flags()) == 1


@pytest.mark.parametrize("kind", [Kind.MODULE, Kind.SECTION])
@pytest.mark.parametrize(
    "in_steps", [(20,), (20, 21, 22, 23)], ids=["one outlier", "some outliers"]
)
def test_outliers_do_not_change_the_parts_of_a_typical_step(
    kind: Kind, in_steps: tuple[int, ...]
) -> None:
    """The longer steps spend their time in one module or section."""
    statistics, ms = RankStatistics(), 1_000_000
    for first in (0, 30):
        rows: list[tuple[int, int, int, int]] = []
        steps = []
        for step in range(first, first + 30):
            more_ms = 1000 if step in in_steps else 0
            rows += [
                (kind, 1, step, 6 * ms),
                (kind, 2, step, (2 + more_ms) * ms),
                (Kind.FORWARD, 0, step, ms),
            ]
            steps.append({"forward": 10 + more_ms})
        made = records(rows)
        statistics.add_records(
            made, step_table(steps, first_step=first), ["forward Net", "large", "small"], lost=0
        )

    alike = save_and_load(statistics).sums_of_typical_steps()
    found = alike.modules if kind == Kind.MODULE else alike.sections
    assert alike.steps == 57 - len(in_steps)
    assert (found["large"], found["small"]) == (6 * ms * alike.steps, 2 * ms * alike.steps)


def test_number_of_kept_step_durations_is_limited() -> None:
    """All steps have a duration, but only the durations of typical steps are kept."""
    statistics, rng = RankStatistics(), np.random.default_rng(0)
    for first in range(0, 2000, 100):
        durations = [
            {"forward": 10.0 if step % 2 else float(np.exp(rng.uniform(0, 14)))}
            for step in range(100)
        ]
        statistics.add_records(NO_RECORDS, step_table(durations, first_step=first), [], lost=0)
    assert len(statistics.by_length) <= 24
    assert statistics.sums_of_typical_steps().steps >= 900


def test_records_are_counted_by_kind_and_name() -> None:
    """Modules have their own time and the user's name.

    Unknown names are called unknown.
    """
    statistics = RankStatistics()
    made = records(
        [
            (Kind.MODULE, 1, 8, 60),
            (Kind.MODULE, 77, 8, 1),
            (Kind.FORWARD, 0, 8, 100),
            (Kind.MODULE_BACKWARD, 1, 8, 70),
            (Kind.SECTION, 2, 8, 5),
            (Kind.COLLECTIVE, 3, 8, 8),
            (Kind.COLLECTIVE, 3, 8, 8),
        ]
    )
    made["nested_ns"][2], made["value0"][5:7] = 60, 1000
    statistics.add_records(
        made, step_table([{}] * 9), ["forward Net", "block", "log", "allreduce group=0"], lost=0
    )

    assert {name: sketch.sum_ns for name, sketch in statistics.modules.items()} == {
        "Net": 40,
        "block": 60,
        "(unknown)": 1,
    }
    assert statistics.module_backwards["block"].sum_ns == 70
    assert statistics.sections["log"].sum_ns == 5
    assert set(statistics.sections) == {"log"}


def test_statistics_continue_unchanged_after_a_json_round_trip() -> None:
    first, second = (
        step_table([{"data": 3, "host": 1}] * 30, memory=5),
        step_table([{"data": 4}] * 2, first_step=30),
    )
    straight, again = RankStatistics(), RankStatistics()
    for statistics in (straight, again):
        statistics.add_records(records([(Kind.SECTION, 0, 7, 3)]), first, ["log"], lost=2)
    again = save_and_load(again)
    for statistics in (straight, again):
        statistics.add_records(NO_RECORDS, second, [], lost=0)

    left, right = (
        msgspec.json.decode(encode_json(straight)),
        msgspec.json.decode(encode_json(again)),
    )
    # After reading, a new window begins, and the steps of the unfinished one are a separate row.
    left.pop("history")
    right.pop("history")
    assert left == right
    assert np.array_equal(straight.step.counts, again.step.counts)


def flagged(table: StepTable, *steps: tuple[int, Flag]) -> StepTable:
    """Return the table with flags in some of its rows."""
    flags = table.flags.copy()
    for row, flag in steps:
        flags[row] |= int(flag)
    return dataclasses.replace(table, flags=flags)


def test_work_excludes_waits_and_time_without_a_cpu() -> None:
    """Work is the step without blocked time, and without time runnable without a CPU if that was
    measured.
    """
    table = step_table([{"forward": 10, "data": 4, "communication": 50}] * (WARM_UP_STEPS + 4))
    ready_ns = np.zeros_like(table.ready_ns)
    ready_ns[:, PARTS.index("forward")] = 3 * MS
    ready_ns[:, PARTS.index("communication")] = 40 * MS
    ready_ns[-2:] = -1
    # The time without a CPU is longer than its part, because it was read a moment too late.
    ready_ns[-3, PARTS.index("data")] = 9 * MS
    history = WindowHistory()
    history.add_steps(dataclasses.replace(table, ready_ns=ready_ns))
    windows = history.to_windows()

    assert windows.work_steps.tolist() == [4]
    assert windows.work_sum_ns.tolist() == [(11 + 7 + 14 + 14) * MS]


def test_host_code_of_warm_up_steps_is_unknown_until_a_model_is_found() -> None:
    steps = [{"host": 9.0, "backward": 3.0}] * 2 + [{"forward": 5.0, "host": 1.0}] * 3
    statistics = RankStatistics()
    statistics.add_records(records([]), mixed_table(steps), [], 0)

    assert statistics.warm_up_parts_ns["host"] == 1.0 * MS
    assert statistics.warm_up_parts_ns["backward"] == 6.0 * MS


def test_steps_with_other_work_and_warm_up_have_no_work() -> None:
    """Steps that compile, save or evaluate are not compared. Windows of such steps have a tag."""
    table = step_table([{"forward": 10}] * 24)
    tagged = [
        (4, Flag.COMPILED),
        (5, Flag.CHECKPOINT),
        *((row, Flag.EVALUATION) for row in range(8, 16)),
    ]
    history = WindowHistory()
    history.add_steps(flagged(table, *tagged, (20, Flag.COLLECTED)))
    windows = history.to_windows()

    assert windows.first_step.tolist() == [0, 16]
    assert windows.work_steps.tolist() == [8 - WARM_UP_STEPS - 2, 8]
    assert windows.tags == {0: Flag.COMPILED | Flag.CHECKPOINT, 8: Flag.EVALUATION}


def test_work_and_tags_of_windows_survive_merging_and_json() -> None:
    """A merged window has the sums, counts and tags of all its steps, also after a restart of the
    sidecar.
    """
    straight, restarted = WindowHistory(), WindowHistory()
    for first in range(0, 16_000, 1000):
        table = flagged(
            step_table([{"forward": 10}] * 1000, first_step=first), (3, Flag.CHECKPOINT)
        )
        for history in (straight, restarted):
            history.add_steps(table)
        restarted = save_and_load(restarted)
    left, right = straight.to_windows(), restarted.to_windows()

    # The window in progress starts again after a restart. Half of this window may be missing, but
    # no step counts twice.
    assert (
        left.first_step.tolist()
        == right.first_step.tolist()
        == sorted(set(right.first_step.tolist()))
    )
    assert left.work_sum_ns.sum() == (16_000 - WARM_UP_STEPS - 16) * 10 * MS
    assert np.array_equal(left.work_sum_ns / left.work_steps, right.work_sum_ns / right.work_steps)
    assert 0 <= left.work_steps.sum() - right.work_steps.sum() <= 16 * left.width
    assert left.tags == right.tags
    assert sorted(left.tags) == sorted(
        {(first + 3) // left.width * left.width for first in range(0, 16_000, 1000)}
    )


def test_number_of_step_tags_does_not_grow_with_the_run() -> None:
    """A run that evaluates in every step has no windows."""
    history = WindowHistory()
    for first in range(0, 20_000, 1000):
        history.add_steps(
            step_table([{"forward": 10}] * 1000, first_step=first, flags=int(Flag.EVALUATION))
        )
    windows = history.to_windows()

    assert len(windows.first_step) == 0
    assert MAX_WINDOWS / 2 < len(windows.tags) <= MAX_WINDOWS
    assert all(first % windows.width == 0 for first in windows.tags)
