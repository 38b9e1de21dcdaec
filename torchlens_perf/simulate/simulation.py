"""Simulated training: the steps of all ranks of a job of any size, with planted faults.

Steps are computed in blocks. A block depends only on the seed and its number, so blocks can be
computed separately, and again. Random variation is resampled from recorded runs
(recorded_noise.npz) in excerpts of one block, which preserves heavy tails and the correlation of
neighbouring steps. Pure: the module reads no clock and no other file.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.step_bins import BinBatch
from torchlens_perf.analysis.statistics.steps import zero_device_columns
from torchlens_perf.errors import require
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.run.verdicts import range_end
from torchlens_perf.verdicts.stragglers.placement import Placement

# Number of steps in a block.
BLOCK = 32
_MIN_STEP_NS, _MAX_STEP_NS = 1_000_000, 600_000_000_000
# With noise, a part of the step still lasts at least this share of its usual time.
_MIN_PART = 0.2
# Transfer time of the gradients once all ranks have arrived, as a share of the usual work.
_TRANSFER_SHARE = 0.03
# Transfer time of activations between tensor-parallel neighbours in forward and backward together,
# as a share of the usual work.
_TENSOR_TRANSFER_SHARE = 0.02
# Additional work of the last pipeline stage, which has the head and the loss.
_LAST_STAGE_SHARE = 0.05
_MICRO_BATCHES_PER_STAGE = 4


@dataclasses.dataclass(frozen=True)
class Topology:
    """The mesh of ranks in Megatron's order: tensor parallel varies fastest, then data parallel,
    then the pipeline stage."""

    dp: int
    tp: int = 1
    pp: int = 1
    node_size: int = 8
    """Number of ranks on one host."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            require(size >= 1, f"{field.name} must be 1 or more, got {size}")

    @property
    def rank_count(self) -> int:
        return self.dp * self.tp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate in each dimension of the mesh."""
        return {
            "tp": rank % self.tp,
            "dp": rank // self.tp % self.dp,
            "pp": rank // (self.tp * self.dp),
        }

    def group_ranks(self, dimension: str, rank: int) -> list[int]:
        """Return the sorted ranks that differ from this rank only in their coordinate of
        `dimension`."""
        grid = np.arange(self.rank_count).reshape(self.pp, self.dp, self.tp)
        at = self.coordinates(rank)
        where = [slice(None) if name == dimension else at[name] for name in ("pp", "dp", "tp")]
        return list(grid[tuple(where)].tolist())

    def node_index(self, rank: int) -> int:
        """Return the index of the rank's host."""
        return rank // self.node_size

    def host_name(self, rank: int) -> str:
        return f"node-{self.node_index(rank):04d}"

    def placement(self, rank: int) -> Placement:
        """Return the rank's placement.

        The ranks of each pipeline stage are a population, because stages do different work.
        """
        at = self.coordinates(rank)
        return Placement(self.host_name(rank), f"pp{at['pp']}" if self.pp > 1 else "", at)


