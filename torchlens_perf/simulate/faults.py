"""The faults that a simulation can plant, and their text form:
`constant:rank=3,share=0.25,phase=forward`. Pure.

Shares are of a rank's usual work in a step: share=0.05 makes the rank 5 % slower, in whatever
phase.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.errors import ConfigError, unknown_word_text
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.run.ring import Flag

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.simulate.simulation import Draft, Fault, Topology

_NO_RANKS: frozenset[int] = frozenset()
_TYPICAL_TOKENS = 4096
_DIMENSIONS = ("dp", "tp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Lasting:
    """A fault that lasts from step `since` to before step `until`, or to the end."""

    since: int = 0
    until: int | None = None

    def holds(self, step: int) -> bool:
        return self.since <= step and (self.until is None or step < self.until)

    def slow_ranks(self, step: int, topology: Topology) -> frozenset[int]:
        return _NO_RANKS

    def when(self, draft: Draft) -> npt.NDArray[np.float32]:
        """Return 1 for steps in which the fault lasts, else 0; shape [steps]."""
        step = draft.step
        return (
            (step >= self.since) & (step < (self.until if self.until is not None else 1 << 62))
        ).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Slow(_Lasting):
    """A fault that makes some ranks' work longer in one phase. "compute" is forward and backward
    together."""

    share: float
    phase: str = "compute"

    def check(self, topology: Topology) -> None:
        if not 0 < self.share <= 1000:
            raise ConfigError(f"share must be above 0, at most 1000, got {self.share:g}")
        if self.phase not in ("compute", *OWN_PARTS):
            raise ConfigError(
                f"phase must be one of {', '.join(('compute', *OWN_PARTS))}, got {self.phase}"
            )
        for name in ("every", "over"):
            if getattr(self, name, 1) < 1:
                raise ConfigError(f"{name} must be 1 step or more, got {getattr(self, name)}")
        for rank in self.ranks_of(topology):
            _check_rank(rank, topology)

    def ranks_of(self, topology: Topology) -> list[int]:
        raise NotImplementedError

    def amount(self, draft: Draft) -> npt.NDArray[np.float32]:
        """Return the factor on the share in each step; shape [steps], or [slow ranks, steps]."""
        return self.when(draft)

    def plant(self, draft: Draft) -> None:
        extra = np.float32(self.share * draft.usual_ns) * self.amount(draft)
        _lengthen(draft, self.ranks_of(draft.topology), self.phase, extra)

    def slow_ranks(self, step: int, topology: Topology) -> frozenset[int]:
        return frozenset(self.ranks_of(topology)) if self.holds(step) else _NO_RANKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant(_Slow):
    """One rank is slower by the same amount in each step."""

    rank: int

    def ranks_of(self, topology: Topology) -> list[int]:
        return [self.rank]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drifting(Constant):
    """One rank becomes slower over `over` steps, up to the share."""

    over: int = 200

    def amount(self, draft: Draft) -> npt.NDArray[np.float32]:
        grown = ((draft.step - self.since + 1) / self.over).clip(0, 1)
        amount: npt.NDArray[np.float32] = self.when(draft) * grown.astype(np.float32)
        return amount


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intermittent(Constant):
    """One rank is slower in `slow` of `of` steps, chosen at random."""

    slow: int = 1
    of: int = 4

    def check(self, topology: Topology) -> None:
        super().check(topology)
        if not 0 < self.slow <= self.of:
            raise ConfigError(
                f"slow must be 1 to {self.of}, the number of steps in `of`, got {self.slow}"
            )

    def amount(self, draft: Draft) -> npt.NDArray[np.float32]:
        chosen = draft.random.random(len(draft.step)) < self.slow / self.of
        amount: npt.NDArray[np.float32] = self.when(draft) * chosen
        return amount


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moving(_Slow):
    """One rank after the other is slower, each for `every` steps, in a cycle."""

    ranks: tuple[int, ...]
    every: int = 100

    def ranks_of(self, topology: Topology) -> list[int]:
        return list(self.ranks)

    def amount(self, draft: Draft) -> npt.NDArray[np.float32]:
        turn = (draft.step - self.since) // self.every % len(self.ranks)
        amount: npt.NDArray[np.float32] = self.when(draft) * (
            turn == np.arange(len(self.ranks))[:, None]
        )
        return amount

    def slow_ranks(self, step: int, topology: Topology) -> frozenset[int]:
        turn = (step - self.since) // self.every % len(self.ranks)
        return frozenset([self.ranks[turn]]) if self.holds(step) else _NO_RANKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node(_Slow):
    """All ranks of one host are slower."""

    node: int

    def check(self, topology: Topology) -> None:
        super().check(topology)
        nodes = topology.node(topology.ranks - 1) + 1
        if not 0 <= self.node < nodes:
            raise ConfigError(f"node {self.node} is not among the job's {nodes} nodes")

    def ranks_of(self, topology: Topology) -> list[int]:
        return [rank for rank in range(topology.ranks) if topology.node(rank) == self.node]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stalls(Constant):
    """One rank waits long for data in one of `every` steps: for `share` on average, exponentially
    distributed."""

    phase: str = "data"
    every: int = 50

    def amount(self, draft: Draft) -> npt.NDArray[np.float32]:
        struck = draft.random.random(len(draft.step)) * self.every < 1
        length = draft.random.exponential(size=len(draft.step)).astype(np.float32)
        amount: npt.NDArray[np.float32] = self.when(draft) * struck * length
        return amount


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pauses(_Slow):
    """Each rank pauses in one of `every` steps, as for Python's garbage collector. No rank is at
    fault.

    together: all ranks pause in the same steps.
    """

    phase: str = "host"
    every: int = 100
    together: bool = False

    def ranks_of(self, topology: Topology) -> list[int]:
        return list(range(topology.ranks))

    def amount(self, draft: Draft) -> npt.NDArray[np.float32]:
        shape = (1 if self.together else draft.topology.ranks, len(draft.step))
        struck = (draft.random.random(shape) * self.every < 1) & (self.when(draft) > 0)
        draft.flags |= np.where(struck, int(Flag.COLLECTED), 0)
        return np.broadcast_to(struck, draft.flags.shape).astype(np.float32)

    def slow_ranks(self, step: int, topology: Topology) -> frozenset[int]:
        return _NO_RANKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link(_Lasting):
    """Transfers are slow in one group, of `rank` and its data-parallel or tensor-parallel peers.

    Work is not.
    """

    rank: int
    share: float
    dimension: str = "dp"

    def check(self, topology: Topology) -> None:
        _check_rank(self.rank, topology)
        if not 0 < self.share <= 1000:
            raise ConfigError(f"share must be above 0, at most 1000, got {self.share:g}")
        if self.dimension not in _DIMENSIONS:
            raise ConfigError(f"dimension must be {' or '.join(_DIMENSIONS)}, got {self.dimension}")

    def plant(self, draft: Draft) -> None:
        members = draft.topology.group(self.dimension, self.rank)
        transfer_ns = draft.transfer_ns if self.dimension == "dp" else draft.tensor_transfer_ns
        transfer_ns[members] += np.float32(self.share * draft.usual_ns) * self.when(draft)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableLength(_Lasting):
    """Each rank has sequences of random length in each step, and work in proportion.

    No rank is at fault.
    """

    spread: float = 0.2
    """Standard deviation of a step's tokens, as a share of the usual number."""
    reported: bool = False
    """True if the job reports its tokens."""

    def check(self, topology: Topology) -> None:
        if not 0 < self.spread <= 0.5:
            raise ConfigError(f"spread must be above 0, at most 0.5, got {self.spread:g}")

    def plant(self, draft: Draft) -> None:
        ranks, steps, _ = draft.parts_ns.shape
        length = (1 + self.spread * draft.random.standard_normal((ranks, steps))).clip(0.1, 2)
        length = np.where(self.when(draft) > 0, length, 1.0)
        for part in ("forward", "backward"):
            draft.parts_ns[:, :, OWN_PARTS.index(part)] *= length.astype(np.float32)
        if self.reported:
            draft.workload[:] = np.round(length * _TYPICAL_TOKENS)


