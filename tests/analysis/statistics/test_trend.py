"""Gradual changes are found in planted series, and are told apart from jumps and stationary noise."""

from __future__ import annotations

import numpy as np
import pytest

from torchlens_perf.analysis.statistics.trend import find_changes, find_gradual_change


def noise(rng: np.random.Generator, count: int, correlation: float) -> np.ndarray:
    """Return a stationary autoregressive series with a standard deviation of 1."""
    values = rng.standard_normal(count + 100)
    for at in range(1, len(values)):
        values[at] = correlation * values[at - 1] + np.sqrt(1 - correlation**2) * values[at]
    return np.asarray(values[100:])


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("count", [12, 24, 63])
def test_no_change_is_found_in_95_percent_of_stationary_series(
    count: int, correlation: float
) -> None:
    rng = np.random.default_rng(count)
    found = [bool(find_changes(0.02 * noise(rng, count, correlation))) for _ in range(60)]
    assert sum(found) <= 3


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
def test_jump_of_5_percent_is_found_within_two_values_and_is_not_gradual(
    correlation: float,
) -> None:
    rng = np.random.default_rng(3)
    near = gradual = 0
    for _ in range(40):
        at = int(rng.integers(8, 56))
        values = 0.01 * noise(rng, 64, correlation) + np.log(1.05) * (np.arange(64) >= at)
        ends = [each.end for each in find_changes(values)]
        near += len(ends) == 1 and abs(ends[0] - at) <= 2
        gradual += find_gradual_change(values) != 0.0
    assert near >= 38
    assert gradual <= 2


@pytest.mark.parametrize("seed", range(10))
def test_slope_is_gradual_and_a_jump_of_the_same_size_is_not(seed: int) -> None:
    of_noise = 0.005 * noise(np.random.default_rng(seed), 40, 0.0)
    slope, jump = np.linspace(0, 0.15, 40), 0.15 * (np.arange(40) >= 16)

    assert find_gradual_change(of_noise + slope) == pytest.approx(0.16, abs=0.02)
    assert find_gradual_change(of_noise + jump) == 0.0


@pytest.mark.parametrize("shape", ["decaying", "constant"])
@pytest.mark.parametrize("count", [31, 62])
def test_warm_up_is_not_a_gradual_change(count: int, shape: str) -> None:
    """The first 200 of 1,000 or 2,000 steps are up to 40 % slower."""
    at = 32 * np.arange(count)
    more = np.exp(-at / 70) if shape == "decaying" else 1.0 * (at < 200)
    of_noise = 0.004 * noise(np.random.default_rng(0), count, 0.0)

    assert find_gradual_change(np.log(1 + 0.4 * more) + of_noise) == 0.0


def test_short_series_has_no_gradual_change() -> None:
    assert find_gradual_change(np.linspace(0, 1, 11)) == 0.0
    assert find_gradual_change(np.linspace(0, 1, 12)) == pytest.approx(np.e - 1)
