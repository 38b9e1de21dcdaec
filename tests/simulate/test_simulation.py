"""Simulated training has the planted faults and no others.

Simulated ranks wait for each other. The noise of simulated ranks was recorded in real runs.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.simulations import simulation, slow_ranks, table_of, wait_ns
from torchlens_perf.analysis.statistics.step_bins import StepBinner
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.run.ring import Flag
from torchlens_perf.simulate.rings import Timeline
from torchlens_perf.simulate.simulation import BLOCK, Simulation, Topology, load_recorded_noise

WORK_NS = 200e6
RANKS_AT_FAULT = [
    "constant:rank=3,share=0.2,since=10,until=50",
    "constant:rank=3,share=0.2,phase=data",
    "drifting:rank=3,share=0.2,since=10,over=60",
    "intermittent:rank=3,share=0.2,since=10",
    "moving:ranks=1+5,share=0.2,every=20,since=10",
    "node:node=1,share=0.2,since=10",
    "stalls:rank=3,share=2,every=10,since=10",
]
NO_RANK_AT_FAULT = [
    "link:rank=3,share=0.2",
    "pauses:share=0.3,every=10",
    "variable_length:spread=0.2",
]


def recorded_deviation() -> tuple[float, float]:
    """Return the standard deviation of a rank's work over its steps, as recorded, and 1.48 times
    the median absolute deviation."""
    total = load_recorded_noise().individual.sum(axis=2, dtype=np.float64)
    return float(total.std()), 1.4826 * float(np.median(np.abs(total - np.median(total))))


def parts(run: Simulation, blocks: int = 3) -> np.ndarray:
    return np.concatenate([run.block(number).parts_ns for number in range(blocks)], axis=1)


@given(
    dp=st.integers(1, 4),
    tp=st.integers(1, 4),
    pp=st.integers(1, 4),
    noise=st.floats(0, 4),
    seed=st.integers(0, 1 << 30),
    faults=st.lists(
        st.sampled_from([text for text in RANKS_AT_FAULT if "rank=" in text] + NO_RANK_AT_FAULT),
        max_size=2,
    ),
)
def test_steps_last_equally_long_on_all_ranks(
    dp: int, tp: int, pp: int, noise: float, seed: int, faults: list[str]
) -> None:
    """A step is work and waiting, in any job, with any noise and faults.

    Waiting is never negative, and tensor-parallel waiting is a part of it. Without pipeline stages,
    all ranks wait for the last gradients.
    """
    topology = Topology(dp, tp, pp)
    # Small topologies have no rank 3, so faults are planted on the last rank.
    planted = [text.replace("rank=3", f"rank={topology.rank_count - 1}") for text in faults]
    steps = simulation(*planted, topology=topology, noise=noise, seed=seed).block(1)

    assert (wait_ns(steps) >= -1).all()
    assert (wait_ns(steps) - steps.tensor_wait_ns.sum(axis=2) >= -1).all()
    assert (steps.tensor_wait_ns >= -1).all()
    assert (steps.parts_ns >= 0).all()
    timeline = Timeline.from_steps(steps)
    assert min(timeline.gradients_ns.min(), timeline.norm_ns.min()) >= 0
    if pp == tp == 1:
        until_gradients, after = (
            steps.parts_ns[:, :, :4].sum(axis=2),
            steps.parts_ns[:, :, 4:].sum(axis=2),
        )
        expected = until_gradients.max(axis=0) + steps.transfer_ns.max(axis=0) + after.max(axis=0)
        assert steps.duration_ns == pytest.approx(expected, rel=1e-4)
    tables = [table_of(steps, rank) for rank in range(topology.rank_count)]
    for table in tables:
        assert (table.duration_ns == tables[0].duration_ns).all()
        assert (table.parts_ns.sum(axis=1) == table.duration_ns).all()


def test_same_seed_makes_the_same_run() -> None:
    """A block depends only on the seed and its number, not on the blocks made before it."""
    first, again = (
        simulation("stalls:rank=1,share=1,every=3", seed=5),
        simulation("stalls:rank=1,share=1,every=3", seed=5),
    )
    for number in (2, 0, 2):
        assert (again.block(number).parts_ns == first.block(number).parts_ns).all()

    other = simulation("stalls:rank=1,share=1,every=3", seed=6)
    assert (other.block(0).parts_ns != first.block(0).parts_ns).mean() > 0.5
    assert (first.block(0).parts_ns != first.block(1).parts_ns).mean() > 0.5


def test_simulated_noise_consists_of_excerpts_of_recordings() -> None:
    """A rank's deviations are the sum of two unbroken excerpts.

    One excerpt is of a recorded rank, the other one of the deviations common to a recorded run.
    """
    recorded = load_recorded_noise()
    steps = simulation(noise=0.01, spread=0.0, topology=Topology(1)).block(0)
    deviations = (steps.parts_ns[0] / WORK_NS - recorded.profile)[:, recorded.parts] / 0.01
    excerpts, commons = (
        np.lib.stride_tricks.sliding_window_view(values, BLOCK, axis=1).swapaxes(2, 3)
        for values in (recorded.individual, recorded.common)
    )
    errors = [
        np.abs(excerpts + common - deviations).max(axis=(2, 3)).min()
        for run in commons
        for common in run
    ]

    assert min(errors) < 1e-3
    # Pairs of excerpts other than the right one do not fit.
    assert np.median(errors) > 0.1


def test_deviation_is_proportional_to_the_noise_setting() -> None:
    deviations = []
    for noise in (0.0, 0.05, 0.1):
        work = parts(simulation(noise=noise, spread=0.0)).sum(axis=2)
        deviations.append(float((work - work.mean(axis=0)).std() / WORK_NS))

    # Without noise, all ranks have the same work.
    assert deviations[0] < 1e-6
    assert deviations[2] == pytest.approx(2 * deviations[1], rel=0.05)
    assert deviations[2] == pytest.approx(0.1 * recorded_deviation()[0], rel=0.4)


@pytest.mark.parametrize("text", RANKS_AT_FAULT)
def test_fault_slows_only_its_ranks_and_steps(text: str) -> None:
    """Compared with the same run without the fault, work grows by the requested share.

    Work of other ranks and steps stays the same.
    """
    faulty, clean = simulation(text), simulation()
    extra = (parts(faulty).astype(float) - parts(clean)).sum(axis=2) / WORK_NS
    for step in range(extra.shape[1]):
        others = sorted(set(range(8)) - slow_ranks(faulty, step))
        assert np.abs(extra[others, step]).max(initial=0) < 1e-6, step
    at_fault = [
        extra[rank, step] for step in range(extra.shape[1]) for rank in slow_ranks(faulty, step)
    ]

    assert max(at_fault) > 0.15
    if text.startswith(("constant", "moving", "node")):
        assert at_fault == pytest.approx([0.2] * len(at_fault), abs=1e-5)


@pytest.mark.parametrize("text", NO_RANK_AT_FAULT)
def test_fault_without_a_slow_rank_changes_step_times(text: str) -> None:
    """Examples are slow links, pauses of all ranks and variable sequence lengths."""
    changed, clean = simulation(text), simulation()

    group = {1, 3, 5, 7} if text.startswith("link") else set()
    assert slow_ranks(changed, 20) == group
    assert np.abs(changed.block(0).duration_ns - clean.block(0).duration_ns).max() > 0.05 * WORK_NS


def test_slow_link_makes_steps_longer_without_more_work() -> None:
    """Every step is longer by the time of the slow group's transfer."""
    slow, clean = simulation("link:rank=3,share=0.2").block(0), simulation().block(0)

    assert (slow.parts_ns == clean.parts_ns).all()
    assert slow.duration_ns - clean.duration_ns == pytest.approx(
        np.full(BLOCK, 0.2 * WORK_NS), rel=1e-3
    )
    # Ranks 1, 3, 5 and 7 are the data-parallel group of rank 3.
    assert np.flatnonzero((slow.transfer_ns > clean.transfer_ns).all(axis=1)).tolist() == [
        1,
        3,
        5,
        7,
    ]


