"""Simulated training: the steps of all ranks of a job of any size, with planted faults.

Random variation is resampled from recorded runs (recorded_noise.npz) in excerpts of one block. This
keeps heavy tails and the correlation of neighbouring steps. Steps are made in blocks. A block
depends only on the seed and its number, so a run can be made piece by piece, and repeated. Pure: it
uses no clock, and no other file.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from torchlens_perf.analysis.statistics.steps import empty_host_line
from torchlens_perf.errors import ConfigError
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.stragglers.window import BinBatch

if TYPE_CHECKING:
    import numpy.typing as npt

# Number of steps in a block.
BLOCK = 32
_MIN_STEP_NS, _MAX_STEP_NS = 1_000_000, 600_000_000_000
# Noise makes no part shorter than this share of its usual time.
_MIN_PART = 0.2
# Transfer time of the gradients, as a share of the usual work, after all ranks have arrived.
_TRANSFER_SHARE = 0.03
# The same for activations between tensor-parallel neighbours, in forward and backward together.
_TENSOR_TRANSFER_SHARE = 0.02
# Additional work of the last pipeline stage, which has the head and the loss.
_LAST_STAGE_SHARE = 0.05
_MICRO_BATCHES_PER_STAGE = 4


@dataclasses.dataclass(frozen=True)
class Topology:
    """Ranks in Megatron's order: tensor-parallel neighbours first, then data parallel, then
    pipeline stages."""

    dp: int
    tp: int = 1
    pp: int = 1
    node_size: int = 8
    """Number of ranks on one host."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(
                    f"{field.name} must be 1 or more, got {getattr(self, field.name)}"
                )

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate in each dimension."""
        return {
            "tp": rank % self.tp,
            "dp": rank // self.tp % self.dp,
            "pp": rank // (self.tp * self.dp),
        }

    def group(self, dimension: str, rank: int) -> list[int]:
        """Return the ranks that share all coordinates of this rank except the one of `dimension`,
        in order."""
        grid = np.arange(self.ranks).reshape(self.pp, self.dp, self.tp)
        at = self.coordinates(rank)
        where = [slice(None) if name == dimension else at[name] for name in ("pp", "dp", "tp")]
        found: list[int] = grid[tuple(where)].tolist()
        return found

    def node(self, rank: int) -> int:
        """Return the index of the rank's host."""
        return rank // self.node_size

    def host(self, rank: int) -> str:
        return f"node-{self.node(rank):04d}"

    def place(self, rank: int) -> Placement:
        """Return the rank's placement.

        Each pipeline stage is a population, as stages do different work.
        """
        at = self.coordinates(rank)
        return Placement(self.host(rank), f"pp{at['pp']}" if self.pp > 1 else "", at)


@dataclasses.dataclass
class Draft:
    """Consecutive steps of all ranks, which faults may change. Times in ns."""

    topology: Topology
    first_step: int
    usual_ns: float
    """A rank's usual work in a step. The size of a fault is a share of it."""
    parts_ns: npt.NDArray[np.float32]
    """Own work, shape [ranks, steps, len(OWN_PARTS)]."""
    transfer_ns: npt.NDArray[np.float32]
    """Transfer time of the gradients of the rank's data-parallel group, shape [ranks, steps]."""
    tensor_transfer_ns: npt.NDArray[np.float32]
    """Transfer time of the activations of its tensor-parallel group, in forward and backward
    together, same shape."""
    workload: npt.NDArray[np.int64]
    """Shape [ranks, steps]; -1 if the job does not report it."""
    flags: npt.NDArray[np.int64]
    random: np.random.Generator

    @property
    def step(self) -> npt.NDArray[np.int64]:
        return np.arange(self.first_step, self.first_step + self.parts_ns.shape[1])

    def copy(self) -> Draft:
        """Return a copy with arrays of its own. The generator is shared."""
        names = ("parts_ns", "transfer_ns", "tensor_transfer_ns", "workload", "flags")
        return dataclasses.replace(self, **{name: getattr(self, name).copy() for name in names})


