"""What is said of a slow rank: numbers from rows without noise, where each of them can be told exactly."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.support.planted import MS, WORK_MS, Job
from tests.support.saved import saved
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.verdicts.stragglers.episodes import Episode, described, phase_of, shared_cost_ns
from torchlens_perf.verdicts.stragglers.window import SlidingWindow

EMPTY = Episode(
    rank=1, phase="", judged_from_step=0, from_start=False, last_step=-1, until_step=None, named_step=0, excess_ns=0.0,
    phase_excess_ns=0.0, cost_ns=0.0, work_ns=0.0, others_work_ns=0.0, step_ns=0.0, z_score=0.0, slow_share=0.0,
    slow_excess_ns=0.0, more_workload=0.0,
)  # fmt: skip


def episode_of(job: Job, rank: int = 1, first: int = 0, phase: str = "") -> Episode:
    """The episode of a rank from row `first` on."""
    window = SlidingWindow(np.arange(job.ranks), 1)
    window.put(job.block())
    keys, present = window.comparable(first, job.rows)
    series = window.excess_ns if phase != "cpu" else window.ready_ns
    episode = dataclasses.replace(EMPTY, rank=rank, phase=phase)
    others = np.delete(present, rank)
    return described(episode, window, rank, others, keys, series[rank, keys].astype(np.float64), 2 * MS)


def parts(**ms: float) -> np.ndarray:
    return np.array([ms.get(part, 0.0) * MS for part in OWN_PARTS])


class TestPhase:
    @pytest.mark.parametrize("phase", OWN_PARTS)
    def test_the_largest_excess(self, phase: str) -> None:
        """The phase with the largest excess is the one, whatever it usually takes."""
        found = phase_of(parts(data=1, optimizer=1) + parts(**{phase: 9}), parts(**WORK_MS))

        assert found == (phase, pytest.approx((9 + (phase in ("data", "optimizer"))) * MS))

    @pytest.mark.parametrize(
        ("forward", "backward", "phase", "ms"),
        [
            (6, 11, "compute", 17),  # by the same share
            (9, 8, "compute", 17),  # not quite
            (6, 0, "forward", 6),
            (1, 11, "backward", 11),
            (17, 5, "forward", 17),  # by more than three times the share
            (-3, 11, "backward", 11),
        ],
    )
    def test_compute(self, forward: float, backward: float, phase: str, ms: float) -> None:
        """Forward and backward that are slower alike are one thing, a rank that computes slowly; else they are two."""
        found = phase_of(parts(forward=forward, backward=backward), parts(**WORK_MS))

        assert found == (phase, pytest.approx(ms * MS))

    def test_compute_needs_a_share_of_both(self) -> None:
        """Where the forward pass is hardly any part of the excess, it is the backward pass, whatever the ratios."""
        usual = parts(forward=5, backward=170)

        assert phase_of(parts(forward=0.5, backward=17), usual)[0] == "backward"

    def test_compute_is_not_the_largest(self) -> None:
        """Where another phase is slower still, it is that one."""
        assert phase_of(parts(forward=6, backward=11, data=12), parts(**WORK_MS))[0] == "data"


def test_constant() -> None:
    """Without noise, all numbers are what was planted."""
    found = episode_of(Job.of(4, 100, noise=0.0).slow(1, 20, "optimizer", slice(40, None)), first=40)

    assert (found.phase, found.last_step, found.slow_share) == ("optimizer", 99, 1.0)
    for name, ms in {
        "excess_ns": 20, "slow_excess_ns": 20, "phase_excess_ns": 20, "cost_ns": 20, "work_ns": 220,
        "others_work_ns": 200, "step_ns": 224,
    }.items():  # fmt: skip
        assert getattr(found, name) == pytest.approx(ms * MS, rel=1e-5), name
    assert found.z_score == pytest.approx(4 * np.sqrt(60))  # ten standard deviations a row, clipped to four


def test_now_and_then() -> None:
    """Slow in every fourth step: the share of steps, the excess in those, and the mean over all."""
    found = episode_of(Job.of(4, 100, noise=0.0).slow(1, 40, "data", slice(0, None, 4)))

    assert found.slow_share == 0.25
    assert found.slow_excess_ns == pytest.approx(40 * MS, rel=1e-5)
    assert found.excess_ns == found.phase_excess_ns == pytest.approx(10 * MS, rel=1e-5)
    assert found.cost_ns == pytest.approx(10 * MS, rel=1e-5)
    assert found.phase == "data"


def test_a_single_stall() -> None:
    """Five seconds in one row do not hide what the rank does in all others, and count in none of the numbers."""
    job = Job.of(4, 100, noise=0.0).slow(1, 20, "optimizer").slow(1, 5000, "data", slice(70, 71))
    found = episode_of(job)

    assert (found.phase, found.slow_share, found.last_step) == ("optimizer", 1.0, 99)
    for name, ms in {"excess_ns": 20, "slow_excess_ns": 20, "cost_ns": 20, "work_ns": 220}.items():
        assert getattr(found, name) == pytest.approx(ms * MS, rel=1e-5), name


def test_cost_is_what_the_step_would_gain() -> None:
    """With a second slow rank, only what this one is slower than that; with a slower one, nothing."""
    job = Job.of(4, 50, noise=0.0).slow(1, 20).slow(2, 15)

    assert episode_of(job, 1).cost_ns == pytest.approx(5 * MS, rel=1e-4)
    assert episode_of(job, 2).cost_ns == 0.0


def shared(job: Job, *ranks: int, first: int = 0) -> float:
    """What several ranks together cost from row `first` on."""
    window = SlidingWindow(np.arange(job.ranks), 1)
    window.put(job.block())
    keys, present = window.comparable(first, job.rows)
    return shared_cost_ns(window, np.array(ranks), np.delete(present, ranks), keys)


def test_cost_of_several() -> None:
    """Each of them costs nothing, for the others are as slow; together, what the rest would do without them."""
    job = Job.of(8, 60, noise=0.0).slow(2, 20).slow(3, 20).slow(6, 5)

    assert episode_of(job, 2).cost_ns == episode_of(job, 3).cost_ns == 0.0
    assert shared(job, 2, 3) == pytest.approx(15 * MS, rel=1e-4)
    assert shared(job, 2, 3, 6) == pytest.approx(20 * MS, rel=1e-4)
    assert shared(job.slow(2, 5000, "data", slice(40, 41)), 2, 3) == pytest.approx(15 * MS, rel=1e-4)  # a single stall


@pytest.mark.parametrize("ranks", [(0, 1), (4, 5, 6), (0, 1, 2, 3)])
def test_cost_of_several_without_what_noise_gives_any(ranks: tuple[int, ...]) -> None:
    """Some ranks that are like the others cost nothing, though one of them is often the slowest."""
    assert shared(Job.of(8, 200, noise=0.05), *ranks) < 1.5 * MS


def test_cost_without_what_noise_gives_any_rank() -> None:
    """A rank that is like the others costs nothing, though each is the slowest one now and then."""
    job = Job.of(4, 200, noise=0.05)

    assert all(episode_of(job, rank).cost_ns < 0.7 * MS for rank in range(4))


def test_lack_of_a_cpu() -> None:
    """The phase stays, the excess is the time without a CPU, and the cost counts it as the rank's own."""
    job = Job.of(4, 50, noise=0.0)
    job.ready_ns[:] = 0.0
    job.ready_ns[1] = 30 * MS
    found = episode_of(job, 1, phase="cpu")

    assert (found.phase, found.phase_excess_ns) == ("cpu", found.excess_ns)
    assert found.excess_ns == pytest.approx(30 * MS)
    assert found.cost_ns == pytest.approx(30 * MS)
    assert found.work_ns == pytest.approx(200 * MS)


