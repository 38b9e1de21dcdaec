"""Sums of steps in windows, compared with simple calculations, in any order and bounded memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from torchlens_perf.page.gather import step_grid
from torchlens_perf.page.gather.step_grid import StepGrid
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE

RANKS, FIRST, LAST = 3, 5, 104
Steps = dict[str, npt.NDArray[np.int64]]


def steps(seed: int = 0) -> Steps:
    """Return a hundred steps of each rank, in any order."""
    random = np.random.default_rng(seed)
    row, step = np.meshgrid(np.arange(RANKS), np.arange(FIRST, LAST + 1))
    count = row.size
    parts = random.integers(0, 10**6, (count, len(PARTS)))
    flags = np.zeros(count, np.int64)
    flags[step.ravel() == 40] = int(Flag.EVALUATION)
    batch = {
        "row": row.ravel(),
        "step": step.ravel(),
        "start_ns": (step.ravel() - FIRST) * 10**7,
        "duration_ns": parts.sum(axis=1) + 10**6,
        "work_ns": parts.sum(axis=1),
        "ready_ns": np.where(row.ravel() == 1, parts[:, 0], -1),
        "memory_bytes": random.integers(0, 10**9, count),
        "flags": flags,
        **{f"{part}_ns": parts[:, at] for at, part in enumerate(PARTS)},
    }
    return chosen(batch, random.permutation(count))


def chosen(batch: Steps, places: npt.NDArray[np.int64]) -> Steps:
    return {name: values[places] for name, values in batch.items()}


def grid_of(*batches: Steps, warm_from: int = 8) -> StepGrid:
    grid = StepGrid(range(RANKS), np.full(RANKS, warm_from), FIRST, LAST)
    for batch in batches:
        grid.add(batch)
    return grid


def test_each_cell_is_one_step_if_there_is_room() -> None:
    """Work includes only comparable steps."""
    batch = steps()
    later = np.arange(100, len(batch["row"]))
    grid = grid_of(chosen(batch, np.arange(100)), chosen(batch, later))

    assert grid.width == 1
    at = (batch["row"], batch["step"] - FIRST)
    assert (grid.sum_of("step_ns")[at] == batch["duration_ns"]).all()
    for part in PARTS:
        assert (grid.sum_of(f"host {part}")[at] == batch[f"{part}_ns"]).all()
    assert (grid.memory_bytes[at] == batch["memory_bytes"]).all()
    compared = (batch["step"] >= 8) & (batch["flags"] == 0)
    assert (grid.sum_of("compared")[at] == compared).all()
    assert (grid.sum_of("work_ns")[at] == np.where(compared, batch["work_ns"], 0)).all()
    assert (grid.single_ns == grid.sum_of("step_ns").max(axis=0)).all()
    assert (grid.flags == np.where(grid.first_steps == 40, int(Flag.EVALUATION), 0)).all()


def test_cpu_contention_is_a_share_of_measured_steps_or_nan() -> None:
    """The value is NaN if no step was measured."""
    grid = grid_of(steps())
    share = grid.mean("ready_ns", "ready_of_ns")

    assert np.isnan(share[[0, 2]]).all()
    assert (share[1] == grid.sum_of("ready_ns")[1] / grid.sum_of("step_ns")[1]).all()


def test_work_of_a_rank_is_by_the_clock_that_judges_it() -> None:
    """Both clocks have parts. The device's times change neither step times nor other ranks."""
    batch = steps()
    grid = StepGrid(range(RANKS), np.full(RANKS, 8), FIRST, LAST, by_device=[1])
    grid.add(batch)
    of_device = {**chosen(batch, np.flatnonzero(batch["row"] == 1))}
    of_device["work_ns"] = of_device["work_ns"] // 2
    grid.add(of_device, DEVICE)
    of_host = grid_of(batch)

    column = of_device["step"] - FIRST
    compared = (of_device["step"] >= 8) & (of_device["flags"] == 0)
    assert (grid.sum_of("work_ns")[1, column] == of_device["work_ns"] * compared).all()
    assert (grid.sum_of("work_ns")[[0, 2]] == of_host.sum_of("work_ns")[[0, 2]]).all()
    assert (grid.sum_of("step_ns") == of_host.sum_of("step_ns")).all()
    assert (grid.sum_of("device steps").sum(axis=1) == [0, 100, 0]).all()
    assert set(grid.mean_parts_s(DEVICE)) == set(PARTS)
    assert not of_host.mean_parts_s(DEVICE)


def test_widened_grid_equals_one_that_was_wide_from_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows of both grids begin at multiples of the width."""
    batch = steps()
    narrow = grid_of(batch)
    monkeypatch.setattr(step_grid, "MAX_COLUMNS", 60)
    wide = grid_of(batch)
    widened = narrow.widened()

    assert (wide.width, widened.width) == (2, 2)
    assert wide.first_steps.tolist() == widened.first_steps.tolist()
    assert wide.first_steps[0] % 2 == 0
    parts = [f"host {part}" for part in PARTS]
    for quantity in ("host steps", "compared", "step_ns", "work_ns", "ready_ns", *parts):
        assert (wide.sum_of(quantity) == widened.sum_of(quantity)).all(), quantity
        assert wide.sum_of(quantity).any()
    for name in ("memory_bytes", "start_ns", "flags", "longest_ns"):
        assert (getattr(wide, name) == getattr(widened, name)).all(), name
    assert wide.quantile_s(0.5).tolist() == widened.quantile_s(0.5).tolist()


def test_column_quantiles_are_those_of_all_its_steps() -> None:
    """A column includes the steps of all ranks. A quantile's error is at most one percent."""
    batch = steps()
    grid = grid_of(batch)
    while len(grid.flags) > 1:
        grid = grid.widened()

    for share in (0.05, 0.5, 0.95):
        expected = np.quantile(batch["duration_ns"], share, method="inverted_cdf") / 1e9
        assert abs(grid.quantile_s(share)[0] / expected - 1) < 0.01
    assert grid.longest_ns[0] == batch["duration_ns"].max()


def test_memory_is_bounded_by_ranks_and_columns() -> None:
    """A run of any length has at most MAX_CELLS cells and MAX_COLUMNS columns."""
    long = StepGrid(range(4), np.zeros(4, np.int64), 0, 10**9)
    many = StepGrid(range(4096), np.zeros(4096, np.int64), 0, 10**5)

    assert len(long.flags) <= step_grid.MAX_COLUMNS
    assert len(long.single_ns) < 10**7
    assert many.start_ns.size <= step_grid.MAX_CELLS


def test_steps_beyond_the_range_of_the_grid_are_left_out() -> None:
    """A live run continues while it is read. Newer steps are in the next page."""
    batch = steps()
    later = {**batch, "step": batch["step"] + 1000}
    grid = grid_of(batch, later)

    assert grid.sum_of("host steps").sum() == len(batch["row"])


def test_steps_beyond_the_range_in_the_last_column_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_grid, "MAX_COLUMNS", 10)
    batch = steps()
    later = {**batch, "step": batch["step"] + 1}

    assert grid_of(later).sum_of("host steps").sum() == len(batch["row"]) - RANKS
