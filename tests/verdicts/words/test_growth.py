"""One verdict on steps whose durations keep growing, and no separate verdict on the longest steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.verdicts.words.test_bottleneck import BASE, report_on


def verdicts(host_ms: list[float], **parts: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = report_on(
        [{**BASE, "host": host, "cpu": 0.0, **parts} for host in host_ms]
    )["verdicts"]
    return found


def test_steps_that_keep_growing_are_one_verdict() -> None:
    """In reinforcement learning, episodes may need more steps as training continues."""
    rng = np.random.default_rng(2)
    grown = [
        float(each) for each in 1.04 ** np.arange(200) * np.exp(0.2 * rng.standard_normal(200))
    ]
    found = verdicts(grown)
    (growth,) = [each for each in found if each.kind == "growing_steps"]

    evidence = growth.evidence
    change = evidence.last_third_s / evidence.first_third_s - 1
    assert f"grew by {change:.0%} over the run" in growth.sentence
    assert growth.sentence.endswith("(an episode, a sequence, a list that is never emptied).")
    assert not any(each.kind == "long_steps" for each in found), (
        "the last steps are no second finding"
    )
    mean_s = (
        np.mean(grown) / 1e3
        + sum(value for value in BASE.values() if isinstance(value, float)) / 1e3
    )
    assert 0.2 * mean_s < growth.cost_s_per_step < mean_s


def test_growing_waits_for_a_cpu_are_not_reported_as_growing_steps() -> None:
    """The load of the machine may have grown. Another verdict reports that."""
    waits_ms = (10 * 1.02 ** np.arange(200)).tolist()
    found = report_on([{**BASE, "forward": 4 + wait, "cpu": wait} for wait in waits_ms])["verdicts"]

    assert found[0].kind == "lack_of_cpu"
    assert not any(each.kind == "growing_steps" for each in found)


def test_growth_by_half_of_short_steps_is_found_early() -> None:
    """The steps take 14 ms."""
    (growth,) = [
        each
        for each in verdicts([3.0 + step / 20 for step in range(160)])
        if each.kind == "growing_steps"
    ]

    assert growth.lost_s == pytest.approx(160 * growth.cost_s_per_step, rel=0.01)


@pytest.mark.parametrize("begin", [60, 100, 140])
def test_sudden_change_is_not_reported_as_growth(begin: int) -> None:
    noise = np.exp(0.1 * np.random.default_rng(begin).standard_normal(200))
    found = verdicts([float(1 if step < begin else 80) * noise[step] for step in range(200)])

    assert not any(each.kind == "growing_steps" for each in found)


@pytest.mark.parametrize("seed", range(20))
def test_change_halfway_through_a_short_run_is_not_reported_as_growth(seed: int) -> None:
    """A rank may have become slow. With few windows, many later ones are slower by chance."""
    noise = np.exp(0.02 * np.random.default_rng(seed).standard_normal(128))
    found = verdicts([float((10 if step < 64 else 18) * noise[step]) for step in range(128)])

    assert not any(each.kind == "growing_steps" for each in found)


def test_noisy_steps_are_not_reported_as_growing() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        found = verdicts((8 * np.exp(0.4 * rng.standard_normal(200))).tolist())
        assert not any(each.kind == "growing_steps" for each in found)


@pytest.mark.parametrize("seed", range(5))
def test_growth_is_found_behind_waits_for_a_cpu_that_vary(seed: int) -> None:
    """Other programs take up to 300 ms of a step, while host code grows from 0 to 100 ms."""
    rng = np.random.default_rng(seed)
    waits_ms = 300 * rng.random(250) * np.linspace(1.0, 0.2, 250)
    found = report_on(
        [
            {**BASE, "host": 8 + 0.4 * step, "forward": 4 + wait, "cpu": wait}
            for step, wait in enumerate(waits_ms.tolist())
        ]
    )["verdicts"]
    (growth,) = [each for each in found if each.kind == "growing_steps"]

    assert "without CPU contention" in growth.text
    assert growth.evidence.first_third_s < 0.06
    assert 0.08 < growth.evidence.last_third_s < 0.13
    assert 0.02 < growth.cost_s_per_step < 0.06


@pytest.mark.parametrize("seed", range(5))
def test_host_code_that_grows_by_the_same_time_each_step_is_growth(seed: int) -> None:
    """The step of 30 ms grows by 0.4 ms a step, so its growth in percent gets smaller."""
    noise = np.exp(0.1 * np.random.default_rng(seed).standard_normal(250))
    found = verdicts([float(8 + 0.4 * step * noise[step]) for step in range(250)])
    (growth,) = [each for each in found if each.kind == "growing_steps"]

    assert growth.evidence.last_third_s > 2 * growth.evidence.first_third_s


def test_growth_without_any_noise_is_growth() -> None:
    """In logarithms, this growth is a curve that is steep only before the last third."""
    kinds = [each.kind for each in verdicts([2 + 0.4 * step for step in range(250)])]

    assert "growing_steps" in kinds
