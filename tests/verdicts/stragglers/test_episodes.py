"""Measurements of episodes of slow ranks, on step bins without noise."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.support.planted import MS, WORK_MS, Job
from tests.support.saved import save_and_load
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.verdicts.stragglers.episodes import (
    Episode,
    SharedCost,
    compute_shared_costs,
    measure_episode,
    phase_of_excess,
)
from torchlens_perf.verdicts.stragglers.window import SlidingWindow

EMPTY = Episode(
    rank=1, phase="", judged_from_step=0, from_start=False, last_step=-1, until_step=None, named_step=0, excess_ns=0.0,
    phase_excess_ns=0.0, cost_ns=0.0, work_ns=0.0, others_work_ns=0.0, step_ns=0.0, z_score=0.0, slow_share=0.0,
    slow_excess_ns=0.0, more_workload=0.0,
)  # fmt: skip


def episode_of(job: Job, rank: int = 1, first: int = 0, phase: str = "") -> Episode:
    """Return the episode of a rank from bin `first` on."""
    window = SlidingWindow(np.arange(job.ranks), 1)
    window.add_rows(job.block())
    keys, present = window.comparable_rows(first, job.rows)
    series = window.excess_ns if phase != "cpu" else window.ready_ns
    episode = dataclasses.replace(EMPTY, rank=rank, phase=phase)
    others = np.delete(present, rank)
    return measure_episode(
        episode, window, rank, others, keys, series[rank, keys].astype(np.float64), 2 * MS
    )


def parts(**ms: float) -> np.ndarray:
    return np.array([ms.get(part, 0.0) * MS for part in OWN_PARTS])


class TestPhase:
    @pytest.mark.parametrize("phase", OWN_PARTS)
    def test_phase_of_an_episode_is_the_part_with_the_largest_excess(self, phase: str) -> None:
        found = phase_of_excess(parts(data=1, optimizer=1) + parts(**{phase: 9}), parts(**WORK_MS))

        assert found == (phase, pytest.approx((9 + (phase in ("data", "optimizer"))) * MS))

    @pytest.mark.parametrize(
        ("forward", "backward", "phase", "ms"),
        [
            (6, 11, "compute", 17),  # Equal relative excess.
            (9, 8, "compute", 17),  # Similar relative excess.
            (6, 0, "forward", 6),
            (1, 11, "backward", 11),
            (17, 5, "forward", 17),  # Forward has over three times the relative excess.
            (-3, 11, "backward", 11),
        ],
    )
    def test_similar_relative_excess_in_forward_and_backward_is_phase_compute(
        self, forward: float, backward: float, phase: str, ms: float
    ) -> None:
        found = phase_of_excess(parts(forward=forward, backward=backward), parts(**WORK_MS))

        assert found == (phase, pytest.approx(ms * MS))

    def test_phase_is_backward_if_forward_has_hardly_any_excess(self) -> None:
        usual = parts(forward=5, backward=170)

        assert phase_of_excess(parts(forward=0.5, backward=17), usual)[0] == "backward"

    def test_phase_is_another_part_if_its_excess_is_larger(self) -> None:
        assert (
            phase_of_excess(parts(forward=6, backward=11, data=12), parts(**WORK_MS))[0] == "data"
        )

    @pytest.mark.parametrize(
        ("host", "usual_host", "phase"),
        [
            (5, 20, "compute"),  # The host is slow in all its work.
            (1, 20, "forward"),  # The code between the phases is not slower.
            (0, 2, "compute"),  # There is too little of it to show how slow the host is.
        ],
    )
    def test_host_that_is_slow_in_all_its_work_is_slow_between_the_phases_too(
        self, host: float, usual_host: float, phase: str
    ) -> None:
        above, usual = parts(forward=20, backward=15, host=host), {"forward": 60, "backward": 50}

        assert phase_of_excess(above, parts(**usual, host=usual_host))[0] == "compute"
        assert (
            phase_of_excess(above, parts(**usual, host=usual_host), is_host_bound=True)[0] == phase
        )


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_phase_does_not_depend_on_the_noise_of_other_phases(phase: str) -> None:
    """In steps with a large excess, the noise of the other phases is above its mean."""
    other = {"forward": "backward", "backward": "forward"}[phase]
    job = Job.of(4, 300, noise=0.0).slow(1, 6, phase)
    job.slow(1, 9, other, slice(0, None, 2)).slow(1, -9, other, slice(1, None, 2))
    found = episode_of(job)

    assert found.slow_share < 0.6
    assert found.phase == phase
    assert found.phase_excess_ns == pytest.approx(6 * MS, rel=0.01)


def test_measurements_of_a_constant_excess_are_exact() -> None:
    found = episode_of(
        Job.of(4, 100, noise=0.0).slow(1, 20, "optimizer", slice(40, None)), first=40
    )

    assert (found.phase, found.last_step, found.slow_share) == ("optimizer", 99, 1.0)
    for name, ms in {
        "excess_ns": 20, "slow_excess_ns": 20, "phase_excess_ns": 20, "cost_ns": 20, "work_ns": 220,
        "others_work_ns": 200, "step_ns": 224,
    }.items():  # fmt: skip
        assert getattr(found, name) == pytest.approx(ms * MS, rel=1e-5), name
    assert found.z_score == pytest.approx(
        4 * np.sqrt(60)
    )  # Each bin has ten standard deviations, which are clipped to four.


def test_intermittent_excess_has_its_share_of_steps() -> None:
    """The rank is slow in every fourth step."""
    found = episode_of(Job.of(4, 100, noise=0.0).slow(1, 40, "data", slice(0, None, 4)))

    assert found.slow_share == 0.25
    assert found.slow_excess_ns == pytest.approx(40 * MS, rel=1e-5)
    assert found.excess_ns == found.phase_excess_ns == pytest.approx(10 * MS, rel=1e-5)
    assert found.cost_ns == pytest.approx(10 * MS, rel=1e-5)
    assert found.phase == "data"


def test_single_stall_does_not_change_the_measurements() -> None:
    """The stall takes five seconds in one bin."""
    job = Job.of(4, 100, noise=0.0).slow(1, 20, "optimizer").slow(1, 5000, "data", slice(70, 71))
    found = episode_of(job)

    assert (found.phase, found.slow_share, found.last_step) == ("optimizer", 1.0, 99)
    for name, ms in {"excess_ns": 20, "slow_excess_ns": 20, "cost_ns": 20, "work_ns": 220}.items():
        assert getattr(found, name) == pytest.approx(ms * MS, rel=1e-5), name


def test_cost_is_the_excess_over_the_second_slowest_rank() -> None:
    job = Job.of(4, 50, noise=0.0).slow(1, 20).slow(2, 15)

    assert episode_of(job, 1).cost_ns == pytest.approx(5 * MS, rel=1e-4)
    assert episode_of(job, 2).cost_ns == 0.0


def shared(job: Job, *ranks: int) -> float:
    """Return the shared cost of several ranks."""
    return shared_costs(job, *ranks)[0].cost_ns


def shared_costs(job: Job, *ranks: int, units: tuple[int, ...] | None = None) -> list[SharedCost]:
    """units: a number for each rank, equal for ranks that are repaired together."""
    window = SlidingWindow(np.arange(job.ranks), 1)
    window.add_rows(job.block())
    keys, present = window.comparable_rows(0, job.rows)
    units_of = np.array(ranks if units is None else units)
    return compute_shared_costs(window, np.array(ranks), np.delete(present, ranks), keys, units_of)


def test_ranks_that_cost_nothing_alone_have_a_shared_cost() -> None:
    job = Job.of(8, 60, noise=0.0).slow(2, 20).slow(3, 20).slow(6, 5)

    assert episode_of(job, 2).cost_ns == episode_of(job, 3).cost_ns == 0.0
    assert shared(job, 2, 3) == pytest.approx(15 * MS, rel=1e-4)
    assert shared(job, 2, 3, 6) == pytest.approx(20 * MS, rel=1e-4)
    assert shared(job.slow(2, 5000, "data", slice(40, 41)), 2, 3) == pytest.approx(
        15 * MS, rel=1e-4
    )  # A single stall.


def test_each_rank_of_a_shared_cost_has_a_gain_and_a_cost_without_the_others() -> None:
    found = shared_costs(Job.of(8, 60, noise=0.0).slow(2, 20).slow(3, 15).slow(6, 5), 2, 3, 6)

    assert [each.cost_ns / MS for each in found] == pytest.approx([20, 20, 20], rel=1e-4)
    assert [each.gain_ns / MS for each in found] == pytest.approx([5, 0, 0], abs=1e-3)
    assert [each.lone_ns / MS for each in found] == pytest.approx([20, 15, 5], rel=1e-4)


def test_ranks_that_are_repaired_together_have_one_gain() -> None:
    job = Job.of(8, 60, noise=0.0).slow(2, 20).slow(3, 15).slow(6, 5)

    found = shared_costs(job, 2, 3, 6, units=(-1, -1, 6))
    assert [each.gain_ns / MS for each in found] == pytest.approx([15, 15, 0], abs=1e-3)


@pytest.mark.parametrize("ranks", [(0, 1), (4, 5, 6), (0, 1, 2, 3)])
def test_shared_cost_of_healthy_ranks_is_zero(ranks: tuple[int, ...]) -> None:
    """One of the ranks is often the slowest by chance."""
    assert shared(Job.of(8, 200, noise=0.05), *ranks) < 1.5 * MS


def test_cost_of_a_healthy_rank_is_zero() -> None:
    """Each rank is sometimes the slowest by chance."""
    job = Job.of(4, 200, noise=0.05)

    assert all(episode_of(job, rank).cost_ns < 0.7 * MS for rank in range(4))


def test_episode_in_phase_cpu_measures_the_time_runnable_without_a_cpu() -> None:
    """The cost includes the time runnable without a CPU."""
    job = Job.of(4, 50, noise=0.0)
    job.ready_ns[:] = 0.0
    job.ready_ns[1] = 30 * MS
    found = episode_of(job, 1, phase="cpu")

    assert (found.phase, found.phase_excess_ns) == ("cpu", found.excess_ns)
    assert found.excess_ns == pytest.approx(30 * MS)
    assert found.cost_ns == pytest.approx(30 * MS)
    assert found.work_ns == pytest.approx(200 * MS)


def test_cost_never_exceeds_the_excess() -> None:
    """The slow rank also lacks a CPU, which delays the job, too."""
    job = Job.of(4, 50, noise=0.0).slow(1, 20)
    job.ready_ns[:] = 0.0
    job.ready_ns[1] = 30 * MS
    found = episode_of(job, 1)

    assert found.excess_ns == pytest.approx(20 * MS)
    assert found.cost_ns == pytest.approx(20 * MS)


def test_more_workload_is_relative_to_the_median_of_the_other_ranks() -> None:
    """If the workload is unknown, the share is 0."""
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
    # Some steps have more work on all ranks.
    job.workload[:] = 100
    job.workload[:, ::8] = 1000
    assert episode_of(job).more_workload == 0.0


def test_usual_times_of_many_ranks_are_computed_from_a_sample() -> None:
    found = episode_of(Job.of(600, 20, noise=0.01).slow(1, 20, "host"))

    assert found.others_work_ns == pytest.approx(200 * MS, rel=0.005)
    assert (found.phase, found.phase_excess_ns) == ("host", pytest.approx(20 * MS, rel=0.02))


def test_episode_is_unchanged_by_a_json_round_trip() -> None:
    for changes in ({}, {"until_step": 90}):
        episode: Any = dataclasses.replace(episode_of(Job.of(2, 30).slow(1, 20)), **changes)
        assert save_and_load(episode) == episode
