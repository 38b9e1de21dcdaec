"""A rank's own time estimated from host and device times, compared with calculated values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.support.planted import WORK_NS, Job
from tests.verdicts.stragglers.test_detector import autocorrelated
from torchlens_perf.analysis.statistics.step_bins import BinBatch
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.stragglers.findings import Findings
from torchlens_perf.verdicts.stragglers.own_time import (
    PartTimes,
    compute_own_time,
    find_critical_ranks,
)
from torchlens_perf.verdicts.stragglers.window import SlidingWindow

MS = 1e6


def parts(**ms: float) -> np.ndarray:
    """Return the parts of one rank in one bin."""
    return np.array([[[ms.get(part, 0.0) * MS for part in OWN_PARTS]]])


def forward_ms(device_ms: list[float], issue_ms: list[float], lag_ms: list[float]) -> np.ndarray:
    """Return the own time of two ranks in a forward pass in which rank 0 waits in a collective."""
    lines = [
        np.concatenate([parts(forward=ms) for ms in of_ranks])
        for of_ranks in (device_ms, issue_ms, lag_ms)
    ]
    own_ns, _ = compute_own_time(PartTimes(*lines), PartTimes(*(each[1] for each in lines)))
    own_ms: np.ndarray = own_ns.sum(axis=2)[:, 0] / MS
    return own_ms


def own_alone_ms(device: np.ndarray, issue: np.ndarray, lag: np.ndarray) -> np.ndarray:
    """Return the own time, by part, of a job with one rank."""
    own_ns, _ = compute_own_time(
        PartTimes(device, issue, lag), PartTimes(device[0], issue[0], lag[0])
    )
    own_ms: np.ndarray = own_ns / MS
    return own_ms


def test_launch_bound_ranks_have_equal_own_times() -> None:
    """Rank 1 is last by chance, and its device is idle until its host has issued work.

    The device of rank 0 stalls until rank 1 arrives.
    """
    np.testing.assert_allclose(
        forward_ms([0.5, 8.0], issue_ms=[8.0, 8.0], lag_ms=[7.5, 0.0]), [8.0, 8.0]
    )


def test_own_time_of_a_slow_host_is_higher_by_its_extra_time() -> None:
    np.testing.assert_allclose(
        np.diff(forward_ms([0.5, 8.4], issue_ms=[8.0, 8.4], lag_ms=[7.9, 0.0])), [0.4]
    )


def test_host_time_hidden_by_a_lagging_device_is_not_own_time() -> None:
    """The slow rank's device lags by more than the host's time, so device times are compared."""
    np.testing.assert_allclose(
        forward_ms([10.0, 12.0], issue_ms=[9.0, 3.0], lag_ms=[30.0, 20.0]), [10.0, 12.0]
    )


def test_kernels_after_host_code_add_to_own_time() -> None:
    """Hosts need 15 ms and devices 8 ms, half of it after the host's code.

    A lag of the device hides the kernels on rank 0.
    """
    device_ms = [8.0, 19.0]

    np.testing.assert_allclose(
        forward_ms(device_ms, issue_ms=[15.0, 15.0], lag_ms=[11.0, 0.0]), [19.0, 19.0]
    )
    np.testing.assert_allclose(
        forward_ms(device_ms, issue_ms=[13.0, 15.0], lag_ms=[11.0, 0.0]), [17.0, 19.0]
    )
    np.testing.assert_allclose(
        forward_ms(device_ms, issue_ms=[15.0, 15.0], lag_ms=[0.0, 0.0]), [15.0, 19.0]
    )


def test_lag_of_the_device_hides_a_part_of_the_hosts_time() -> None:
    own_ms = own_alone_ms(parts(forward=2.0), parts(forward=9.0), parts(forward=3.0))

    np.testing.assert_allclose(own_ms, parts(forward=6.0) / MS)


def test_recomputation_counts_as_issued_in_the_backward_pass() -> None:
    """The sum of recomputation and backward pass on the host is compared with that on the device."""
    own_ms = own_alone_ms(parts(backward=4.0, recompute=3.0), parts(backward=6.0), parts())

    np.testing.assert_allclose(own_ms, parts(backward=4.0, recompute=3.0) / MS)


def test_rank_with_unknown_wait_is_not_the_slowest() -> None:
    assert find_critical_ranks(np.array([[np.nan, 0.0], [5.0, 1.0]])).tolist() == [1, 0]


def launch_bound(job: Job) -> BinBatch:
    """Return a job with equal hosts, whose devices need a twentieth of the time.

    In each bin, ranks wait for the slowest.
    """
    block, hosts_ns = job.block(), job.parts_ns.copy()
    is_last = np.arange(job.ranks)[:, None] == hosts_ns.sum(axis=2).argmax(axis=0)
    device_ns = np.where(is_last[:, :, None], hosts_ns, 0.05 * hosts_ns)
    wait_ns = block.duration_ns - device_ns.sum(axis=2)
    lag_ns = np.where(is_last[:, :, None], 0.0, hosts_ns)
    return dataclasses.replace(
        block,
        parts_ns=device_ns,
        issue_ns=hosts_ns,
        lag_ns=lag_ns,
        wait_ns=wait_ns,
        issue_ready_ns=0 * wait_ns,
    )


def judged(block: BinBatch) -> Findings:
    detector = StragglerDetector()
    detector.add_bin_batch("", block)
    return detector.judge(final=True)


@pytest.mark.parametrize("ahead", [0, 1])
def test_no_rank_is_reported_in_a_healthy_launch_bound_job(ahead: int) -> None:
    """One rank is ahead for a long time.

    By device times alone, the other rank would cost 95 % of the step.
    """
    job = Job.of(2, 120, noise=0.001)
    job.parts_ns[1 - ahead] *= 1.01
    block = launch_bound(job)
    by_devices = judged(
        dataclasses.replace(block, issue_ns=block.issue_ns * 0, lag_ns=block.lag_ns * 0)
    )

    assert judged(block).episodes == ()
    assert by_devices.episodes[0].rank == 1 - ahead
    assert by_devices.episodes[0].cost_ns > 0.9 * WORK_NS


def test_cost_of_a_slow_host_is_its_additional_time() -> None:
    """The slow host needs 30 ms more of 200 ms, in the forward pass."""
    (episode,) = judged(
        launch_bound(Job.of(2, 120, noise=0.001).slow(1, 30, "forward", slice(40, None)))
    ).episodes

    assert (episode.rank, episode.phase, episode.by_host) == (1, "forward", True)
    assert episode.since_step == pytest.approx(40, abs=2)
    assert episode.cost_ns == pytest.approx(30 * MS, rel=0.03)


def test_small_difference_between_hosts_is_not_reported() -> None:
    """Hosts that share their processors differ by 5 % of the step.

    By device times, a rank would be reported.
    """
    job = Job.of(2, 120, noise=0.001).slow(1, 10, "forward")

    assert judged(launch_bound(job)).episodes == ()
    assert judged(job.block()).episodes[0].rank == 1
    assert not judged(job.block()).episodes[0].by_host


def test_wander_of_hosts_seldom_makes_a_launch_bound_rank_slow() -> None:
    """Other programs slow a host by 5 % for some ten steps."""
    deviations = autocorrelated(np.random.default_rng(1), (10, 4, 300), 0.9)
    found = [
        judged(launch_bound(Job.of(4, 300, noise=0.05, deviations=each))) for each in deviations
    ]

    assert sum(len(each.episodes) > 0 for each in found) <= 2


def test_bins_without_host_times_of_all_ranks_are_compared_by_device_times() -> None:
    """Host times of other nodes are not sent."""
    job = Job.of(2, 40)
    block = job.block()
    block.issue_ns[:] = 1e12
    block.issue_ns[1, :20] = 0.0
    window = SlidingWindow(np.arange(2), 1)
    window.add_rows(block)

    window.comparable_rows(0, 40)

    np.testing.assert_allclose(window.own_ns[:, :20], block.parts_ns[:, :20].sum(axis=2), rtol=1e-6)
    np.testing.assert_allclose(window.own_ns[:, 20:40], 1e12 * len(OWN_PARTS), rtol=1e-3)
