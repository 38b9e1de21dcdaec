"""The standard error of a run's typical step, from blocks of its steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.simulated_runs import simulate_run
from torchlens_perf.compare.run_noise import (
    bootstrap_standard_errors,
    mean_of_middle_half,
    read_step_series,
)
from torchlens_perf.run.directory import RunDirectory


def test_error_of_independent_steps_is_that_of_a_mean() -> None:
    generator = np.random.default_rng(0)
    series = 10 + generator.standard_normal((1000, 1))
    # The mean of the middle half has 1.1 times the error of the mean.
    assert bootstrap_standard_errors(series)[0] == pytest.approx(1.1 / 1000**0.5, rel=0.35)


def test_error_of_correlated_steps_is_larger() -> None:
    generator = np.random.default_rng(0)
    independent = generator.standard_normal(2000)
    correlated = np.convolve(generator.standard_normal(2019), np.ones(20) / 20**0.5, "valid")
    small, large = (
        bootstrap_standard_errors(10 + each[:, None])[0] for each in (independent, correlated)
    )
    assert large > 2.5 * small


def test_error_of_a_short_run_is_not_known() -> None:
    assert np.isnan(bootstrap_standard_errors(np.ones((10, 2)))).all()


def test_typical_mean_leaves_long_steps_out() -> None:
    series = np.column_stack([[1.0] * 90 + [50.0] * 10, [2.0] * 90 + [99.0] * 10])
    assert mean_of_middle_half(series).tolist() == [1.0, 2.0]


def test_series_is_the_mean_over_ranks_without_warm_up(tmp_path: Path) -> None:
    run = simulate_run(tmp_path / "run", ranks=2, steps=40)
    unreadable: list[object] = []
    series = read_step_series(RunDirectory(run), unreadable)  # type: ignore[arg-type]
    assert not unreadable
    assert len(series) == 37
    # Columns are the step, its parts, and CPU contention.
    assert series[:, 1:-1].sum(axis=1) == pytest.approx(series[:, 0])
