"""What is known of one operation on one group, over all ranks that were seen: sketches and totals that add up. Pure.

Kept apart by the size's octave, because a bucket of 25 MB and one of 1 MB have no bandwidth in common; the table shows
that of the octave in which most bytes are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchlens_perf.collective_channel import BY_DEVICE, BYTES, CALL, DURATION, NOT_ENDED, OVERLAPPED, RANK
from torchlens_perf.collective_semantics import SEND_RECV, Attribution, bus_factor, semantics_of
from torchlens_perf.rank_ranges import parse_ranges, ranges
from torchlens_perf.sketch import Sketch

if TYPE_CHECKING:
    import numpy.typing as npt

TOTALS = ("exposed_wait_ns", "overlapped_wait_ns", "wait_at_most_ns", "last", "exposed_lag_ns", "overlapped_lag_ns")
"""What is summed for each rank. `last`: how often it came last; lags: by how much later than the second to last."""
_SKETCHES = ("wait", "wait_at_most", "transfer")


class GroupKey(NamedTuple):
    """One process group. Names alone do not tell: groups that were split off at once share one."""

    name: str
    ranks: tuple[int, ...]
    """Its members, ascending; empty if they are not known."""
    description: str = ""

    def member(self, position: int | None) -> int | None:
        """The global rank at a position in the group; in a group whose members are not known, the position."""
        if position is None or not self.ranks:
            return position
        return self.ranks[position] if position < len(self.ranks) else None

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "ranks": ranges(self.ranks), "description": self.description}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> GroupKey:
        return cls(value["name"], parse_ranges(value["ranks"]), value["description"])


class OperationKey(NamedTuple):
    """One row: an operation with its dtype on a group, or between two ranks of it."""

    operation: str
    dtype: str
    group: GroupKey
    pair: tuple[int, int] | None = None
    """Sender and receiver."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part; empty if not known."""
        return self.group.ranks if self.pair is None else self.pair


