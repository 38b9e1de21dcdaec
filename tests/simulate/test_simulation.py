"""Simulated training: what is planted is there and nothing else; ranks wait for each other; noise is as recorded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.simulations import simulation, table_of, wait_ns
from torchlens_perf.analysis.statistics.step_bins import StepBinMaker
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.run.ring import Flag
from torchlens_perf.simulate.rings import Timeline
from torchlens_perf.simulate.simulation import BLOCK, Simulation, Topology, recorded_noise
from torchlens_perf.verdicts.stragglers.window import BinBatch

WORK_NS = 200e6
AT_FAULT = [
    "constant:rank=3,share=0.2,since=10,until=50",
    "constant:rank=3,share=0.2,phase=data",
    "drifting:rank=3,share=0.2,since=10,over=60",
    "intermittent:rank=3,share=0.2,since=10",
    "moving:ranks=1+5,share=0.2,every=20,since=10",
    "node:node=1,share=0.2,since=10",
    "stalls:rank=3,share=2,every=10,since=10",
]
NOBODYS = ["link:rank=3,share=0.2", "pauses:share=0.3,every=10", "variable_length:spread=0.2"]


def parts(run: Simulation, blocks: int = 3) -> np.ndarray:
    return np.concatenate([run.block(number).parts_ns for number in range(blocks)], axis=1)


@given(
    dp=st.integers(1, 4),
    tp=st.integers(1, 4),
    pp=st.integers(1, 4),
    noise=st.floats(0, 4),
    seed=st.integers(0, 1 << 30),
    faults=st.lists(st.sampled_from([text for text in AT_FAULT if "rank=" in text] + NOBODYS), max_size=2),
)
def test_ranks_wait_for_each_other(dp: int, tp: int, pp: int, noise: float, seed: int, faults: list[str]) -> None:
    """In any job, with any noise and faults, steps last equally long on all ranks: own work, and waiting that is never
    negative, of which the tensor-parallel part is a part. Without stages, all wait for the last gradients."""
    topology = Topology(dp, tp, pp)
    planted = [text.replace("rank=3", f"rank={topology.ranks - 1}") for text in faults]
    steps = simulation(*planted, topology=topology, noise=noise, seed=seed).block(1)

    assert (wait_ns(steps) >= -1).all()
    assert (wait_ns(steps) - steps.tensor_wait_ns.sum(axis=2) >= -1).all()
    assert (steps.tensor_wait_ns >= -1).all()
    assert (steps.parts_ns >= 0).all()
    timeline = Timeline.of(steps)
    assert min(timeline.gradients_ns.min(), timeline.norm_ns.min()) >= 0
    if pp == tp == 1:
        until_gradients, after = steps.parts_ns[:, :, :4].sum(axis=2), steps.parts_ns[:, :, 4:].sum(axis=2)
        expected = until_gradients.max(axis=0) + steps.transfer_ns.max(axis=0) + after.max(axis=0)
        assert steps.duration_ns == pytest.approx(expected, rel=1e-4)
    tables = [table_of(steps, rank) for rank in range(topology.ranks)]
    for table in tables:
        assert (table.duration_ns == tables[0].duration_ns).all()
        assert (table.parts_ns.sum(axis=1) == table.duration_ns).all()


def test_same_seed_same_run() -> None:
    """A block depends on the seed and its number alone, whichever was made before; another seed is another run."""
    first, again = (
        simulation("stalls:rank=1,share=1,every=3", seed=5),
        simulation("stalls:rank=1,share=1,every=3", seed=5),
    )
    for number in (2, 0, 2):
        assert (again.block(number).parts_ns == first.block(number).parts_ns).all()

    other = simulation("stalls:rank=1,share=1,every=3", seed=6)
    assert (other.block(0).parts_ns != first.block(0).parts_ns).mean() > 0.5
    assert (first.block(0).parts_ns != first.block(1).parts_ns).mean() > 0.5


def test_noise_is_cut_out_of_recordings() -> None:
    """A rank's deviations are an unbroken excerpt of some recorded rank's, and one of what its run had in common."""
    recorded = recorded_noise()
    steps = simulation(noise=0.01, spread=0.0, topology=Topology(1)).block(0)
    deviations = (steps.parts_ns[0] / WORK_NS - recorded.profile)[:, recorded.parts] / 0.01
    excerpts, commons = (
        np.lib.stride_tricks.sliding_window_view(values, BLOCK, axis=1).swapaxes(2, 3)
        for values in (recorded.individual, recorded.common)
    )
    errors = [np.abs(excerpts + common - deviations).max(axis=(2, 3)).min() for run in commons for common in run]

    assert min(errors) < 1e-3
    assert np.median(errors) > 0.1  # of all other pairs none fits


def test_noise_is_in_proportion() -> None:
    """Twice the noise is twice the deviation, and none is none."""
    deviations = []
    for noise in (0.0, 0.05, 0.1):
        work = parts(simulation(noise=noise, spread=0.0)).sum(axis=2)
        deviations.append(float((work - work.mean(axis=0)).std() / WORK_NS))

    assert deviations[0] < 1e-6
    assert deviations[2] == pytest.approx(2 * deviations[1], rel=0.05)
    assert deviations[2] == pytest.approx(0.1 * recorded_noise().deviation[0], rel=0.4)


@pytest.mark.parametrize("text", AT_FAULT)
def test_fault_is_where_it_is_planted(text: str) -> None:
    """Own work differs from that of the same run without the fault on the ranks and steps at fault, and nowhere else;
    by the share that was asked for."""
    faulty, clean = simulation(text), simulation()
    extra = (parts(faulty).astype(float) - parts(clean)).sum(axis=2) / WORK_NS
    for step in range(extra.shape[1]):
        others = sorted(set(range(8)) - faulty.slow_ranks(step))
        assert np.abs(extra[others, step]).max(initial=0) < 1e-6, step
    at_fault = [extra[rank, step] for step in range(extra.shape[1]) for rank in faulty.slow_ranks(step)]

    assert max(at_fault) > 0.15
    if text.startswith(("constant", "moving", "node")):
        assert at_fault == pytest.approx([0.2] * len(at_fault), abs=1e-5)


@pytest.mark.parametrize("text", NOBODYS)
def test_nobody_is_at_fault(text: str) -> None:
    """A slow link, pauses of all ranks and variable lengths change the run and are no rank's fault."""
    changed, clean = simulation(text), simulation()

    assert changed.slow_ranks(20) == frozenset()
    assert np.abs(changed.block(0).duration_ns - clean.block(0).duration_ns).max() > 0.05 * WORK_NS


