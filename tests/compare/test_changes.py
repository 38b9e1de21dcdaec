"""Statistics of a comparison, on samples whose true changes are known."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.support.long import long
from torchlens_perf.compare.changes import (
    Change,
    Outcome,
    count_runs_to_decide,
    find_changes,
    find_detectable,
)

MEASURES, DRAWS = 12, 200


def compared(
    before: np.ndarray[Any, Any], after: np.ndarray[Any, Any], noise: float = 0.0
) -> list[Change]:
    of_all = np.ones(before.shape[1])
    return find_changes(
        before,
        after,
        np.full(before.shape, noise),
        np.full(after.shape, noise),
        assumed=5 * of_all,
        worth=0.1 * of_all,
        margin=2 * of_all,
    )


def sides(
    generator: np.random.Generator, runs: int, shift: float = 0.0
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return runs of two sides with mean 100 and a spread of 1 per measure. Measures of a run move
    together, as those of a slow machine do. The first measure is shifted after the change.
    """

    def side() -> np.ndarray[Any, Any]:
        common = generator.standard_normal((runs, 1))
        own = generator.standard_normal((runs, MEASURES))
        return 100 + np.sqrt(0.5) * (common + own)

    before, after = side(), side()
    after[:, 0] += shift
    return before, after


@pytest.mark.parametrize(("runs", "draws"), [(2, 20), (5, 200), *long((2, 200), (3, 200))])
def test_equal_sides_have_a_false_change_in_at_most_one_of_twenty_comparisons(
    runs: int, draws: int
) -> None:
    generator = np.random.default_rng(1)
    false = sum(
        any(each.outcome is Outcome.CHANGED for each in compared(*sides(generator, runs)))
        for _ in range(draws)
    )
    standard_error = (0.05 * 0.95 * draws) ** 0.5
    assert false <= 0.05 * draws + 3 * standard_error


def test_change_of_the_detectable_size_is_found_in_four_of_five_comparisons() -> None:
    generator = np.random.default_rng(2)
    detectable = np.median([compared(*sides(generator, 5))[0].detectable for _ in range(50)])
    found = sum(
        compared(*sides(generator, 5, shift=detectable))[0].outcome is Outcome.CHANGED
        for _ in range(DRAWS)
    )
    assert 0.65 <= found / DRAWS <= 0.95


def test_interval_covers_the_true_difference() -> None:
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(DRAWS):
        change = compared(*sides(generator, 5, shift=3.0))[0]
        covered += change.low <= 3.0 <= change.high
    assert covered >= 0.95 * DRAWS - 9


def test_small_difference_with_a_narrow_interval_is_the_same() -> None:
    before = np.full((5, 1), 100.0) + np.arange(5)[:, None] * 0.01
    (change,) = compared(before, before + 0.05)
    assert change.outcome is Outcome.SAME


def test_wide_interval_cannot_say() -> None:
    before = np.array([[90.0], [110.0], [95.0], [105.0]])
    (change,) = compared(before, before + 3)
    assert change.outcome is Outcome.UNKNOWN
    assert change.low < 3 < change.high


def test_one_run_a_side_uses_the_assumed_spread() -> None:
    (small,) = compared(np.array([[100.0]]), np.array([[110.0]]))
    (large,) = compared(np.array([[100.0]]), np.array([[150.0]]))
    assert small.outcome is Outcome.UNKNOWN
    assert large.outcome is Outcome.CHANGED
    # 5 * sqrt(2) is the standard error, 2.24 the 98.75 % quantile of a normal distribution.
    assert large.high - large.difference == pytest.approx(2.24 * 5 * 2**0.5, rel=0.02)


def test_noise_within_the_runs_widens_the_interval() -> None:
    before = np.full((5, 1), 100.0) + np.arange(5)[:, None] * 0.01
    (quiet,) = compared(before, before + 4)
    (noisy,) = compared(before, before + 4, noise=6.0)
    assert quiet.outcome is Outcome.CHANGED
    assert noisy.outcome is Outcome.UNKNOWN
    assert noisy.high - noisy.low > 10 * (quiet.high - quiet.low)


def test_number_of_runs_that_would_tell_does_tell() -> None:
    """Three runs of each side cannot show a change of 1.5 standard deviations."""
    generator = np.random.default_rng(4)
    doubtful = compared(*sides(generator, 3, shift=1.5))[0]
    known = dataclasses.replace(doubtful, after=doubtful.before + 1.5, spread=1.0)
    assert doubtful.outcome is not Outcome.CHANGED
    runs = count_runs_to_decide(known, 0.0, MEASURES)

    assert runs is not None
    assert find_detectable(known, runs, MEASURES) <= 1.5
    draws = 40
    found = sum(
        compared(*sides(generator, runs, shift=1.5))[0].outcome is Outcome.CHANGED
        for _ in range(draws)
    )
    assert found >= 0.6 * draws


@pytest.mark.parametrize(("spread", "expected"), [(0.1, 5), (1.0, 14), (10.0, None)])
def test_number_of_runs_grows_with_the_noise(spread: float, expected: int | None) -> None:
    change = dataclasses.replace(_change_of(2.0), spread=spread)
    found = count_runs_to_decide(change, 0.5, 8)
    assert found is None if expected is None else found is not None and found <= expected


def test_equal_sides_need_the_runs_that_show_less_than_the_margin() -> None:
    change = dataclasses.replace(_change_of(0.0), spread=1.0)
    few, many = (count_runs_to_decide(change, margin, 8) for margin in (4.0, 1.0))
    assert few is not None
    assert many is not None
    assert few < many


def _change_of(difference: float) -> Change:
    return Change(100.0, 100.0 + difference, -9.0, 9.0, 9.0, 1.0, Outcome.UNKNOWN)