def test_cost_is_no_more_than_the_excess() -> None:
    """A slow rank that lacks a CPU as well: what the job waits for because of that is none of its work."""
    job = Job.of(4, 50, noise=0.0).slow(1, 20)
    job.ready_ns[:] = 0.0
    job.ready_ns[1] = 30 * MS
    found = episode_of(job, 1)

    assert found.excess_ns == pytest.approx(20 * MS)
    assert found.cost_ns == pytest.approx(20 * MS)


def test_more_workload() -> None:
    """How much more it had to do than the median of the others, as a share; 0 where that is not known."""
    job = Job.of(4, 50, noise=0.0).slow(1, 20)
    job.workload[:] = np.array([[100], [130], [90], [100]])
    assert episode_of(job).more_workload == pytest.approx(0.3)
    for rank in (3, 1):
        job.workload[rank, 7] = np.nan
        assert episode_of(job).more_workload == 0.0
        job.workload[rank, 7] = 100
    job.workload[:] = 0
    assert episode_of(job).more_workload == 0.0
    job = Job.of(2, 50, noise=0.0).slow(1, 20)
    job.workload[:] = np.array([[100], [130]])
    assert episode_of(job).more_workload == pytest.approx(0.3)


def test_of_many_others_a_sample() -> None:
    """With hundreds of ranks the others' usual times are those of a sample of them, and the same."""
    found = episode_of(Job.of(600, 20, noise=0.01).slow(1, 20, "host"))

    assert found.others_work_ns == pytest.approx(200 * MS, rel=0.005)
    assert (found.phase, found.phase_excess_ns) == ("host", pytest.approx(20 * MS, rel=0.02))


def test_json() -> None:
    """An episode survives plain JSON."""
    for changes in ({}, {"until_step": 90}):
        episode: Any = dataclasses.replace(episode_of(Job.of(2, 30).slow(1, 20)), **changes)
        assert saved(episode) == episode