class Fault(Protocol):
    """A fault that makes ranks slow, or a variation that only looks like one."""

    def check(self, topology: Topology) -> None:
        """Raise ConfigError if the fault cannot be planted in a job of this topology."""

    def plant(self, draft: Draft) -> None:
        """Change the draft.

        Random numbers come from its generator only, so the same seed gives the same run.
        """

    def slow_ranks(self, step: int, topology: Topology) -> frozenset[int]:
        """Return the ranks at fault in a step, which the detector should name."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """Finished steps of all ranks.

    Times in ns. Work is float32, which is exact to 10 µs for times of minutes.
    """

    topology: Topology
    first_step: int
    duration_ns: npt.NDArray[np.float64]
    """Shape [steps]: all ranks end a step together."""
    parts_ns: npt.NDArray[np.float32]
    """Own work, shape [ranks, steps, len(OWN_PARTS)]."""
    tensor_wait_ns: npt.NDArray[np.float64]
    """Wait for tensor-parallel neighbours, with the transfer, in forward and in backward; [ranks,
    steps, 2]."""
    transfer_ns: npt.NDArray[np.float32]
    """Transfer time of the gradients of the rank's data-parallel group, shape [ranks, steps]."""
    workload: npt.NDArray[np.int64]
    flags: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.duration_ns)

    def head(self, count: int) -> Steps:
        columns = ("parts_ns", "tensor_wait_ns", "transfer_ns", "workload", "flags")
        cut = {name: getattr(self, name)[:, :count] for name in columns}
        return dataclasses.replace(self, duration_ns=self.duration_ns[:count], **cut)

    def blocks(self, width: int) -> Iterator[tuple[str, BinBatch]]:
        """Yield the detector's rows of `width` steps by population.

        Steps that do not fill a row are left out.
        """
        topology, count = self.topology, len(self) // width
        if not count:
            return
        work_ns, flags = (
            self.parts_ns.sum(axis=2),
            self.flags[:, : count * width].reshape(-1, count, width),
        )
        workload = np.where(self.workload >= 0, self.workload, np.nan)
        stage_ranks = topology.tp * topology.dp
        for first in range(0, topology.ranks, stage_ranks):
            ranks = np.arange(first, first + stage_ranks)
            shape = (stage_ranks, count)
            duration_ns = np.broadcast_to(_means(self.duration_ns[None], width), shape)
            parts_ns, ready_ns = _means(self.parts_ns[ranks], width), np.full(shape, np.nan)
            yield (
                topology.place(first).population,
                BinBatch(
                    width=width,
                    ranks=ranks,
                    key=np.broadcast_to(self.first_step // width + np.arange(count), shape),
                    flags=np.bitwise_or.reduce(flags[ranks], axis=2),
                    duration_ns=duration_ns,
                    wait_ns=duration_ns - _means(work_ns[ranks], width),
                    ready_ns=ready_ns,
                    workload=_means(workload[ranks], width),
                    parts_ns=parts_ns,
                    **empty_host_line(parts_ns, ready_ns),
                ),
            )


class Effect(NamedTuple):
    """The time that a fault adds to each step, in ns."""

    work_ns: npt.NDArray[np.float32]
    """Time added to the ranks' own work, shape [ranks, steps]."""
    cost_ns: npt.NDArray[np.float64]
    """Time added to the duration of the step, shape [steps]."""


class Simulation:
    """A simulated job. Each call of block() computes the block anew."""

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

        noise: factor on the noise of the recorded runs. spread: standard deviation of lasting
        differences between ranks, as a share of their work. work_ns: a rank's usual own work in a
        step.
        """
        if seed < 0:
            raise ConfigError(f"seed must be 0 or more, got {seed}")
        if not 0 <= noise <= 4:
            raise ConfigError(f"noise must be 0 to 4 times what was recorded, got {noise:g}")
        if not 0 <= spread <= 0.2:
            raise ConfigError(f"spread must be 0 to 0.2 of the work, got {spread:g}")
        if not _MIN_STEP_NS <= work_ns <= _MAX_STEP_NS:
            raise ConfigError(f"a step's work must be 1 ms to 10 min, got {work_ns / 1e6:g} ms")
        for fault in faults:
            fault.check(topology)
        self.topology = topology
        self.faults = tuple(faults)
        self.seed = seed
        self.noise = noise
        self.work_ns = work_ns
        self._tensor_share = _TENSOR_TRANSFER_SHARE if topology.tp > 1 else 0.0
        lasting = (
            np.random.default_rng([seed, 1]).standard_normal(topology.ranks).astype(np.float32)
        )
        stage = np.arange(topology.ranks) // (topology.tp * topology.dp)
        last = (stage == topology.pp - 1) & (topology.pp > 1)
        self._usual = (1 + spread * lasting.clip(-4, 4)) * np.where(
            last, 1 + _LAST_STAGE_SHARE, 1
        ).astype(np.float32)

    def block(self, number: int) -> Steps:
        """Return the steps from number * BLOCK to before (number + 1) * BLOCK."""
        return self._planted(number, None)

    def effects(self, count: int) -> list[Effect]:
        """Return the effect of each fault on the first `count` steps, with all other faults
        planted."""
        work: list[list[npt.NDArray[np.float32]]] = [[] for _ in self.faults]
        cost: list[list[npt.NDArray[np.float64]]] = [[] for _ in self.faults]
        for number in range(-(-count // BLOCK)):
            steps = self.block(number).head(count - number * BLOCK)
            for index in range(len(self.faults)):
                rest = self._planted(number, index).head(len(steps))
                work[index].append((steps.parts_ns - rest.parts_ns).sum(axis=2))
                cost[index].append(steps.duration_ns - rest.duration_ns)
        return [
            Effect(np.hstack(of_ranks), np.hstack(of_job))
            for of_ranks, of_job in zip(work, cost, strict=True)
        ]

    def transfer_share(self, dimension: str) -> float:
        """Return the usual time of a group's transfers in a step, as a share of a rank's usual
        work."""
        return _TRANSFER_SHARE if dimension == "dp" else self._tensor_share

    def _planted(self, number: int, left_out: int | None) -> Steps:
        """Return a block with all faults except the one with the index `left_out`.

        That fault still draws its random numbers, on a copy, so the others draw the same ones.
        """
        topology = self.topology
        random = np.random.default_rng([self.seed, 2, number])
        shape = (topology.ranks, BLOCK)
        usual = recorded_noise().profile * np.float32(self.work_ns)
        parts = self._usual[:, None, None] * usual + np.float32(
            self.noise * self.work_ns
        ) * self._chance(random)
        np.maximum(parts, _MIN_PART * usual, out=parts)
        draft = Draft(
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
            fault.plant(draft if index != left_out else draft.copy())
        return _finished(draft)

    def steps(self, count: int) -> Iterator[Steps]:
        """Yield the first `count` steps in blocks. The last block may be shorter."""
        for number in range(-(-count // BLOCK)):
            yield self.block(number).head(count - number * BLOCK)

    def slow_ranks(self, step: int) -> frozenset[int]:
        return frozenset().union(*(fault.slow_ranks(step, self.topology) for fault in self.faults))

    def _chance(self, random: np.random.Generator) -> npt.NDArray[np.float32]:
        """Return noise: an excerpt for each rank, plus one of the recorded common noise: [ranks,
        BLOCK, own parts]."""
        recorded = recorded_noise()
        streams, length, _ = recorded.individual.shape
        ranks = self.topology.ranks
        stream = random.integers(streams, size=ranks)
        begin = random.integers(length - BLOCK + 1, size=ranks)
        run, first = random.integers(len(recorded.common)), random.integers(length - BLOCK + 1)
        alone = recorded.individual[stream[:, None], begin[:, None] + np.arange(BLOCK)]
        chance = alone + recorded.common[run, first : first + BLOCK]
        widened: npt.NDArray[np.float32] = np.zeros((ranks, BLOCK, len(OWN_PARTS)), np.float32)
        widened[:, :, recorded.parts] = chance
        return widened


def _finished(draft: Draft) -> Steps:
    """Return finished steps, with the waits of all ranks.

    Tensor-parallel neighbours wait for each other at the end of forward and of backward. Pipeline
    stages wait for the longest stage. All ranks wait for the last gradients, and at the step's end
    for the longest optimizer.
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
    # A pipeline of p stages takes the time of m + p - 1 micro-batches in the longest stage for m
    # micro-batches.
    filled = 1 + (topology.pp - 1) / (_MICRO_BATCHES_PER_STAGE * topology.pp)
    duration_ns = filled * stage_ns.max(axis=(0, 1)) + draft.transfer_ns.max(axis=0) + after_ns
    return Steps(
        topology, draft.first_step, duration_ns, parts, np.stack(waits, axis=2), draft.transfer_ns, draft.workload,
        draft.flags,
    )  # fmt: skip


def _means(values: npt.NDArray[Any], width: int) -> npt.NDArray[np.floating[Any]]:
    """Return means over `width` steps: [ranks, rows, ...].

    Remaining steps at the end are left out.
    """
    if width == 1:
        return values
    ranks, steps = values.shape[:2]
    whole = values[:, : steps // width * width].reshape(ranks, -1, width, *values.shape[2:])
    means: npt.NDArray[np.floating[Any]] = whole.mean(axis=2)
    return means


@dataclasses.dataclass(frozen=True)
class RecordedNoise:
    """Deviations in recorded runs, as shares of a rank's usual work."""

    profile: npt.NDArray[np.float32]
    """Each own part's share of the work; sums to 1."""
    parts: npt.NDArray[np.int64]
    """Indices of the own parts that have deviations."""
    individual: npt.NDArray[np.float32]
    """A rank's deviations from the common ones of its run. Shape [ranks of all runs, steps,
    parts]."""
    common: npt.NDArray[np.float32]
    """Deviations that all ranks of a run have in common. Shape [runs, steps, parts]."""

    @property
    def deviation(self) -> tuple[float, float]:
        """Standard deviation of a rank's work over its steps, and its estimate by 1.48 median
        absolute deviations."""
        total = self.individual.sum(axis=2, dtype=np.float64)
        return float(total.std()), 1.4826 * float(np.median(np.abs(total - np.median(total))))


@functools.cache
def recorded_noise() -> RecordedNoise:
    """Return the noise that ships with the package. docs/internals/accuracy.md describes its
    recording.
    """
    noise = resources.files("torchlens_perf.simulate").joinpath("recorded_noise.npz")
    with noise.open("rb") as file, np.load(file) as data:
        return RecordedNoise(
            profile=data["profile"].astype(np.float32),
            parts=np.array([OWN_PARTS.index(part) for part in data["parts"].tolist()]),
            individual=data["individual"].astype(np.float32),
            common=data["common"].astype(np.float32),
        )
