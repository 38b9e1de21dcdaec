"""Tests of sketches, which are histograms of durations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.saved import save_and_load
from torchlens_perf.run.sketch import (
    BUCKETS,
    LOWEST_BUCKET,
    PER_OCTAVE,
    Sketch,
    add_to_sketches,
    bucket_bounds,
)

durations = st.lists(st.integers(0, 1 << 42), max_size=60)


def sketch_of(values: list[int]) -> Sketch:
    sketch = Sketch()
    sketch.add(np.array(values, np.int64))
    return sketch


def test_bucket_bounds_are_the_largest_integers_below_exact_powers() -> None:
    """Each bound is the largest integer not above 1e9 * 2**(i/32)."""
    largest = np.iinfo(np.int64).max
    bounds = bucket_bounds().tolist()
    assert (len(bounds), bounds[-LOWEST_BUCKET - 1], bounds[-1]) == (BUCKETS, 10**9, largest)
    for index, bound in enumerate(bounds, start=1):
        # This integer comparison avoids the rounding of floats.
        power = 10 ** (9 * PER_OCTAVE) << index
        assert bound**PER_OCTAVE << -LOWEST_BUCKET <= power
        assert bound == largest or power < (bound + 1) ** PER_OCTAVE << -LOWEST_BUCKET


@given(durations, durations)
def test_merged_sketch_equals_a_sketch_of_all_values(first: list[int], second: list[int]) -> None:
    """Order and a conversion to JSON before merging make no difference."""
    together = sketch_of(first + second).to_numbers()
    one, other = sketch_of(first), sketch_of(second)
    one.merge(sketch_of(second))
    other.merge(sketch_of(first))

    assert one.to_numbers() == other.to_numbers() == together
    assert Sketch.from_numbers(together).to_numbers() == save_and_load(one).to_numbers() == together


@given(durations)
def test_sums_and_extremes_of_a_sketch_are_not_rounded(values: list[int]) -> None:
    """Sum, sum of squares, extremes and count are not rounded, however large the durations are."""
    sketch = sketch_of(values)

    assert sketch.sum_ns == sum(values)
    assert sketch.sum_squares == sum(value * value for value in values)
    assert sketch.count == len(values)
    assert (sketch.min_ns, sketch.max_ns) == ((min(values), max(values)) if values else (0, 0))


@given(st.lists(st.integers(64, 1 << 41), min_size=1, max_size=200), st.floats(0, 1))
def test_quantiles_are_within_half_a_bucket(values: list[int], q: float) -> None:
    """A quantile differs from its order statistic by at most 1.1 %."""
    exact = sorted(values)[max(1, math.ceil(q * len(values))) - 1]

    assert sketch_of(values).quantile_ns(q) == pytest.approx(
        exact, rel=2 ** (0.5 / PER_OCTAVE) - 1 + 1e-9
    )


@given(
    st.lists(st.lists(st.integers(-5, 1 << 42), min_size=1, max_size=9), max_size=7), st.booleans()
)
def test_adding_to_several_sketches_at_once_equals_separate_additions(
    groups: list[list[int]], again: bool
) -> None:
    """A sketch may be in the list twice."""
    values = np.array([value for group in groups for value in group], np.int64)
    starts = np.cumsum([0, *map(len, groups)]).tolist()[:-1]
    one_by_one = [Sketch() for _ in groups]
    at_once = [Sketch() for _ in groups]
    if again and groups:
        one_by_one[-1], at_once[-1] = one_by_one[0], at_once[0]
    for sketch, group in zip(one_by_one, groups, strict=True):
        for value in group:
            sketch.add(np.array([value], np.int64))
    add_to_sketches(at_once, values, starts)

    assert [sketch.to_numbers() for sketch in at_once] == [
        sketch.to_numbers() for sketch in one_by_one
    ]


def test_empty_sketch_has_no_quantile_and_no_mean() -> None:
    assert math.isnan(Sketch().quantile_ns(0.5))
    assert math.isnan(Sketch().mean_ns())
    assert Sketch().count == 0


def test_extreme_values_are_counted_in_the_outermost_buckets() -> None:
    """Values below the buckets count in the first one. No 64-bit value is above the buckets."""
    sketch = sketch_of([0, 5, (1 << 63) - 1])

    assert sketch.counts[0] == 2
    assert sketch.counts.nonzero()[0][-1] == np.searchsorted(bucket_bounds(), sketch.max_ns)
    assert sketch.quantile_ns(1.0) == pytest.approx(sketch.max_ns, rel=0.011)


def test_sketch_of_similar_durations_is_small() -> None:
    """The small form equals the full one, in any order of addition."""
    sketch = sketch_of([1_000_000, 900_000, 1_100_000])
    sketch.merge(sketch_of([800_000]))

    assert len(sketch.to_numbers()) < 30
    assert sketch.counts.shape == (BUCKETS,)
    assert sketch.counts.sum() == sketch.count == 4
    assert Sketch.from_numbers(sketch.to_numbers()).to_numbers() == sketch.to_numbers()


@pytest.mark.parametrize("first", [-1, BUCKETS])
def test_invalid_buckets_raise_an_error(first: int) -> None:
    with pytest.raises(ValueError, match=f"there are {BUCKETS}"):
        Sketch.from_numbers([1, 1, 1, 1, first, 1])


@pytest.mark.parametrize("outliers", [[], [10**9], [10**9, 5 * 10**9]])
def test_usual_mean_ignores_up_to_a_tenth_of_outliers(outliers: list[int]) -> None:
    """More frequent modes count."""
    sketch = Sketch()
    sketch.add(np.array([1000, 1000, 10_000] * 20 + outliers, np.int64))
    assert sketch.mean_without_outliers_ns() == pytest.approx(4000, rel=0.011)


def test_usual_mean_without_outliers_is_the_mean() -> None:
    sketch = Sketch()
    sketch.add(np.array([90, 100, 113], np.int64))
    assert sketch.mean_without_outliers_ns() == sketch.mean_ns() == 101
    assert math.isnan(Sketch().mean_without_outliers_ns())
