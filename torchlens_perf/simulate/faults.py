"""The faults that a simulation can plant, and their text form:
`constant:rank=3,share=0.25,phase=forward`. Pure.

A share is relative to a rank's usual work in a whole step: share=0.05 adds 5 % of the step's work,
whichever phase becomes longer.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.errors import ConfigError, unknown_word_text
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.run.ring import Flag
from torchlens_perf.run.verdicts import range_end

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.simulate.simulation import DraftSteps, Fault, Topology

_NO_RANKS: frozenset[int] = frozenset()
_TYPICAL_TOKENS = 4096
_DIMENSIONS = ("dp", "tp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TimedFault:
    """A fault that lasts from step `since` to before step `until`, or to the end."""

    since: int = 0
    until: int | None = None

    def is_active(self, step: int) -> bool:
        return self.since <= step < range_end(self.until)

    def slow_ranks(self, step: int, topology: Topology) -> frozenset[int]:
        return _NO_RANKS

    def active_steps(self, draft: DraftSteps) -> npt.NDArray[np.float32]:
        """Return 1 for steps in which the fault lasts, else 0; shape [steps]."""
        step = draft.step_numbers
        return ((step >= self.since) & (step < range_end(self.until))).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SlowRanksFault(_TimedFault):
    """A fault that makes some ranks' work longer in one phase. The phase "compute" is forward and
    backward together."""

    share: float
    phase: str = "compute"

    def validate(self, topology: Topology) -> None:
        if not 0 < self.share <= 1000:
            raise ConfigError(f"share must be above 0, at most 1000, got {self.share:g}")
        if self.phase not in ("compute", *OWN_PARTS):
            raise ConfigError(
                f"phase must be one of {', '.join(('compute', *OWN_PARTS))}, got {self.phase}"
            )
        for name in ("every", "over"):
            if getattr(self, name, 1) < 1:
                raise ConfigError(f"{name} must be 1 step or more, got {getattr(self, name)}")
        for rank in self.affected_ranks(topology):
            _check_rank(rank, topology)

    def affected_ranks(self, topology: Topology) -> list[int]:
        raise NotImplementedError

    def step_factors(self, draft: DraftSteps) -> npt.NDArray[np.float32]:
        """Return the factor by which `share` is multiplied in each step.

        The result has the shape [steps] or [slow ranks, steps].
        """
        return self.active_steps(draft)

    def plant_in(self, draft: DraftSteps) -> None:
        extra = np.float32(self.share * draft.usual_ns) * self.step_factors(draft)
        _add_work(draft, self.affected_ranks(draft.topology), self.phase, extra)

    def slow_ranks(self, step: int, topology: Topology) -> frozenset[int]:
        return frozenset(self.affected_ranks(topology)) if self.is_active(step) else _NO_RANKS


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

    def step_factors(self, draft: DraftSteps) -> npt.NDArray[np.float32]:
        grown = ((draft.step_numbers - self.since + 1) / self.over).clip(0, 1)
        amount: npt.NDArray[np.float32] = self.active_steps(draft) * grown.astype(np.float32)
        return amount


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntermittentFault(ConstantFault):
    """One rank is slower in `slow` of `of` steps, chosen at random."""

    slow: int = 1
    of: int = 4

    def validate(self, topology: Topology) -> None:
        super().validate(topology)
        if not 0 < self.slow <= self.of:
            raise ConfigError(
                f"slow must be 1 to {self.of}, the number of steps in `of`, got {self.slow}"
            )

    def step_factors(self, draft: DraftSteps) -> npt.NDArray[np.float32]:
        chosen = draft.random.random(len(draft.step_numbers)) < self.slow / self.of
        amount: npt.NDArray[np.float32] = self.active_steps(draft) * chosen
        return amount


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovingFault(_SlowRanksFault):
    """Each of the ranks in turn is slower for `every` steps, in a cycle."""

    ranks: tuple[int, ...]
    every: int = 100

    def affected_ranks(self, topology: Topology) -> list[int]:
        return list(self.ranks)

    def step_factors(self, draft: DraftSteps) -> npt.NDArray[np.float32]:
        turn = (draft.step_numbers - self.since) // self.every % len(self.ranks)
        amount: npt.NDArray[np.float32] = self.active_steps(draft) * (
            turn == np.arange(len(self.ranks))[:, None]
        )
        return amount

    def slow_ranks(self, step: int, topology: Topology) -> frozenset[int]:
        turn = (step - self.since) // self.every % len(self.ranks)
        return frozenset([self.ranks[turn]]) if self.is_active(step) else _NO_RANKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowNodeFault(_SlowRanksFault):
    """All ranks of one host are slower."""

    node: int

    def validate(self, topology: Topology) -> None:
        super().validate(topology)
        nodes = topology.node_index(topology.rank_count - 1) + 1
        if not 0 <= self.node < nodes:
            raise ConfigError(f"node {self.node} is not among the job's {nodes} nodes")

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

    def step_factors(self, draft: DraftSteps) -> npt.NDArray[np.float32]:
        struck = draft.random.random(len(draft.step_numbers)) * self.every < 1
        length = draft.random.exponential(size=len(draft.step_numbers)).astype(np.float32)
        amount: npt.NDArray[np.float32] = self.active_steps(draft) * struck * length
        return amount


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

    def step_factors(self, draft: DraftSteps) -> npt.NDArray[np.float32]:
        shape = (1 if self.together else draft.topology.rank_count, len(draft.step_numbers))
        struck = (draft.random.random(shape) * self.every < 1) & (self.active_steps(draft) > 0)
        draft.flags |= np.where(struck, int(Flag.COLLECTED), 0)
        return np.broadcast_to(struck, draft.flags.shape).astype(np.float32)

    def slow_ranks(self, step: int, topology: Topology) -> frozenset[int]:
        return _NO_RANKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkFault(_TimedFault):
    """Slow transfers in the data-parallel or tensor-parallel group of `rank`.

    The work of the group's ranks is as usual.
    """

    rank: int
    share: float
    dimension: str = "dp"

    def validate(self, topology: Topology) -> None:
        _check_rank(self.rank, topology)
        if not 0 < self.share <= 1000:
            raise ConfigError(f"share must be above 0, at most 1000, got {self.share:g}")
        if self.dimension not in _DIMENSIONS:
            raise ConfigError(f"dimension must be {' or '.join(_DIMENSIONS)}, got {self.dimension}")

    def plant_in(self, draft: DraftSteps) -> None:
        members = draft.topology.group_ranks(self.dimension, self.rank)
        transfer_ns = draft.transfer_ns if self.dimension == "dp" else draft.tensor_transfer_ns
        transfer_ns[members] += np.float32(self.share * draft.usual_ns) * self.active_steps(draft)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthVariation(_TimedFault):
    """Each rank's work is proportional to its sequences' length, which is random in each step.

    No rank is at fault.
    """

    spread: float = 0.2
    """Standard deviation of the number of tokens in a step, as a share of the usual number."""
    reported: bool = False
    """True if the job reports its number of tokens."""

    def validate(self, topology: Topology) -> None:
        if not 0 < self.spread <= 0.5:
            raise ConfigError(f"spread must be above 0, at most 0.5, got {self.spread:g}")

    def plant_in(self, draft: DraftSteps) -> None:
        ranks, steps, _ = draft.parts_ns.shape
        length = (1 + self.spread * draft.random.standard_normal((ranks, steps))).clip(0.1, 2)
        length = np.where(self.active_steps(draft) > 0, length, 1.0)
        for part in ("forward", "backward"):
            draft.parts_ns[:, :, OWN_PARTS.index(part)] *= length.astype(np.float32)
        if self.reported:
            draft.workload[:] = np.round(length * _TYPICAL_TOKENS)


KINDS: dict[str, type[Any]] = {
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
        values[name] = _parse_value(kind, name, str(fields[name].type), value)
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in values
    ]
    if missing:
        raise ConfigError(
            f"{kind} needs {' and '.join(missing)}: {kind}:{','.join(f'{m}=...' for m in missing)}"
        )
    fault: Fault = KINDS[kind](**values)
    return fault


def _parse_value(kind: str, name: str, wanted: str, text: str) -> Any:
    try:
        if wanted.startswith("tuple"):
            return tuple(int(each) for each in text.split("+"))
        if wanted == "bool":
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[
                text.lower()
            ]
        if wanted.startswith("int"):
            return int(text)
        return float(text) if wanted == "float" else text
    except (ValueError, KeyError):
        raise ConfigError(
            f"{kind}: {name}={text} is not {_VALUE_TYPES.get(wanted.split(' ')[0], wanted)}"
        ) from None


_VALUE_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "yes or no",
    "tuple[int,": "ranks like 1+2+3",
}


def _check_rank(rank: int, topology: Topology) -> None:
    if not 0 <= rank < topology.rank_count:
        raise ConfigError(f"rank {rank} is not among the job's {topology.rank_count} ranks")


def _add_work(
    draft: DraftSteps, ranks: list[int], phase: str, extra_ns: npt.NDArray[np.float32]
) -> None:
    """Add time to the ranks' work in a phase.

    For the phase "compute", the time is divided in proportion to forward and backward.
    """
    parts = [
        OWN_PARTS.index(part)
        for part in (("forward", "backward") if phase == "compute" else (phase,))
    ]
    usual = np.median(draft.parts_ns[ranks][:, :, parts], axis=(0, 1))
    shares = usual / usual.sum() if usual.sum() > 0 else np.full(len(parts), 1 / len(parts))
    for part, share in zip(parts, shares.tolist(), strict=True):
        draft.parts_ns[ranks, :, part] += np.float32(share) * extra_ns
