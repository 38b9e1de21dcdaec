"""Windows of several ranks on one grid of columns."""

from __future__ import annotations

import numpy as np

from tests.support.tables import MS, mixed_table, step_table
from torchlens_perf.analysis.statistics.rank import WindowHistory, Windows
from torchlens_perf.analysis.statistics.run_windows import MAX_COLUMNS, RunWindows, align_windows
from torchlens_perf.run.records import PARTS


def windows(count: int, first: int = 0, **parts: float) -> Windows:
    """Return windows of a rank whose steps have the given parts in ms.

    `cpu` is the time without a CPU in the forward part.
    """
    history = WindowHistory()
    history.add_steps(mixed_table([parts or {"forward": 10.0}] * count, first))
    return history.to_windows()


def grid(*ranks: Windows, last_step: int = 10**6) -> RunWindows:
    found = align_windows(dict(enumerate(ranks)), last_step)
    assert found is not None
    return found


def test_grid_column_belongs_to_the_steps_around_its_middle() -> None:
    """The last column ends with the last step."""
    # Columns start at 0, 8, 16, 24 and 32. The last column has six steps.
    found = grid(windows(40), last_step=37)

    assert found.columns_between(12, 28).tolist() == [False, True, True, False, False]
    assert found.columns_between(13, 29).tolist() == [False, False, True, True, False]
    assert found.columns_between(0, 12).tolist() == [True, False, False, False, False]
    assert found.columns_between(35, None).tolist() == [False] * 4 + [True]
    assert found.columns_between(36, None).tolist() == [False] * 5


def test_grid_column_has_the_mean_of_its_windows() -> None:
    """Windows of the ranks differ in width. Values that no rank has measured are not zero."""
    long = windows(8 * 1000, forward=10.0, data=2.0, cpu=4.0)
    found = grid(windows(16, forward=30.0), long)

    assert long.width > 8
    assert len(found) <= MAX_COLUMNS
    assert found.duration_ns[:, 0].tolist() == [30 * MS, 12 * MS]
    assert found.parts_ns[1, :, PARTS.index("data")].tolist() == [2 * MS] * len(found)
    assert found.lack_ns[1, :, PARTS.index("forward")].tolist() == [4 * MS] * len(found)
    assert np.isnan(found.lack_ns[0]).all()
    assert np.isnan(found.duration_ns[0, 1:]).all()
    assert np.isnan(found.parts_ns[0, 1:]).all()


def test_negligible_lack_of_a_cpu_is_not_stored() -> None:
    """Threads always lack a CPU for some time, and each value needs space in the node's state."""
    assert windows(16, forward=100.0, cpu=1.0).lack_ns == {0: [], 8: []}
    assert windows(16, forward=100.0).lack_ns == {}
    assert set(windows(16, forward=100.0, cpu=3.0).lack_ns) == {0, 8}


def test_merged_windows_have_the_first_start_and_the_mean_lack_of_a_cpu() -> None:
    """One or both of the neighbors lacked a CPU."""
    history, steps = WindowHistory(), 8 * 600
    lacks = [{"forward": 10.0, "cpu": 4.0 if step // 8 % 2 else 0.0} for step in range(steps)]
    table = mixed_table(lacks)
    history.add_steps(table)
    merged = history.to_windows()

    assert merged.width == 16
    assert merged.start_ns.tolist() == table.start_ns[merged.first_step].tolist()
    assert [
        merged.lack_ns[step][PARTS.index("forward")] for step in merged.first_step.tolist()
    ] == [2 * MS] * 300


def test_grid_is_none_without_windows() -> None:
    assert align_windows({}, 0) is None
    history = WindowHistory()
    history.add_steps(step_table([]))
    assert align_windows({0: history.to_windows()}, 0) is None