class SizeStatistics:
    """Joined operations whose sizes lie in one octave. Times in ns."""

    def __init__(self) -> None:
        self.joined = 0
        self.bytes = 0
        """Sum of the sizes that bandwidth is computed from."""
        self.wait = Sketch()
        self.wait_at_most = Sketch()
        self.transfer = Sketch()
        self.ranks: tuple[int, ...] = ()
        self.totals = np.zeros((0, len(TOTALS)), np.int64)
        """Shape [ranks, len(TOTALS)]."""

    def add(
        self,
        ranks: tuple[int, ...],
        sizes: npt.NDArray[np.int64],
        overlapped: npt.NDArray[np.bool_],
        found: Attribution,
    ) -> None:
        """Adds operations. sizes: shape [operations]. overlapped: shape [operations, ranks], not blocking."""
        self.joined += len(sizes)
        self.bytes += int(sizes.sum())
        waits = Sketch()
        waits.add(found.wait_ns.ravel())
        self.wait.merge(waits)
        if found.wait_at_most_ns is not found.wait_ns:
            waits = Sketch()
            waits.add(found.wait_at_most_ns.ravel())
        self.wait_at_most.merge(waits)
        self.transfer.add(found.transfer_ns[found.transfer_ns >= 0])
        totals = np.zeros((len(ranks), len(TOTALS)), np.int64)
        totals[:, 1] = np.where(overlapped, found.wait_ns, 0).sum(axis=0)
        totals[:, 0] = found.wait_ns.sum(axis=0) - totals[:, 1]
        totals[:, 2] = found.wait_at_most_ns.sum(axis=0)
        named = found.last >= 0
        last, lag_ns, hidden = found.last[named], found.lag_ns[named], overlapped[named].all(axis=1)
        np.add.at(totals[:, 3], last, 1)
        np.add.at(totals[:, 4], last[~hidden], lag_ns[~hidden])
        np.add.at(totals[:, 5], last[hidden], lag_ns[hidden])
        self._add_totals(ranks, totals)

    def _add_totals(self, ranks: tuple[int, ...], totals: npt.NDArray[np.int64]) -> None:
        if ranks != self.ranks:
            both = tuple(sorted({*ranks, *self.ranks}))
            grown = np.zeros((len(both), len(TOTALS)), np.int64)
            grown[np.searchsorted(both, self.ranks)] = self.totals
            self.ranks, self.totals = both, grown
        self.totals[np.searchsorted(self.ranks, ranks)] += totals

    def merge(self, other: SizeStatistics) -> None:
        """Adds what another node saw of the same operations, through its own ranks."""
        if other.joined > self.joined:
            self.joined, self.bytes = other.joined, other.bytes
        for name in ("wait", "wait_at_most"):
            getattr(self, name).merge(getattr(other, name))
        # Each node's shortest is at least the transfer: the smaller one is nearer to it.
        if other.transfer.count and not other.transfer.quantile_ns(0.5) >= self.transfer.quantile_ns(0.5):
            self.transfer = other.transfer
        self._add_totals(other.ranks, other.totals)

    def copy(self) -> SizeStatistics:
        """One that merge() may change."""
        return SizeStatistics.from_json(self.to_json())

    @property
    def mean_bytes(self) -> float:
        """The size of one operation."""
        return self.bytes / self.joined if self.joined else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "joined": self.joined,
            "bytes": self.bytes,
            **{name: getattr(self, name).to_json() for name in _SKETCHES},
            "ranks": ranges(self.ranks),
            "totals": self.totals.tolist(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SizeStatistics:
        statistics = cls()
        statistics.joined, statistics.bytes = int(value["joined"]), int(value["bytes"])
        for name in _SKETCHES:
            setattr(statistics, name, Sketch.from_json(value[name]))
        statistics.ranks = parse_ranges(value["ranks"])
        statistics.totals = np.array(value["totals"], np.int64).reshape(len(statistics.ranks), len(TOTALS))
        return statistics


@dataclasses.dataclass
class OperationStatistics:
    """One operation on one group: all its records, and the joined ones by the octave of their size."""

    key: OperationKey
    records: int = 0
    """Of all ranks seen."""
    ended: int = 0
    """Of them, those whose end was recorded."""
    asynchronous: int = 0
    by_device: int = 0
    """Of those that ended, where the device told when its kernel ran."""
    bytes: int = 0
    issue: Sketch = dataclasses.field(default_factory=Sketch)
    """The issuing calls' own durations."""
    duration: Sketch = dataclasses.field(default_factory=Sketch)
    """From issue, or the kernel's start, to end, of the records whose end was recorded."""
    ranks: set[int] = dataclasses.field(default_factory=set)
    """Those that had a record."""
    sizes: dict[int, SizeStatistics] = dataclasses.field(default_factory=dict)

    def count(self, table: npt.NDArray[np.int64]) -> None:
        """Adds records, joined or not; shape [records, COLUMNS] of collective_channel."""
        ended = table[:, DURATION] != NOT_ENDED
        self.ranks.update(np.flatnonzero(np.bincount(table[:, RANK])).tolist())
        self.records += len(table)
        self.ended += int(ended.sum())
        self.by_device += int(table[ended, BY_DEVICE].sum())
        if not semantics_of(self.key.operation).blocks:
            self.asynchronous += int(table[:, OVERLAPPED].sum())
        self.bytes += int(table[:, BYTES].sum())
        self.issue.add(table[:, CALL])
        self.duration.add(table[ended, DURATION])

    @property
    def joined(self) -> int:
        """Operations of which every rank's record was there."""
        return sum(size.joined for size in self.sizes.values())

    def size(self, octave: int) -> SizeStatistics:
        """What is known of one octave: sizes from 2**(octave - 1) on."""
        return self.sizes.setdefault(octave, SizeStatistics())

    def main_size(self) -> SizeStatistics | None:
        """The octave in which most bytes are."""
        return max(self.sizes.values(), key=lambda size: (size.bytes, size.joined), default=None)

    def whole(self, name: str) -> Sketch:
        """The sketch of that name over all sizes."""
        merged = Sketch()
        for size in self.sizes.values():
            merged.merge(getattr(size, name))
        return merged

    def totals(self) -> dict[int, dict[str, int]]:
        """By rank, TOTALS over all sizes."""
        both = SizeStatistics()
        for size in self.sizes.values():
            both._add_totals(size.ranks, size.totals)
        return {
            rank: dict(zip(TOTALS, row, strict=True))
            for rank, row in zip(both.ranks, both.totals.tolist(), strict=True)
        }

    def bandwidth(self, size: SizeStatistics) -> tuple[float, float] | None:
        """Algorithm and bus bandwidth in bytes per second, from the median transfer; None if nothing moves or ended."""
        factor = bus_factor(self.key.operation, len(self.key.members) or len(size.ranks))
        transfer_ns = size.transfer.quantile_ns(0.5)
        if factor is None or not size.bytes or not transfer_ns > 0:
            return None
        algorithm = size.mean_bytes / transfer_ns * 1e9
        return algorithm, algorithm * factor

    def merge(self, other: OperationStatistics) -> None:
        """Adds another node's. Not for the same ranks twice."""
        self.records += other.records
        self.ended += other.ended
        self.asynchronous += other.asynchronous
        self.by_device += other.by_device
        self.bytes += other.bytes
        self.issue.merge(other.issue)
        self.duration.merge(other.duration)
        self.ranks |= other.ranks
        for octave, size in other.sizes.items():
            if octave in self.sizes:
                self.sizes[octave].merge(size)
            else:
                self.sizes[octave] = size.copy()

    def to_json(self) -> dict[str, Any]:
        return {
            "operation": self.key.operation,
            "dtype": self.key.dtype,
            "group": self.key.group.to_json(),
            "pair": self.key.pair,
            **{name: getattr(self, name) for name in _COUNTS},
            "issue": self.issue.to_json(),
            "duration": self.duration.to_json(),
            "ranks": ranges(sorted(self.ranks)),
            "sizes": {str(octave): size.to_json() for octave, size in self.sizes.items()},
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> OperationStatistics:
        pair = None if value["pair"] is None else (int(value["pair"][0]), int(value["pair"][1]))
        key = OperationKey(value["operation"], value["dtype"], GroupKey.from_json(value["group"]), pair)
        return cls(
            key,
            **{name: int(value.get(name, 0)) for name in _COUNTS},
            issue=Sketch.from_json(value["issue"]),
            duration=Sketch.from_json(value["duration"]),
            ranks=set(parse_ranges(value["ranks"])),
            sizes={int(octave): SizeStatistics.from_json(size) for octave, size in value["sizes"].items()},
        )


_COUNTS = ("records", "ended", "asynchronous", "by_device", "bytes")


def merged_operations(nodes: Sequence[Sequence[OperationStatistics]]) -> list[OperationStatistics]:
    """The rows of several nodes as one list; those of one group that spans nodes become one."""
    found: dict[OperationKey, OperationStatistics] = {}
    for node in nodes:
        for each in node:
            found.setdefault(each.key, OperationStatistics(each.key)).merge(each)
    return list(found.values())


def describe(key: OperationKey) -> str:
    """The row's ranks in words: "ranks 0-3", "ranks 2 to 3" for a pair, "group 7" where they are not known."""
    if key.operation == SEND_RECV and key.pair is not None:
        return f"ranks {key.pair[0]} to {key.pair[1]}"
    return f"ranks {ranges(key.group.ranks)}" if key.group.ranks else f"group {key.group.name}"
