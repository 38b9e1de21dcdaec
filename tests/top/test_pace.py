"""Progress, speed and time left of a run, shown only if they are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.top.reports import report_of, view_of
from torchlens_perf.analysis.statistics.quantities import format_duration
from torchlens_perf.top.pace import (
    RecentStepRate,
    describe_pace,
    describe_progress,
    draw_curve,
    estimate_time_left_s,
    format_time_left,
    window_median_step_s,
)
from torchlens_perf.view.step_words import step_count_text


def test_time_left_is_remaining_steps_times_mean_step() -> None:
    assert estimate_time_left_s(400, 1000, 0.5, (0.5, 0.5)) == (300.0,)
    assert describe_progress(400, 1000) == "400 of 1,000 steps (40%)"


def test_second_estimate_of_the_time_left_is_shown_if_recent_steps_differ() -> None:
    assert estimate_time_left_s(400, 1000, 0.5, (0.5,) * 8 + (1.0,)) == (300.0, 600.0)
    assert estimate_time_left_s(400, 1000, 0.5, (0.5,) * 8 + (0.54,)) == (300.0,)


def test_single_slow_window_does_not_change_the_time_left() -> None:
    assert estimate_time_left_s(400, 1000, 0.5, (0.5,) * 15 + (0.58,)) == (300.0,)


def test_no_time_left_is_shown_without_a_valid_total() -> None:
    """The total is missing or too small, or no step has ended."""
    assert estimate_time_left_s(400, None, 0.5, ()) == estimate_time_left_s(0, 1000, 0.5, ()) == ()
    assert (
        estimate_time_left_s(400, 1000, None, ()) == estimate_time_left_s(1001, 1000, 0.5, ()) == ()
    )


def test_progress_says_if_the_run_makes_more_steps_than_expected() -> None:
    assert describe_progress(1001, 1000) == "1,001 steps, more than the 1,000 expected"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (89, "89 s"),
        (91, "2 min"),
        (5340, "89 min"),
        (5460, "1 h 31 min"),
        (200_000, "2 d 7 h"),
    ],
)
def test_time_left_is_rounded_to_suitable_units(seconds: float, text: str) -> None:
    assert format_time_left(seconds) == text


def test_curve_has_its_lowest_block_at_the_lowest_value() -> None:
    """The highest value has the highest block."""
    assert draw_curve([1, 2, 3, 4], 4) == ["▁▃▆█"]
    assert draw_curve([1, 1, 4, 4], 2) == ["▁█"]
    assert draw_curve([1, 4], 6) == ["▁▁▁███"]
    assert draw_curve([1, 1, 1.01], 3) == ["▁▁▁"]
    assert draw_curve([], 10) == draw_curve([1, 2], 0) == [""]


def test_upper_line_of_a_curve_continues_the_lower_one() -> None:
    """The upper line has a block only if the lower one is full."""
    assert draw_curve([1, 2, 3], 3, 2) == [" ▁█", "▁██"]


def test_current_pace_is_computed_from_readings_of_the_last_minute() -> None:
    """At first, the pace is computed from the newest window."""
    seen, second = RecentStepRate(), 10**9
    assert seen.add("a", 10, 100 * second) is None
    # The time since the first reading is too short.
    assert seen.add("a", 12, 102 * second) is None
    assert seen.add("a", 20, 105 * second) == pytest.approx(0.5)
    assert seen.add("a", 20, 105 * second) == pytest.approx(0.5)
    # From here on, a step takes a second.
    for at in range(1, 13):
        found = seen.add("a", 20 + 10 * at, (105 + 10 * at) * second)
    assert found == pytest.approx(1.0)
    assert seen.add("another process", 5, 300 * second) is None


def test_pace_line_has_steps_rate_and_current_step_time(tmp_path: Path) -> None:
    """The run is slower from its middle on.

    The rate is that of the newest window or of recent readings.
    """
    report = report_of(view_of(tmp_path / "run", 4, "constant:rank=3,share=0.5,since=64", blocks=4))
    words, seen, now_s = (
        describe_pace(report, None),
        describe_pace(report, 0.25),
        window_median_step_s(report)[-1],
    )

    assert window_median_step_s(report)[0] == pytest.approx(0.21, rel=0.1)
    assert now_s == pytest.approx(0.3, rel=0.1)
    assert words[:3] == [
        "128 steps",
        f"{1 / window_median_step_s(report)[-1]:.3g} steps/s",
        f"now {format_duration(window_median_step_s(report)[-1])}",
    ]
    assert seen[1:3] == ["4 steps/s", "now 250 ms"]


def test_number_of_steps_is_that_of_the_report(tmp_path: Path) -> None:
    """A step that was not measured from its begin counts in neither, but in the progress."""
    report = report_of(view_of(tmp_path / "run", 4, blocks=1))
    report["steps"]["count"] -= 1

    assert describe_pace(report, None)[0] == step_count_text(report) == "31 steps"
    report["run"]["total_steps"] = 64
    assert describe_pace(report, None)[0] == "32 of 64 steps (50%)"
