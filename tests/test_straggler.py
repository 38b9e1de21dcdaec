"""Judging ranks by windows made by hand: pure values in, a comparison out."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tables import MS, step_table
from torchlens_perf.rank_statistics import WindowHistory, Windows
from torchlens_perf.straggler import LEAST_WINDOWS, compare

WORK = {"data": 2.0, "forward": 20.0, "backward": 40.0, "optimizer": 5.0, "host": 1.0}


def windows(
    steps: int, *, extra: dict[str, float] | None = None, since: int = 0, until: int = 1 << 30, wait: float = 0.0,
    noise: float = 0.02, seed: int = 0,
) -> Windows:  # fmt: skip
    """A rank's windows: WORK with noise, and `extra` ms in some parts from step `since` to `until`."""
    random, history = np.random.default_rng(seed), WindowHistory()
    rows = []
    for step in range(steps):
        row = {part: value * (1 + noise * random.standard_normal()) for part, value in WORK.items()}
        for part, value in (extra or {}).items():
            row[part] += value if since <= step < until else 0.0
        row["communication"] = wait
        rows.append(row)
    history.add(step_table(rows))
    return history.windows()


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer", "host"])
def test_slow_phase_is_named(phase: str) -> None:
    """A rank that is slower in one phase is named with that phase and what it costs."""
    ranks = {rank: windows(200, seed=rank, wait=10) for rank in range(4)}
    ranks[2] = windows(200, seed=9, extra={phase: 10})
    found = compare(ranks).straggler

    assert found is not None
    assert (found.rank, found.phase, found.since_step) == (2, phase, 0)
    assert found.excess_ns == pytest.approx(10 * MS, rel=0.15)
    assert found.blame > 0.9


def test_equal_ranks_are_not_blamed() -> None:
    """Noise alone names nobody, over many seeds; the answer says what would have been seen."""
    for seed in range(40):
        comparison = compare({rank: windows(300, seed=100 * seed + rank) for rank in range(4)})

        assert comparison.straggler is None
        assert 0.01 * comparison.step_ns < comparison.detectable_ns < 0.1 * comparison.step_ns


def test_waiting_is_not_slowness() -> None:
    """A rank that waits long for the others is their victim: communication does not count against it."""
    ranks = {0: windows(200, seed=1, wait=50), 1: windows(200, seed=2, extra={"forward": 50})}
    found = compare(ranks).straggler

    assert found is not None
    assert found.rank == 1


@pytest.mark.parametrize("since", [64, 400])
def test_since_when(since: int) -> None:
    """The verdict says from about which step on, and its cost is that of the slow part of the run."""
    ranks = {0: windows(800, seed=1), 1: windows(800, seed=2, extra={"backward": 15}, since=since)}
    found = compare(ranks).straggler

    assert found is not None
    assert abs(found.since_step - since) <= 16
    assert found.excess_ns == pytest.approx(15 * MS, rel=0.15)


def test_small_excess_is_not_worth_a_verdict() -> None:
    """Less than 2 % of the step is nothing to wake a person for, however certain."""
    ranks = {0: windows(400, seed=1, noise=0.0), 1: windows(400, seed=2, noise=0.0, extra={"forward": 1.0})}
    comparison = compare(ranks)

    assert comparison.straggler is None
    assert comparison.detectable_ns == pytest.approx(0.02 * comparison.step_ns)


def test_two_equally_slow_ranks_are_an_imbalance() -> None:
    """If two of four are equally slow, none of them alone costs the job anything."""
    ranks = {rank: windows(200, seed=rank, extra={"forward": 20} if rank > 1 else None) for rank in range(4)}

    assert compare(ranks).straggler is None


def test_one_rank_or_few_steps_cannot_be_compared() -> None:
    """A single rank, or too few windows, gives no straggler, and nothing that would have been seen."""
    alone = compare({0: windows(400)})
    few = compare({0: windows(16), 1: windows(16, extra={"forward": 50})})

    assert (alone.straggler, alone.windows) == (None, 0)
    assert few.straggler is None
    assert few.windows < LEAST_WINDOWS
    assert few.detectable_ns == float("inf")


def test_ranks_of_different_length() -> None:
    """A rank that recorded fewer steps is compared over the windows that all have."""
    ranks = {0: windows(8000, seed=1), 1: windows(900, seed=2, extra={"data": 20})}
    found = compare(ranks).straggler

    assert found is not None
    assert (found.rank, found.phase) == (1, "data")


def test_nothing_in_common() -> None:
    """Ranks without a common window are not compared, and nothing fails."""
    history = WindowHistory()
    history.add(step_table([WORK] * 64, first_step=10_000))

    assert compare({0: windows(64), 1: history.windows()}).straggler is None
