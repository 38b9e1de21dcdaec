"""The measured cost of timing modules, compared with the cost that made-up steps contain."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.support.long import long
from tests.support.saved import save_and_load
from tests.support.tables import step_table
from torchlens_perf.analysis.statistics.module_cost import BLOCK_STEPS, ModuleCost
from torchlens_perf.run.records import StepTable
from torchlens_perf.run.ring import Flag

COST_NS = 40_000
STEPS = 40 * BLOCK_STEPS
WITHOUT = int(Flag.WITHOUT_MODULES)


def make_steps(
    seed: int, timed_share: float, cost_ns: float = COST_NS, noise: float = 0.03
) -> StepTable:
    """Return steps of about 7 ms that slow down by a third, with outliers.

    A share of the steps is timed, at random, and takes longer by the cost.
    """
    random = np.random.default_rng(seed)
    timed = random.random(STEPS) < timed_share
    drift = 7e6 * (1 + np.arange(STEPS) / STEPS / 3 + 0.02 * np.sin(np.arange(STEPS) / 9))
    duration_ns = drift * np.exp(noise * random.standard_normal(STEPS))
    duration_ns *= np.where(random.random(STEPS) < 0.02, random.uniform(2, 30, STEPS), 1)
    made = step_table([{}] * STEPS)
    return dataclasses.replace(
        made,
        duration_ns=(duration_ns + timed * cost_ns).astype(np.int64),
        flags=np.where(timed, 0, WITHOUT),
    )


def measure(steps: StepTable) -> ModuleCost:
    cost = ModuleCost()
    cost.add_steps(steps)
    return cost


@pytest.mark.parametrize("total", [30, *long(200)])
@pytest.mark.parametrize("timed_share", [63 / 64, 1 / 8])
def test_interval_contains_the_true_cost_in_about_95_percent(
    timed_share: float, total: int
) -> None:
    """From 91 to 99 % of 200 runs with drift and outliers contain it, or 85 to 100 % of 30."""
    inside = 0
    for seed in range(total):
        found = measure(make_steps(seed, timed_share)).estimate()
        assert found is not None
        inside += abs(found.mean_ns - COST_NS) <= 1.96 * found.error_ns
    assert abs(inside / total - 0.95) <= 0.04 * (200 / total) ** 0.5


@pytest.mark.parametrize("total", [30, *long(200)])
def test_mean_of_many_runs_is_the_true_cost(total: int) -> None:
    """A block with a cost of 1 % of its steps is unbiased, though outliers are clipped."""
    found = [measure(make_steps(seed, 1 / 2, cost_ns=7e4)).estimate() for seed in range(total)]
    means = [each.mean_ns for each in found if each is not None]
    assert len(means) == total
    assert np.mean(means) == pytest.approx(7e4, abs=4 * np.std(means) / total**0.5)


def test_precision_grows_with_the_number_of_untimed_steps() -> None:
    errors = []
    for timed_share in (63 / 64, 1 / 2):
        found = measure(make_steps(0, timed_share)).estimate()
        assert found is not None
        errors.append(found.error_ns)
    assert errors[1] < errors[0] / 2


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_sums_are_the_same_in_any_batches_and_after_restarts(size: int) -> None:
    steps = make_steps(1, 3 / 4)
    cost = ModuleCost()
    for start in range(0, STEPS, size):
        cost.add_steps(steps.select_rows(slice(start, start + size)))
        if start % 999 == 0:
            cost = save_and_load(cost)
    assert cost == measure(steps)


def test_state_is_bounded() -> None:
    cost = measure(make_steps(2, 1 / 2))
    assert len(cost.timed_ns) + len(cost.untimed_ns) <= BLOCK_STEPS


def test_steps_with_other_work_are_left_out() -> None:
    """Sampled steps and evaluations are timed and take 20 % longer."""
    steps = make_steps(3, 1 / 2)
    other = (steps.step % 5 == 0) & (steps.flags == 0)
    flags = np.where(steps.step % 2, int(Flag.SAMPLED), int(Flag.EVALUATION))
    longer = dataclasses.replace(
        steps,
        duration_ns=np.where(other, steps.duration_ns * 6 // 5, steps.duration_ns),
        flags=np.where(other, flags, steps.flags),
    )
    assert measure(longer) == measure(steps.select_rows(~other))


def test_steps_of_several_sorts_give_no_estimate() -> None:
    """The steps of each three take 1, 2 and 3 times as long. Clipping would hide any cost."""
    steps = make_steps(4, 1 / 2)
    factor = 1 + steps.step % 3
    cost = measure(dataclasses.replace(steps, duration_ns=steps.duration_ns * factor))
    assert cost.estimate() is None


def test_waits_for_a_cpu_do_not_count() -> None:
    """On a busy machine, the thread waits for a CPU for up to three times the step's work."""
    steps = make_steps(6, 1 / 2)
    lack_ns = np.random.default_rng(6).integers(0, 21_000_000, STEPS)
    ready_ns = np.full_like(steps.ready_ns, 0)
    ready_ns[:, 1] = lack_ns
    busy = dataclasses.replace(steps, duration_ns=steps.duration_ns + lack_ns, ready_ns=ready_ns)
    assert measure(busy) == measure(steps)


def test_few_blocks_give_no_estimate() -> None:
    steps = make_steps(5, 1 / 2)
    assert measure(steps.select_rows(slice(0, 8 * BLOCK_STEPS))).estimate() is None
    assert measure(steps.select_rows(slice(0, 8 * BLOCK_STEPS + 1))).estimate() is not None
