"""Step bins: means over as many steps as take 20 milliseconds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tables import MS, step_table
from torchlens_perf.analysis.statistics.step_bins import (
    OTHER_WORK,
    BinBatch,
    StepBinner,
    choose_row_width,
)
from torchlens_perf.run.records import OWN_PARTS, PARTS, StepTable
from torchlens_perf.run.ring import Flag

STEP = {
    "data": 1.0,
    "forward": 4.0,
    "backward": 6.0,
    "communication": 2.0,
    "host": 1.0,
    "tool": 0.5,
}


def cut(table: StepTable, first: int, end: int) -> StepTable:
    return StepTable(
        **{
            field.name: getattr(table, field.name)[first:end]
            for field in dataclasses.fields(StepTable)
        }
    )


def first_steps(rows: BinBatch) -> list[int]:
    first: list[int] = (rows.key[0] * rows.width).tolist()
    return first


def collected(maker: StepBinner, tables: list[StepTable]) -> dict[str, np.ndarray]:
    """Return all bins, including the last one, as one array per field."""
    made = [
        rows
        for rows in (*map(maker.add_steps, tables), maker.pop_incomplete_row())
        if rows is not None
    ]
    fields = [
        field.name for field in dataclasses.fields(BinBatch) if field.name not in ("width", "ranks")
    ]
    return {name: np.concatenate([getattr(rows, name) for rows in made], axis=1) for name in fields}


@pytest.mark.parametrize(
    ("step_ns", "width"),
    [
        (1e3, 1024),
        (19.6e3, 1024),
        (19.5e6, 2),
        (20e6, 1),
        (5e6, 4),
        (4.9e6, 8),
        (1e9, 1),
        (0.0, 1024),
    ],
)
def test_bin_width_is_the_smallest_power_of_two_that_makes_20_ms(
    step_ns: float, width: int
) -> None:
    """A bin has at most 1024 steps."""
    assert choose_row_width(step_ns) == width
    assert choose_row_width(step_ns, 0) == 1


def test_bin_width_is_chosen_from_the_median_of_the_first_steps() -> None:
    """The median is that of eight steps, so a first step that compiles, or a stall, makes no
    difference.
    """
    table = step_table([{"host": 60_000}] * 2 + [{"host": 5}] * 4 + [{"host": 9_000}] * 2)
    maker = StepBinner()

    assert maker.add_steps(cut(table, 0, 7)) is None
    assert maker.width == 0
    rows = maker.add_steps(cut(table, 7, 8))
    assert rows is not None
    assert (maker.width, first_steps(rows)) == (4, [0, 4])


def test_bin_values_are_means_per_step() -> None:
    """Bins have duration, work by part and waiting.

    Communication and this package's time are not work.
    """
    table = step_table([{**STEP, "forward": 4.0 + step} for step in range(8)])
    rows = StepBinner(4).add_steps(table)

    assert rows is not None
    assert (rows.width, first_steps(rows)) == (4, [0, 4])
    assert rows.parts_ns.shape == (1, 2, len(OWN_PARTS))
    assert rows.parts_ns[0, :, OWN_PARTS.index("forward")] == pytest.approx([5.5 * MS, 9.5 * MS])
    assert rows.parts_ns[0].sum(axis=1) == pytest.approx([13.5 * MS, 17.5 * MS])
    assert rows.duration_ns[0] == pytest.approx([16 * MS, 20 * MS])
    assert rows.wait_ns[0] == pytest.approx([2 * MS, 2 * MS])
    assert np.isnan(rows.ready_ns).all()
    assert np.isnan(rows.workload).all()


def test_time_without_a_cpu_is_not_work() -> None:
    """Time without a CPU is subtracted from its part and stored separately.

    If a rank lacks a CPU while it waits for other ranks, that time is not stored.
    """
    ready_ns = np.zeros((4, len(PARTS)), np.int64)
    ready_ns[:, PARTS.index("forward")] = 3 * MS
    ready_ns[:, PARTS.index("communication")] = 2 * MS
    # The time without a CPU is longer than the part, because the clocks differ.
    ready_ns[:, PARTS.index("host")] = 50 * MS
    rows = StepBinner(4).add_steps(dataclasses.replace(step_table([STEP] * 4), ready_ns=ready_ns))

    assert rows is not None
    assert rows.parts_ns[0, 0] == pytest.approx([1 * MS, 1 * MS, 0, 6 * MS, 0, 0])
    assert rows.ready_ns[0] == pytest.approx([4 * MS])


def test_value_unknown_for_one_step_is_unknown_for_its_bin() -> None:
    """Time without a CPU and workload may be unknown. Work is always known."""
    table = step_table([STEP] * 8)
    ready_ns = np.full((8, len(PARTS)), 1000)
    ready_ns[1] = -1
    rows = StepBinner(4).add_steps(
        dataclasses.replace(table, ready_ns=ready_ns, workload=np.array([5, 7, 5, 7, 1, 1, -1, 1]))
    )

    assert rows is not None
    assert np.isnan(rows.ready_ns[0]).tolist() == [True, False]
    assert rows.workload[0, 0] == 6
    assert np.isnan(rows.workload[0, 1])
    assert np.isfinite(rows.parts_ns).all()


def test_bin_is_the_mean_of_its_steps_without_other_work() -> None:
    """A bin is excluded only if all its steps have other work, such as an evaluation."""
    flags = np.array(
        [0, int(Flag.SAMPLED), 0, 0, *[int(Flag.EVALUATION)] * 4, 0, int(Flag.COLLECTED), 0, 0]
    )
    times = [
        {"forward": 900.0 if 0 < flag < 1 << 30 and flag & OTHER_WORK else 4.0}
        for flag in flags.tolist()
    ]
    rows = StepBinner(4).add_steps(dataclasses.replace(step_table(times), flags=flags))

    assert rows is not None
    assert first_steps(rows) == [0, 4, 8]
    assert rows.flags[0].tolist() == [0, Flag.EVALUATION, Flag.COLLECTED]
    assert (rows.parts_ns[0].sum(axis=1) / MS).tolist() == [4, 900, 4]
    single = StepBinner(1).add_steps(dataclasses.replace(step_table(times), flags=flags))
    assert single is not None
    assert single.flags[0].tolist() == flags.tolist()


def test_bin_width_does_not_depend_on_how_many_steps_come_at_once() -> None:
    """A replay adds all steps at once and gets the same bins as the live run."""
    table = step_table([{"forward": 5.0 if step < 8 else 50.0} for step in range(64)])
    whole, live = StepBinner(), StepBinner()
    whole.add_steps(table)
    for step in range(64):
        live.add_steps(cut(table, step, step + 1))

    assert (whole.width, live.width) == (4, 4)


def test_bins_start_at_multiples_of_their_width() -> None:
    """Ranks whose recording started at different steps have the same bins.

    The first bin may have fewer steps.
    """
    rows = StepBinner(4).add_steps(
        step_table([{"host": step} for step in range(3, 12)], first_step=3)
    )

    assert rows is not None
    assert first_steps(rows) == [0, 4, 8]
    assert rows.duration_ns[0] == pytest.approx([3 * MS, 5.5 * MS, 9.5 * MS])


def test_incomplete_bin_is_returned_only_at_the_end() -> None:
    """A short run still has bins at its end."""
    empty = step_table([])
    assert (
        StepBinner().add_steps(empty),
        StepBinner(4).add_steps(empty),
        StepBinner().pop_incomplete_row(),
    ) == (
        None,
        None,
        None,
    )
    assert StepBinner(4).add_steps(step_table([STEP] * 3)) is None
    maker = StepBinner()
    assert maker.add_steps(step_table([STEP] * 5)) is None
    rows = maker.pop_incomplete_row()
    assert rows is not None
    assert (rows.width, first_steps(rows)) == (2, [0, 2, 4])
    assert maker.pop_incomplete_row() is None


@given(
    count=st.integers(8, 60),
    first=st.integers(0, 9),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    width=st.sampled_from([0, 1, 2, 8]),
    seed=st.integers(0, 1000),
)
def test_bins_are_the_same_however_steps_are_split_into_tables(
    count: int, first: int, cuts: list[int], width: int, seed: int
) -> None:
    """No step is lost or counted twice."""
    random = np.random.default_rng(seed)
    table = step_table(
        [{"forward": 5 + random.random(), "communication": 2} for _ in range(count)], first
    )
    table = dataclasses.replace(
        table, flags=random.integers(0, 4, count), workload=random.integers(0, 9, count)
    )
    # The first eight steps determine the bins' width, so these eight are added together.
    edges = sorted({8, *(each for each in cuts if 8 < each < count)})
    pieces = [
        cut(table, begin, end) for begin, end in zip([0, *edges], [*edges, count], strict=True)
    ]
    whole, split = (
        collected(StepBinner(width or 4), [table]),
        collected(StepBinner(width), pieces),
    )

    for name, values in whole.items():
        np.testing.assert_allclose(split[name], values, err_msg=name)
    steps_in_row = np.unique(table.step // (width or 4), return_counts=True)[1]
    assert (whole["duration_ns"] * steps_in_row).sum() == pytest.approx(table.duration_ns.sum())