KINDS: dict[str, type[Any]] = {
    "constant": Constant,
    "drifting": Drifting,
    "intermittent": Intermittent,
    "moving": Moving,
    "node": Node,
    "link": Link,
    "stalls": Stalls,
    "pauses": Pauses,
    "variable_length": VariableLength,
}


def parse_fault(text: str) -> Fault:
    """Return a fault from its text, `KIND:NAME=VALUE,...`.

    Several ranks are 1+2+3. Raises ConfigError.
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
        values[name] = _value(kind, name, str(fields[name].type), value)
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


def _value(kind: str, name: str, wanted: str, text: str) -> Any:
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
            f"{kind}: {name}={text} is not {_A_VALUE.get(wanted.split(' ')[0], wanted)}"
        ) from None


_A_VALUE = {
    "int": "a whole number",
    "float": "a number",
    "bool": "yes or no",
    "tuple[int,": "ranks like 1+2+3",
}


def _check_rank(rank: int, topology: Topology) -> None:
    if not 0 <= rank < topology.ranks:
        raise ConfigError(f"rank {rank} is not among the job's {topology.ranks} ranks")


def _lengthen(
    draft: Draft, ranks: list[int], phase: str, extra_ns: npt.NDArray[np.float32]
) -> None:
    """Add to the ranks' work in a phase.

    For "compute" it is divided in proportion to forward and backward.
    """
    parts = [
        OWN_PARTS.index(part)
        for part in (("forward", "backward") if phase == "compute" else (phase,))
    ]
    usual = np.median(draft.parts_ns[ranks][:, :, parts], axis=(0, 1))
    shares = usual / usual.sum() if usual.sum() > 0 else np.full(len(parts), 1 / len(parts))
    for part, share in zip(parts, shares.tolist(), strict=True):
        draft.parts_ns[ranks, :, part] += np.float32(share) * extra_ns
