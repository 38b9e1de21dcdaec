"""A trend of the step time is shown if it exceeds the wander of the run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.analysis.statistics.test_trend import noise
from tests.verdicts.words.test_bottleneck import BASE, report_on
from torchlens_perf.view.step_words import describe_step_times

STEPS = np.arange(240)


def trend_of(forward_ms: np.ndarray) -> tuple[Any, str]:
    """Return the trend of a run with these forward times, and its words."""
    report = report_on([{**BASE, "forward": float(each)} for each in forward_ms])
    words = [each for each in describe_step_times(report) if "trend" in each]
    return report["steps"]["trend"], " ".join(words)


def slow_wander(seed: int, scale: float) -> np.ndarray:
    """Return a stationary factor whose neighbouring windows of 8 steps are alike."""
    rng = np.random.default_rng(seed)
    windows = np.repeat(noise(rng, len(STEPS) // 8, 0.9), 8)
    return np.exp(scale * windows + 0.02 * rng.standard_normal(len(STEPS)))


@pytest.mark.parametrize(
    "factor",
    [
        pytest.param(1 + 0.2 * np.sin(2 * np.pi * STEPS / 160), id="oscillating clock"),
        pytest.param(np.where(STEPS < 200, 1.0, 1.9), id="sudden change at the end"),
        pytest.param(np.where((STEPS > 150) & (STEPS < 190), 1.5, 1.0), id="busy neighbour"),
    ],
)
def test_change_that_is_not_gradual_is_no_trend(factor: np.ndarray) -> None:
    rng = np.random.default_rng(1)
    trend, words = trend_of(20 * factor * np.exp(0.02 * rng.standard_normal(len(STEPS))))

    assert not trend["is_gradual"]
    assert words in ("trend flat", "no trend")


def test_wander_of_steady_runs_is_no_trend() -> None:
    """The thirds of most of these runs differ by more than 5 %."""
    found = [trend_of(20 * slow_wander(seed, 0.15)) for seed in range(30)]

    assert sum(abs(trend["change"]) > 0.05 for trend, _ in found) >= 15
    assert sum(words.startswith("trend slower") or "faster" in words for _, words in found) <= 2


@pytest.mark.parametrize(("growth", "words"), [(0.5, "slower"), (-0.3, "faster")])
def test_planted_trend_is_found_within_wander(growth: float, words: str) -> None:
    factor = 1 + growth * STEPS / len(STEPS)
    found = [trend_of(20 * factor * slow_wander(seed, 0.02)) for seed in range(10)]

    assert all(shown.startswith(f"trend {words} ") for _, shown in found)


@pytest.mark.parametrize("steps", [7, 60, 96])
def test_run_of_few_windows_has_no_trend(steps: int) -> None:
    """A run of 12 windows of 8 steps after the first is long enough."""
    assert trend_of(20 * 1.01 ** np.arange(steps)) == (None, "")
