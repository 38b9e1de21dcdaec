"""Changes of the step time are found in planted series, and not in stationary noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.findings import episode, findings
from tests.support.tables import step_table
from tests.verdicts.words.test_bottleneck import BASE, report_on
from torchlens_perf.analysis.statistics.rank import WindowHistory, Windows
from torchlens_perf.analysis.statistics.run_windows import align_windows
from torchlens_perf.diagnosis.regimes import find_changes, find_regimes
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Cause, Diagnosis, Findings
from torchlens_perf.view.tables import build_tables

STEP_MS = 100.0


def noise(rng: np.random.Generator, count: int, correlation: float) -> np.ndarray:
    """Return a stationary autoregressive series with a standard deviation of 1."""
    values = rng.standard_normal(count + 100)
    for at in range(1, len(values)):
        values[at] = correlation * values[at - 1] + np.sqrt(1 - correlation**2) * values[at]
    return np.asarray(values[100:])


def windows_of(forward_ms: np.ndarray, **parts_ms: np.ndarray) -> Windows:
    history = WindowHistory()
    parts = {"forward": forward_ms, **parts_ms}
    history.add_steps(
        step_table(
            [
                {part: float(values[step]) for part, values in parts.items()}
                for step in range(len(forward_ms))
            ]
        )
    )
    return history.to_windows()


def regimes_of(*ranks: Windows, found: Findings = NOTHING) -> list[Any]:
    grid = align_windows(dict(enumerate(ranks)), int(ranks[0].first_step[-1]) + ranks[0].width)
    return find_regimes(grid, [], found)


def steps_of(steps: int, seed: int = 0, scale: float = 0.02) -> np.ndarray:
    """Return durations of steps with independent noise."""
    rng = np.random.default_rng(seed)
    return STEP_MS * np.exp(scale * rng.standard_normal(steps))


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("windows", [12, 24, 63])
def test_no_change_is_found_in_95_percent_of_stationary_series(
    windows: int, correlation: float
) -> None:
    rng = np.random.default_rng(windows)
    found = [bool(find_changes(0.02 * noise(rng, windows, correlation))) for _ in range(60)]
    assert sum(found) <= 3


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
def test_change_of_5_percent_is_found_within_two_windows(correlation: float) -> None:
    rng = np.random.default_rng(3)
    near = 0
    for _ in range(40):
        at = int(rng.integers(8, 56))
        values = 0.01 * noise(rng, 64, correlation) + np.log(1.05) * (np.arange(64) >= at)
        ends = [each.end for each in find_changes(values)]
        near += len(ends) == 1 and abs(ends[0] - at) <= 2
    assert near >= 38


def test_sudden_change_names_its_step_size_and_part() -> None:
    """From step 640 on, the backward pass takes 10 ms longer."""
    steps = 1280
    backward = np.full(steps, 50.0) + 10 * (np.arange(steps) >= 640)
    (change,) = regimes_of(
        windows_of(steps_of(steps), backward=backward),
        windows_of(steps_of(steps, 1), backward=backward),
    )

    assert (change["kind"], change["until_step"], change["part"]) == ("change", None, "backward")
    assert abs(change["since_step"] - 640) <= 2 * 32
    assert change["after_s"] - change["before_s"] == pytest.approx(0.01, rel=0.15)
    assert change["parts_s"]["backward"] == pytest.approx(0.01, rel=0.15)
    assert change["coincides"] == []


def test_temporary_change_has_a_begin_and_an_end() -> None:
    at = np.arange(1280)
    found = regimes_of(windows_of(steps_of(1280) * np.where((at >= 400) & (at < 800), 1.2, 1.0)))

    assert [each["kind"] for each in found] == ["change", "change"]
    assert [each["after_s"] > each["before_s"] for each in found] == [True, False]
    assert np.abs(np.array([each["since_step"] for each in found]) - [400, 800]).max() <= 64


@pytest.mark.parametrize("seed", range(10))
def test_drift_is_not_a_sudden_change_and_the_reverse(seed: int) -> None:
    steps = 1280
    (drift,) = regimes_of(windows_of(steps_of(steps, seed) * np.linspace(1, 1.15, steps)))
    assert (drift["kind"], drift["part"], drift["until_step"]) == ("drift", "forward", None)
    assert drift["after_s"] / drift["before_s"] == pytest.approx(1.15, abs=0.02)

    (change,) = regimes_of(
        windows_of(steps_of(steps, seed) * np.where(np.arange(steps) < 500, 1, 1.15))
    )
    assert change["kind"] == "change"


@pytest.mark.parametrize("shape", ["decaying", "constant"])
@pytest.mark.parametrize("steps", [1000, 2000])
def test_warm_up_of_200_steps_is_named(steps: int, shape: str) -> None:
    at = np.arange(steps)
    more = np.exp(-at / 70) if shape == "decaying" else 1.0 * (at < 200)
    (warm_up,) = regimes_of(windows_of(steps_of(steps) * (1 + 0.4 * more)))

    assert (warm_up["kind"], warm_up["since_step"]) == ("warm-up", 0)
    assert 100 <= warm_up["until_step"] <= 300
    assert warm_up["after_s"] == pytest.approx(0.1, rel=0.03)


def test_rank_that_became_slow_and_a_compilation_coincide_with_the_change() -> None:
    """All ranks wait for rank 1 from step 640 on, and compile something then."""
    steps, at = 1280, np.arange(1280)
    extra = 30.0 * (at >= 640)
    other = windows_of(steps_of(steps), communication=10 + extra)
    slow = windows_of(steps_of(steps, 1) + extra, communication=np.full(steps, 10.0))
    slow.tags[640] = int(Flag.COMPILED)
    cause = Diagnosis((Cause("gpu_clock", "", "", None, {}),), (), (), {}, {})
    one = episode(1, since=644)
    found = findings(one, episode(0, since=100), diagnoses=((one.key, cause),))
    (change,) = regimes_of(other, other, slow, other, found=found)

    assert change["part"] == "communication"
    assert change["coincides"] == ["rank 1 became slow (gpu_clock)", "compile"]


@pytest.mark.parametrize("period", range(2, 51))
def test_period_of_long_steps_is_found(period: int) -> None:
    """An evaluation makes each step of a period twice as long."""
    noise = np.exp(0.02 * np.random.default_rng(period).standard_normal(600))
    report = report_on(
        [
            {**BASE, "host": 8.0 * noise[step], "flags": Flag.EVALUATED}
            | ({"host": 30.0} if step % period == 0 else {"flags": 0})
            for step in range(600)
        ]
    )
    (found,) = [each for each in report["regimes"] if each["kind"] == "periodic"]

    assert (found["period"], found["part"]) == (period, "host")
    assert found["after_s"] - found["before_s"] == pytest.approx(0.022, rel=0.1)
    assert found["coincides"] == ["evaluation"]
    (table,) = [each for each in build_tables(report) if each.key == "regimes"]
    assert [column.texts()[-1] for column in table.columns][:2] == [
        "periodic",
        f"every {period} steps",
    ]


def test_warm_up_does_not_end_if_steps_keep_compiling() -> None:
    """Shapes change at random, so one step in about 12 compiles."""
    rng = np.random.default_rng(1)

    def regimes(last: int) -> list[Any]:
        compiles = (rng.random(600) < 0.08) & (np.arange(600) < last)
        steps = [
            {**BASE, "forward": 60.0, "flags": Flag.COMPILED} if each else BASE for each in compiles
        ]
        return [each for each in report_on(steps)["regimes"] if each["kind"] == "warm-up"]

    (found,) = regimes(last=600)
    assert (found["since_step"], found["until_step"], found["part"]) == (None, None, "forward")
    assert found["after_s"] == pytest.approx(0.072, rel=0.01)
    assert found["coincides"] == ["compilation"]
    assert regimes(last=300) == []


def test_short_or_empty_run_has_no_regimes() -> None:
    assert find_regimes(None, [], NOTHING) == []
    assert regimes_of(windows_of(steps_of(90) * np.linspace(1, 2, 90))) == []