def test_slow_link_is_nobodys_work() -> None:
    """A slow link makes every step longer by what its group's transfer takes, and no rank's own work."""
    slow, clean = simulation("link:rank=3,share=0.2").block(0), simulation().block(0)

    assert (slow.parts_ns == clean.parts_ns).all()
    assert slow.duration_ns - clean.duration_ns == pytest.approx(np.full(BLOCK, 0.2 * WORK_NS), rel=1e-3)
    assert np.flatnonzero((slow.transfer_ns > clean.transfer_ns).all(axis=1)).tolist() == [1, 3, 5, 7]


def test_told_workload_is_in_proportion() -> None:
    """Tokens are told where asked for, and computing takes as long as they are many."""
    told, silent = simulation("variable_length:reported=yes", noise=0).block(0), simulation("variable_length:", noise=0)
    forward = told.parts_ns[:, :, OWN_PARTS.index("forward")]

    assert np.corrcoef(told.workload.ravel(), forward.ravel())[0, 1] > 0.99
    assert (silent.block(0).workload == -1).all()


def test_pauses_are_flagged() -> None:
    """A step with a pause says that garbage was collected, on those ranks that paused: one at a time, or all."""
    alone, together = (
        simulation(f"pauses:share=0.3,every=10{how}").block(0).flags & Flag.COLLECTED > 0
        for how in ("", ",together=yes")
    )

    assert 0.05 < alone.mean() < 0.2
    assert ((alone.sum(axis=0) > 0) & (alone.sum(axis=0) < 8)).any()
    assert set(together.sum(axis=0).tolist()) == {0, 8}


@pytest.mark.parametrize("width", [1, 4])
def test_rows_are_those_of_the_sidecar(width: int) -> None:
    """The rows that go straight to the judge are those that the sidecar makes of the same steps."""
    steps = simulation("variable_length:reported=yes", "pauses:share=0.2", topology=Topology(2, 2, 2)).block(2)
    for population, block in steps.blocks(width):
        for index, rank in enumerate(block.ranks.tolist()):
            rows = StepBinMaker(width).add(table_of(steps, rank))
            assert rows is not None
            made = BinBatch.of(rank, rows)
            assert population == steps.topology.place(rank).population
            assert (block.key[index] == made.key[0]).all()
            assert (block.flags[index] == made.flags[0]).all()
            for name in ("duration_ns", "wait_ns", "workload", "parts_ns"):
                assert getattr(block, name)[index] == pytest.approx(getattr(made, name)[0], rel=1e-5, abs=10), name


def test_coordinates_and_groups() -> None:
    """Ranks are numbered as Megatron does; a group shares all coordinates but one; stages are not compared."""
    topology = Topology(dp=2, tp=2, pp=2, node_size=4)

    assert topology.coordinates(5) == {"tp": 1, "dp": 0, "pp": 1}
    assert (topology.group("tp", 5), topology.group("dp", 5), topology.group("pp", 5)) == ([4, 5], [5, 7], [1, 5])
    assert topology.place(5).population != topology.place(1).population
    assert (topology.host(3), topology.host(4)) == ("node-0000", "node-0001")


def test_recorded_noise_is_small_and_whole() -> None:
    """The noise that ships has no gaps, is centred, and sums up to the work."""
    noise = recorded_noise()

    assert np.isfinite(noise.individual).all()
    assert np.isfinite(noise.common).all()
    assert float(noise.profile.sum()) == pytest.approx(1, abs=1e-3)
    assert np.abs(noise.individual.mean(axis=1)).max() < 0.05
    assert noise.individual.shape[1] >= 4 * BLOCK
    assert 0.1 < noise.deviation[1] < noise.deviation[0] < 0.3