@dataclasses.dataclass
class DraftSteps:
    """Consecutive steps of all ranks, to which faults add time. Times are in ns."""

    topology: Topology
    first_step: int
    usual_ns: float
    """A rank's usual work in a step. The size of a fault is a share of this time."""
    parts_ns: npt.NDArray[np.float32]
    """Work in each of OWN_PARTS, shape [ranks, steps, parts]."""
    transfer_ns: npt.NDArray[np.float32]
    """Transfer time of the gradients of the rank's data-parallel group, shape [ranks, steps]."""
    tensor_transfer_ns: npt.NDArray[np.float32]
    """Transfer time of the activations of the rank's tensor-parallel group in forward and backward
    together, shape [ranks, steps]."""
    workload: npt.NDArray[np.int64]
    """Number of tokens, shape [ranks, steps]; -1 if the job does not report the number."""
    flags: npt.NDArray[np.int64]
    random: np.random.Generator

    @property
    def step_numbers(self) -> npt.NDArray[np.int64]:
        return np.arange(self.first_step, self.first_step + self.parts_ns.shape[1])

    def copy(self) -> DraftSteps:
        """Return a copy with copied arrays, which shares the random number generator."""
        names = ("parts_ns", "transfer_ns", "tensor_transfer_ns", "workload", "flags")
        return dataclasses.replace(self, **{name: getattr(self, name).copy() for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that makes ranks slow, or a variation that only looks like a fault.

    It lasts from step `since` to before step `until`, or to the end.
    """

    since: int = 0
    until: int | None = None

    def validate(self, topology: Topology) -> None:
        """Raise ConfigError if a job of this topology cannot have the fault."""
        raise NotImplementedError

    def plant_in(self, draft: DraftSteps) -> None:
        """Add the fault's time to the draft.

        Random numbers come only from the draft's generator, so the same seed gives the same run.
        """
        raise NotImplementedError

    def is_active(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return True for the steps in which the fault lasts."""
        return (steps >= self.since) & (steps < range_end(self.until))

    def at_fault(self, steps: npt.NDArray[np.int64], topology: Topology) -> npt.NDArray[np.bool_]:
        """Return True where the detector should name a rank, or its slow group: [ranks, steps]."""
        return np.zeros((topology.rank_count, len(steps)), bool)


@dataclasses.dataclass(frozen=True)
class SimulatedSteps:
    """Finished steps of all ranks, with times in ns.

    Work is float32, which is precise to 10 µs for a step of several minutes.
    """

    topology: Topology
    first_step: int
    duration_ns: npt.NDArray[np.float64]
    """Duration of each step, shape [steps]. It is the same for all ranks."""
    parts_ns: npt.NDArray[np.float32]
    """Work in each of OWN_PARTS, shape [ranks, steps, parts]."""
    tensor_wait_ns: npt.NDArray[np.float64]
    """Wait for tensor-parallel neighbours in forward and in backward, including the transfer; shape
    [ranks, steps, 2]."""
    transfer_ns: npt.NDArray[np.float32]
    """Transfer time of the gradients of the rank's data-parallel group, shape [ranks, steps]."""
    workload: npt.NDArray[np.int64]
    flags: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.duration_ns)

    def head(self, count: int) -> SimulatedSteps:
        columns = ("parts_ns", "tensor_wait_ns", "transfer_ns", "workload", "flags")
        cut = {name: getattr(self, name)[:, :count] for name in columns}
        return dataclasses.replace(self, duration_ns=self.duration_ns[:count], **cut)

    def detector_rows(self, width: int) -> Iterator[tuple[str, BinBatch]]:
        """Yield each population with its rows for the detector: means over `width` steps.

        Steps at the end that do not fill a row are left out.
        """
        topology, count = self.topology, len(self) // width
        if not count:
            return
        work_ns = self.parts_ns.sum(axis=2)
        flags = self.flags[:, : count * width].reshape(-1, count, width)
        workload = np.where(self.workload >= 0, self.workload, np.nan)
        stage_ranks = topology.tp * topology.dp
        for first in range(0, topology.rank_count, stage_ranks):
            ranks = np.arange(first, first + stage_ranks)
            shape = (stage_ranks, count)
            duration_ns = np.broadcast_to(_average_steps(self.duration_ns[None], width), shape)
            parts_ns, ready_ns = _average_steps(self.parts_ns[ranks], width), np.full(shape, np.nan)
            yield (
                topology.placement(first).population,
                BinBatch(
                    width=width,
                    ranks=ranks,
                    key=np.broadcast_to(self.first_step // width + np.arange(count), shape),
                    flags=np.bitwise_or.reduce(flags[ranks], axis=2),
                    duration_ns=duration_ns,
                    wait_ns=duration_ns - _average_steps(work_ns[ranks], width),
                    ready_ns=ready_ns,
                    workload=_average_steps(workload[ranks], width),
                    parts_ns=parts_ns,
                    **zero_device_columns(parts_ns, ready_ns),
                ),
            )


class FaultEffect(NamedTuple):
    """The time in ns that a fault adds to each step."""

    work_ns: npt.NDArray[np.float32]
    """Time added to the work of each rank, shape [ranks, steps]."""
    cost_ns: npt.NDArray[np.float64]
    """Time added to the duration of the step, shape [steps]."""


class Simulation:
    """A simulated job. Blocks are not cached: each call of block() computes one."""

    def __init__(
        self,
        topology: Topology,
        *,
        faults: Sequence[Fault] = (),
        seed: int = 0,
        noise: float = 0.1,
        spread: float = 0.003,
        work_ns: float = 200e6,
    ) -> None:
        """Raise ConfigError for invalid values.

        noise: multiple of the noise in the recorded runs. spread: standard deviation of constant
        differences between ranks, as a share of their work. work_ns: a rank's usual work in a step.
        """
        require(seed >= 0, f"seed must be 0 or more, got {seed}")
        require(0 <= noise <= 4, f"noise must be 0 to 4 times the recorded noise, got {noise:g}")
        require(0 <= spread <= 0.2, f"spread must be 0 to 0.2 of the work, got {spread:g}")
        require(
            _MIN_STEP_NS <= work_ns <= _MAX_STEP_NS,
            f"a step's work must be 1 ms to 10 min, got {work_ns / 1e6:g} ms",
        )
        for fault in faults:
            fault.validate(topology)
        self.topology = topology
        self.faults = tuple(faults)
        self.seed = seed
        self.noise = noise
        self.work_ns = work_ns
        self._tensor_share = _TENSOR_TRANSFER_SHARE if topology.tp > 1 else 0.0
        lasting = (
            np.random.default_rng([seed, 1]).standard_normal(topology.rank_count).astype(np.float32)
        )
        stage = np.arange(topology.rank_count) // (topology.tp * topology.dp)
        last = (stage == topology.pp - 1) & (topology.pp > 1)
        self._usual = (1 + spread * lasting.clip(-4, 4)) * np.where(
            last, 1 + _LAST_STAGE_SHARE, 1
        ).astype(np.float32)

    def fault_effects(self, count: int) -> list[FaultEffect]:
        """Return the effect of each fault on the first `count` steps: the difference to the run
        without it."""
        work: list[list[npt.NDArray[np.float32]]] = [[] for _ in self.faults]
        cost: list[list[npt.NDArray[np.float64]]] = [[] for _ in self.faults]
        for number, steps in enumerate(self.steps(count)):
            for index in range(len(self.faults)):
                rest = self.block(number, index).head(len(steps))
                work[index].append((steps.parts_ns - rest.parts_ns).sum(axis=2))
                cost[index].append(steps.duration_ns - rest.duration_ns)
        return [
            FaultEffect(np.hstack(of_ranks), np.hstack(of_job))
            for of_ranks, of_job in zip(work, cost, strict=True)
        ]

    def transfer_share(self, dimension: str) -> float:
        """Return the usual transfer time of a group in a step, as a share of a rank's usual
        work."""
        return _TRANSFER_SHARE if dimension == "dp" else self._tensor_share

    def block(self, number: int, left_out: int | None = None) -> SimulatedSteps:
        """Return the steps from number * BLOCK up to, but not including, (number + 1) * BLOCK.

        left_out: index of a fault to leave out. It changes a copy but draws random numbers, so
        other faults draw the same.
        """
        topology = self.topology
        random = np.random.default_rng([self.seed, 2, number])
        shape = (topology.rank_count, BLOCK)
        usual = load_recorded_noise().profile * np.float32(self.work_ns)
        parts = self._usual[:, None, None] * usual + np.float32(
            self.noise * self.work_ns
        ) * self._draw_noise(random)
        np.maximum(parts, _MIN_PART * usual, out=parts)
        draft = DraftSteps(
            topology=topology,
            first_step=number * BLOCK,
            usual_ns=self.work_ns,
            parts_ns=parts,
            transfer_ns=np.full(shape, _TRANSFER_SHARE * self.work_ns, np.float32),
            tensor_transfer_ns=np.full(shape, self._tensor_share * self.work_ns, np.float32),
            workload=np.full(shape, -1, np.int64),
            flags=np.zeros(shape, np.int64),
            random=random,
        )
        for index, fault in enumerate(self.faults):
            fault.plant_in(draft if index != left_out else draft.copy())
        return _add_waits(draft)

    def steps(self, count: int) -> Iterator[SimulatedSteps]:
        """Yield the first `count` steps in blocks. The last block may be shorter."""
        for number in range(-(-count // BLOCK)):
            yield self.block(number).head(count - number * BLOCK)

    def _draw_noise(self, random: np.random.Generator) -> npt.NDArray[np.float32]:
        """Return noise [ranks, BLOCK, len(OWN_PARTS)]: a separate excerpt for each rank, plus an
        excerpt that is common to all ranks."""
        recorded = load_recorded_noise()
        streams, length, _ = recorded.individual.shape
        ranks = self.topology.rank_count
        stream = random.integers(streams, size=ranks)
        begin = random.integers(length - BLOCK + 1, size=ranks)
        run, first = random.integers(len(recorded.common)), random.integers(length - BLOCK + 1)
        alone = recorded.individual[stream[:, None], begin[:, None] + np.arange(BLOCK)]
        chance = alone + recorded.common[run, first : first + BLOCK]
        widened: npt.NDArray[np.float32] = np.zeros((ranks, BLOCK, len(OWN_PARTS)), np.float32)
        widened[:, :, recorded.parts] = chance
        return widened


def _add_waits(draft: DraftSteps) -> SimulatedSteps:
    """Return the draft's steps with the waits of all ranks.

    Tensor-parallel neighbours wait for each other at the end of forward and of backward. Pipeline
    stages wait for the slowest stage. All ranks wait for the last gradients. At the end of the
    step, they wait for the slowest optimizer.
    """
    topology, parts = draft.topology, draft.parts_ns
    grid = (topology.pp, topology.dp, topology.tp, parts.shape[1])
    at = {part: parts[:, :, OWN_PARTS.index(part)].astype(np.float64) for part in OWN_PARTS}
    halves = (at["data"] + at["forward"], at["recompute"] + at["backward"])
    travel = draft.tensor_transfer_ns.reshape(grid).max(axis=2, keepdims=True) / 2
    paces = [half.reshape(grid).max(axis=2, keepdims=True) + travel for half in halves]
    waits = [
        (pace - half.reshape(grid)).reshape(half.shape)
        for pace, half in zip(paces, halves, strict=True)
    ]
    stage_ns = (paces[0] + paces[1])[:, :, 0]
    after_ns = (at["optimizer"] + at["host"]).max(axis=0)
    # For m micro-batches, a pipeline of p stages takes as long as m + p - 1 micro-batches in its
    # slowest stage.
    filled = 1 + (topology.pp - 1) / (_MICRO_BATCHES_PER_STAGE * topology.pp)
    duration_ns = filled * stage_ns.max(axis=(0, 1)) + draft.transfer_ns.max(axis=0) + after_ns
    return SimulatedSteps(
        topology, draft.first_step, duration_ns, parts, np.stack(waits, axis=2), draft.transfer_ns, draft.workload,
        draft.flags,
    )  # fmt: skip


def _average_steps(values: npt.NDArray[Any], width: int) -> npt.NDArray[np.floating[Any]]:
    """Return means over each `width` steps: [ranks, rows, ...].

    Steps at the end that do not fill a row are left out.
    """
    if width == 1:
        return values
    ranks, steps = values.shape[:2]
    whole = values[:, : steps // width * width].reshape(ranks, -1, width, *values.shape[2:])
    return np.asarray(whole.mean(axis=2))


@dataclasses.dataclass(frozen=True)
class RecordedNoise:
    """Deviations in recorded runs, as shares of a rank's usual work."""

    profile: npt.NDArray[np.float32]
    """Share of each of the OWN_PARTS in the work. The shares add up to 1."""
    parts: npt.NDArray[np.int64]
    """Indices of the OWN_PARTS that have deviations."""
    individual: npt.NDArray[np.float32]
    """Difference between a rank's deviations and the common deviations of its run. Shape [ranks of
    all runs, steps, parts]."""
    common: npt.NDArray[np.float32]
    """Deviations that all ranks of a run have in common. Shape [runs, steps, parts]."""


@functools.cache
def load_recorded_noise() -> RecordedNoise:
    """Return the noise in the package. docs/internals/accuracy.md describes how it was recorded."""
    noise = resources.files("torchlens_perf.simulate").joinpath("recorded_noise.npz")
    with noise.open("rb") as file, np.load(file) as data:
        return RecordedNoise(
            profile=data["profile"].astype(np.float32),
            parts=np.array([OWN_PARTS.index(part) for part in data["parts"].tolist()]),
            individual=data["individual"].astype(np.float32),
            common=data["common"].astype(np.float32),
        )