def test_reported_workload_is_proportional_to_compute_time() -> None:
    """The number of tokens is reported only if the fault has `reported=yes`."""
    reported, unreported = (
        simulation("variable_length:reported=yes", noise=0).block(0),
        simulation("variable_length:", noise=0),
    )
    forward = reported.parts_ns[:, :, OWN_PARTS.index("forward")]

    assert np.corrcoef(reported.workload.ravel(), forward.ravel())[0, 1] > 0.99
    assert (unreported.block(0).workload == -1).all()


def test_steps_with_pauses_are_flagged_as_garbage_collection() -> None:
    """Only ranks that paused have the flag: single ranks, or all ranks with `together=yes`."""
    alone, together = (
        simulation(f"pauses:share=0.3,every=10{how}").block(0).flags & Flag.COLLECTED > 0
        for how in ("", ",together=yes")
    )

    # A pause every 10 steps on average is a share of 0.1.
    assert 0.05 < alone.mean() < 0.2
    assert ((alone.sum(axis=0) > 0) & (alone.sum(axis=0) < 8)).any()
    assert set(together.sum(axis=0).tolist()) == {0, 8}


@pytest.mark.parametrize("width", [1, 4])
def test_simulated_step_bins_equal_those_that_the_sidecar_makes(width: int) -> None:
    steps = simulation(
        "variable_length:reported=yes", "pauses:share=0.2", topology=Topology(2, 2, 2)
    ).block(2)
    for population, block in steps.detector_rows(width):
        for index, rank in enumerate(block.ranks.tolist()):
            rows = StepBinner(width).add_steps(table_of(steps, rank))
            assert rows is not None
            made = rows
            assert population == steps.topology.placement(rank).population
            assert (block.key[index] == made.key[0]).all()
            assert (block.flags[index] == made.flags[0]).all()
            for name in ("duration_ns", "wait_ns", "workload", "parts_ns"):
                assert getattr(block, name)[index] == pytest.approx(
                    getattr(made, name)[0], rel=1e-5, abs=10
                ), name


def test_ranks_are_numbered_as_in_megatron() -> None:
    """Ranks of a group differ in one coordinate only. Pipeline stages are not compared."""
    topology = Topology(dp=2, tp=2, pp=2, node_size=4)

    assert topology.coordinates(5) == {"tp": 1, "dp": 0, "pp": 1}
    assert (
        topology.group_ranks("tp", 5),
        topology.group_ranks("dp", 5),
        topology.group_ranks("pp", 5),
    ) == (
        [4, 5],
        [5, 7],
        [1, 5],
    )
    assert topology.placement(5).population != topology.placement(1).population
    assert (topology.host_name(3), topology.host_name(4)) == ("node-0000", "node-0001")


def test_recorded_noise_in_the_package_is_complete_and_centred() -> None:
    """The recorded noise has no gaps, and its profile sums up to the work."""
    noise = load_recorded_noise()

    assert np.isfinite(noise.individual).all()
    assert np.isfinite(noise.common).all()
    assert float(noise.profile.sum()) == pytest.approx(1, abs=1e-3)
    assert np.abs(noise.individual.mean(axis=1)).max() < 0.05
    assert noise.individual.shape[1] >= 4 * BLOCK
    deviation, robust = recorded_deviation()
    assert 0.1 < robust < deviation < 0.3
