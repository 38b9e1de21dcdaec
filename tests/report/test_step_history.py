"""Step times over the run in windows that all ranks share, without the warm-up."""

from __future__ import annotations

import pytest

from tests.report.test_heat import windows
from torchlens_perf.analysis.statistics.rank import NO_WINDOWS, WARM_UP_STEPS
from torchlens_perf.analysis.statistics.run_windows import MAX_COLUMNS
from torchlens_perf.report.step_history import build_step_history


def test_step_history_has_median_and_range_of_the_ranks() -> None:
    """Steps take 150 ms on three ranks. One of the ranks needs 60 ms more from step 40 on."""
    found = build_step_history(
        {0: windows(80), 1: windows(80), 2: windows(80, extra_ms=60, since=40)}
    )
    assert found is not None
    assert (found["width"], found["first_steps"]) == (8, list(range(8, 80, 8)))
    late = [step >= 40 for step in found["first_steps"]]

    assert found["median_s"] == pytest.approx([0.15] * 9)
    assert found["fastest_s"] == pytest.approx([0.15] * 9)
    assert found["slowest_s"] == pytest.approx([0.21 if slow else 0.15 for slow in late])


def test_step_history_excludes_the_warm_up() -> None:
    """A compilation of a minute would hide all other steps.

    A run that has only a warm-up has no history.
    """
    assert WARM_UP_STEPS < 8
    assert build_step_history({0: windows(8)}) is None
    assert build_step_history({0: NO_WINDOWS}) is None
    assert build_step_history({}) is None


def test_step_history_excludes_windows_without_steps() -> None:
    """One rank began later, and some steps are missing on both ranks."""
    found = build_step_history({0: windows(32), 1: windows(16, first=64)})
    assert found is not None
    assert found["first_steps"] == [8, 16, 24, 72]


def test_number_of_windows_in_the_step_history_is_bounded() -> None:
    """A run of a hundred thousand steps has the same medians, in at most as many windows as a chart
    can show.
    """
    found = build_step_history({0: windows(20_000), 1: windows(19_000)})
    assert found is not None
    assert MAX_COLUMNS // 2 < len(found["first_steps"]) <= MAX_COLUMNS
    assert found["median_s"] == pytest.approx([0.15] * len(found["median_s"]))
