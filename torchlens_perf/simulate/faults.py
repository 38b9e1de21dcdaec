"""The faults that a simulation can plant, and their text form:
`constant:rank=3,share=0.25,phase=forward`. Pure.

A share is relative to a rank's usual work in a whole step: share=0.05 adds 5 % of the step's work,
whichever phase becomes longer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from torchlens_perf.errors import ConfigError, require, unknown_word_text
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.run.ring import Flag
from torchlens_perf.simulate.simulation import DraftSteps, Fault, Topology

_TYPICAL_TOKENS = 4096
_DIMENSIONS = ("dp", "tp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SlowRanksFault(Fault):
    """A fault that makes some ranks' work longer in one phase. The phase "compute" is forward and
    backward together."""

    share: float
    phase: str = "compute"

    def validate(self, topology: Topology) -> None:
        _check_share(self.share)
        phases = ("compute", *OWN_PARTS)
        require(self.phase in phases, f"phase must be one of {', '.join(phases)}, got {self.phase}")
        for name in ("every", "over"):
            count = getattr(self, name, 1)
            require(count >= 1, f"{name} must be 1 step or more, got {count}")
        for rank in self.affected_ranks(topology):
            _check_rank(rank, topology)

    def affected_ranks(self, topology: Topology) -> list[int]:
        raise NotImplementedError

    def is_slow(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return True for the steps in which the ranks are slow: [steps] or [slow ranks, steps]."""
        return self.is_active(steps)

    def step_factors(self, draft: DraftSteps) -> npt.NDArray[Any]:
        """Return the factor by which `share` is multiplied: [steps] or [slow ranks, steps]."""
        return self.is_slow(draft.step_numbers)

    def plant_in(self, draft: DraftSteps) -> None:
        extra = np.float32(self.share * draft.usual_ns) * self.step_factors(draft)
        _add_work(draft, self.affected_ranks(draft.topology), self.phase, extra)

    def at_fault(self, steps: npt.NDArray[np.int64], topology: Topology) -> npt.NDArray[np.bool_]:
        found = super().at_fault(steps, topology)
        found[self.affected_ranks(topology)] = self.is_slow(steps)
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantFault(_SlowRanksFault):
    """One rank is slower by the same amount in each step."""

    rank: int

    def affected_ranks(self, topology: Topology) -> list[int]:
        return [self.rank]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriftingFault(ConstantFault):
    """One rank becomes slower step by step, until after `over` steps it is slower by `share`."""

    over: int = 200

    def step_factors(self, draft: DraftSteps) -> npt.NDArray[Any]:
        grown = ((draft.step_numbers - self.since + 1) / self.over).clip(0, 1)
        return self.is_active(draft.step_numbers) * grown.astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntermittentFault(ConstantFault):
    """One rank is slower in `slow` of `of` steps, chosen at random."""

    slow: int = 1
    of: int = 4

    def validate(self, topology: Topology) -> None:
        super().validate(topology)
        require(
            0 < self.slow <= self.of,
            f"slow must be 1 to {self.of}, the number of steps in `of`, got {self.slow}",
        )

    def step_factors(self, draft: DraftSteps) -> npt.NDArray[Any]:
        chosen = draft.random.random(len(draft.step_numbers)) < self.slow / self.of
        return self.is_active(draft.step_numbers) & chosen


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovingFault(_SlowRanksFault):
    """Each of the ranks in turn is slower for `every` steps, in a cycle."""

    ranks: tuple[int, ...]
    every: int = 100

    def affected_ranks(self, topology: Topology) -> list[int]:
        return list(self.ranks)

    def is_slow(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        turn = (steps - self.since) // self.every % len(self.ranks)
        is_turn = turn == np.arange(len(self.ranks))[:, None]
        return np.asarray(self.is_active(steps) & is_turn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowNodeFault(_SlowRanksFault):
    """All ranks of one host are slower."""

    node: int

    def validate(self, topology: Topology) -> None:
        super().validate(topology)
        nodes = topology.node_index(topology.rank_count - 1) + 1
        require(0 <= self.node < nodes, f"node {self.node} is not among the job's {nodes} nodes")

    def affected_ranks(self, topology: Topology) -> list[int]:
        return [
            rank for rank in range(topology.rank_count) if topology.node_index(rank) == self.node
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataStallFault(ConstantFault):
    """One rank waits for data in one of `every` steps on average. The duration is exponentially
    distributed, with the mean `share`."""

    phase: str = "data"
    every: int = 50

    def step_factors(self, draft: DraftSteps) -> npt.NDArray[Any]:
        struck = draft.random.random(len(draft.step_numbers)) * self.every < 1
        length = draft.random.exponential(size=len(draft.step_numbers)).astype(np.float32)
        return (self.is_active(draft.step_numbers) & struck) * length


@dataclasses.dataclass(frozen=True, kw_only=True)
class PauseVariation(_SlowRanksFault):
    """Each rank pauses in one of `every` steps on average, as Python's garbage collector does.

    No rank is at fault. together: all ranks pause in the same steps.
    """

    phase: str = "host"
    every: int = 100
    together: bool = False

    def affected_ranks(self, topology: Topology) -> list[int]:
        return list(range(topology.rank_count))

    def step_factors(self, draft: DraftSteps) -> npt.NDArray[Any]:
        shape = (1 if self.together else draft.topology.rank_count, len(draft.step_numbers))
        struck = (draft.random.random(shape) * self.every < 1) & self.is_active(draft.step_numbers)
        draft.flags |= np.where(struck, int(Flag.COLLECTED), 0)
        return np.broadcast_to(struck, draft.flags.shape)

    def at_fault(self, steps: npt.NDArray[np.int64], topology: Topology) -> npt.NDArray[np.bool_]:
        return Fault.at_fault(self, steps, topology)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkFault(Fault):
    """Slow transfers in the data-parallel or tensor-parallel group of `rank`.

    The work of the group's ranks is as usual.
    """

    rank: int
    share: float
    dimension: str = "dp"

    def validate(self, topology: Topology) -> None:
        _check_rank(self.rank, topology)
        _check_share(self.share)
        require(
            self.dimension in _DIMENSIONS,
            f"dimension must be {' or '.join(_DIMENSIONS)}, got {self.dimension}",
        )

    def plant_in(self, draft: DraftSteps) -> None:
        members = draft.topology.group_ranks(self.dimension, self.rank)
        transfer_ns = draft.transfer_ns if self.dimension == "dp" else draft.tensor_transfer_ns
        extra = np.float32(self.share * draft.usual_ns)
        transfer_ns[members] += extra * self.is_active(draft.step_numbers)

    def at_fault(self, steps: npt.NDArray[np.int64], topology: Topology) -> npt.NDArray[np.bool_]:
        found = super().at_fault(steps, topology)
        found[topology.group_ranks(self.dimension, self.rank)] = self.is_active(steps)
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthVariation(Fault):
    """Each rank's work is proportional to its sequences' length, which is random in each step.

    No rank is at fault.
    """

    spread: float = 0.2
    """Standard deviation of the number of tokens in a step, as a share of the usual number."""
    reported: bool = False
    """True if the job reports its number of tokens."""

    def validate(self, topology: Topology) -> None:
        require(0 < self.spread <= 0.5, f"spread must be above 0, at most 0.5, got {self.spread:g}")

    def plant_in(self, draft: DraftSteps) -> None:
        ranks, steps, _ = draft.parts_ns.shape
        length = (1 + self.spread * draft.random.standard_normal((ranks, steps))).clip(0.1, 2)
        length = np.where(self.is_active(draft.step_numbers), length, 1.0)
        for part in ("forward", "backward"):
            draft.parts_ns[:, :, OWN_PARTS.index(part)] *= length.astype(np.float32)
        if self.reported:
            draft.workload[:] = np.round(length * _TYPICAL_TOKENS)


KINDS: dict[str, type[Fault]] = {
    "constant": ConstantFault,
    "drifting": DriftingFault,
    "intermittent": IntermittentFault,
    "moving": MovingFault,
    "node": SlowNodeFault,
    "link": LinkFault,
    "stalls": DataStallFault,
    "pauses": PauseVariation,
    "variable_length": LengthVariation,
}
_YES_OR_NO = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_TYPES: dict[str, tuple[str, Callable[[str], object]]] = {
    "int": ("a whole number", int),
    "int | None": ("a whole number", int),
    "float": ("a number", float),
    "bool": ("yes or no", lambda text: _YES_OR_NO[text.lower()]),
    "tuple[int, ...]": ("ranks like 1+2+3", lambda text: tuple(map(int, text.split("+")))),
    "str": ("text", str),
}
"""Description and parser of each type of a fault's fields."""


def parse_fault(text: str) -> Fault:
    """Return a fault from its text, `KIND:NAME=VALUE,...`. Raises ConfigError.

    Several ranks are written as 1+2+3.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ConfigError(
            f"--fault {text}: {unknown_word_text('fault', kind, KINDS)} Faults: {', '.join(KINDS)}"
        )
    fields = {field.name: field for field in dataclasses.fields(KINDS[kind])}
    values: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        name, _, value = pair.partition("=")
        if name not in fields:
            raise ConfigError(
                f"--fault {text}: {unknown_word_text('name', name, fields)} Names of {kind}:"
                f" {', '.join(fields)}"
            )
        wanted, parse = _TYPES[str(fields[name].type)]
        try:
            values[name] = parse(value)
        except (ValueError, KeyError):
            raise ConfigError(f"{kind}: {name}={value} is not {wanted}") from None
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in values
    ]
    require(
        not missing,
        f"{kind} needs {' and '.join(missing)}: {kind}:{','.join(f'{m}=...' for m in missing)}",
    )
    return KINDS[kind](**values)


def _check_share(share: float) -> None:
    require(0 < share <= 1000, f"share must be above 0, at most 1000, got {share:g}")


def _check_rank(rank: int, topology: Topology) -> None:
    count = topology.rank_count
    require(0 <= rank < count, f"rank {rank} is not among the job's {count} ranks")


def _add_work(
    draft: DraftSteps, ranks: list[int], phase: str, extra_ns: npt.NDArray[np.float32]
) -> None:
    """Add time to the ranks' work in a phase.

    For the phase "compute", the time is divided in proportion to forward and backward.
    """
    phases = ("forward", "backward") if phase == "compute" else (phase,)
    parts = [OWN_PARTS.index(part) for part in phases]
    usual = np.median(draft.parts_ns[ranks][:, :, parts], axis=(0, 1))
    shares = usual / usual.sum() if usual.sum() > 0 else np.full(len(parts), 1 / len(parts))
    for part, share in zip(parts, shares.tolist(), strict=True):
        draft.parts_ns[ranks, :, part] += np.float32(share) * extra_ns
