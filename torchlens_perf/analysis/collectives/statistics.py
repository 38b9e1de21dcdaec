"""Statistics of one operation on one group over all ranks that have records. Pure.

The statistics consist of sketches and totals, so those of several nodes are merged by addition.

Joined operations are split by size into octaves (factors of two), because messages of 25 MB and of
1 MB have different bandwidths. The report's table shows the octave with most bytes.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.collectives.channel import NOT_ENDED
from torchlens_perf.analysis.collectives.semantics import (
    SEND_RECV,
    OperationKey,
    WaitAndTransfer,
    bus_bandwidth,
    semantics_of,
)
from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.run.sketch import Sketch, merge_sketches

TOTALS = (
    "exposed_wait_ns",
    "overlapped_wait_ns",
    "wait_upper_bound_ns",
    "last",
    "exposed_lag_ns",
    "overlapped_lag_ns",
)
"""Names of the sums that are kept for each rank.

`last` is the number of operations in which the rank arrived last. Lags are the rank's delays after
the second to last rank in these operations.
"""


@dataclasses.dataclass
class SizeStatistics:
    """Statistics of joined operations whose sizes are in one octave. Times are in ns."""

    joined: int = 0
    bytes: int = 0
    """Sum of the operations' sizes, from which bandwidths are computed."""
    wait: Sketch = dataclasses.field(default_factory=Sketch)
    wait_upper_bound: Sketch = dataclasses.field(default_factory=Sketch)
    transfer: Sketch = dataclasses.field(default_factory=Sketch)
    ranks: tuple[int, ...] = ()
    totals: npt.NDArray[np.int64] = dataclasses.field(
        default_factory=lambda: np.zeros((0, len(TOTALS)), np.int64)
    )
    """Shape [ranks, len(TOTALS)]."""

    def add_operations(
        self,
        ranks: tuple[int, ...],
        sizes: npt.NDArray[np.int64],
        overlapped: npt.NDArray[np.bool_],
        found: WaitAndTransfer,
    ) -> None:
        """Add joined operations.

        sizes: shape [operations]. overlapped: shape [operations, ranks], True for calls that did
        not block.
        """
        self.joined += len(sizes)
        self.bytes += int(sizes.sum())
        waits = Sketch()
        waits.add(found.wait_ns.ravel())
        self.wait.merge(waits)
        if found.wait_upper_bound_ns is not found.wait_ns:
            waits = Sketch()
            waits.add(found.wait_upper_bound_ns.ravel())
        self.wait_upper_bound.merge(waits)
        self.transfer.add(found.transfer_ns[found.transfer_ns >= 0])
        totals = np.zeros((len(ranks), len(TOTALS)), np.int64)
        totals[:, 1] = np.where(overlapped, found.wait_ns, 0).sum(axis=0)
        totals[:, 0] = found.wait_ns.sum(axis=0) - totals[:, 1]
        totals[:, 2] = found.wait_upper_bound_ns.sum(axis=0)
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
        """Merge another node's statistics on the same operations."""
        if other.joined > self.joined:
            self.joined, self.bytes = other.joined, other.bytes
        for name in ("wait", "wait_upper_bound"):
            getattr(self, name).merge(getattr(other, name))
        # Each node's transfer time is an upper bound, so the smaller one is more exact.
        if other.transfer.count and not other.transfer.quantile_ns(
            0.5
        ) >= self.transfer.quantile_ns(0.5):
            self.transfer = other.transfer
        self._add_totals(other.ranks, other.totals)

    @property
    def mean_bytes(self) -> float:
        return self.bytes / self.joined if self.joined else 0.0


@dataclasses.dataclass
class OperationStatistics:
    """Statistics of one operation on one group: all records, and joined operations by size."""

    key: OperationKey
    records: int = 0
    """Number of records of all ranks."""
    ended: int = 0
    """Number of records that have an end time."""
    asynchronous: int = 0
    by_device: int = 0
    """Number of records with an end time that have kernel times from the device."""
    bytes: int = 0
    duration: Sketch = dataclasses.field(default_factory=Sketch)
    """Durations of records with an end time, from the issue or the start of the kernel."""
    ranks: set[int] = dataclasses.field(default_factory=set)
    """Ranks that have a record."""
    sizes: dict[int, SizeStatistics] = dataclasses.field(default_factory=dict)

    def count_records(self, calls: npt.NDArray[np.void]) -> None:
        """Count records, whether they are joined or not. calls: array of channel.CALL."""
        ended = calls["duration_ns"] != NOT_ENDED
        self.ranks.update(np.flatnonzero(np.bincount(calls["rank"])).tolist())
        self.records += len(calls)
        self.ended += int(ended.sum())
        self.by_device += int(calls["by_device"][ended].sum())
        if not semantics_of(self.key.operation).blocks:
            self.asynchronous += int(calls["overlapped"].sum())
        self.bytes += int(calls["bytes"].sum())
        self.duration.add(calls["duration_ns"][ended])

    @property
    def joined(self) -> int:
        """Number of operations that have a record of every rank."""
        return sum(size.joined for size in self.sizes.values())

    def octave_with_most_bytes(self) -> SizeStatistics | None:
        """Return the statistics of the octave that has most bytes."""
        return max(self.sizes.values(), key=lambda size: (size.bytes, size.joined), default=None)

    def merge_size_sketches(self, name: str) -> Sketch:
        """Return the sketch in the field `name` of SizeStatistics, merged over all sizes."""
        return merge_sketches(getattr(size, name) for size in self.sizes.values())

    def totals_by_rank(self) -> dict[int, dict[str, int]]:
        """Return the sums of TOTALS for each rank, over all sizes."""
        both = SizeStatistics()
        for size in self.sizes.values():
            both._add_totals(size.ranks, size.totals)
        return {
            rank: dict(zip(TOTALS, row, strict=True))
            for rank, row in zip(both.ranks, both.totals.tolist(), strict=True)
        }

    def compute_bus_bandwidth(self, size: SizeStatistics) -> float | None:
        """Return the bus bandwidth of the median transfer, see bus_bandwidth()."""
        ranks = len(self.key.members) or len(size.ranks)
        return bus_bandwidth(
            self.key.operation, ranks, size.mean_bytes, size.transfer.quantile_ns(0.5)
        )

    def merge(self, other: OperationStatistics) -> None:
        """Merge another node's statistics, which must be of other ranks."""
        self.records += other.records
        self.ended += other.ended
        self.asynchronous += other.asynchronous
        self.by_device += other.by_device
        self.bytes += other.bytes
        self.duration.merge(other.duration)
        self.ranks |= other.ranks
        for octave, size in other.sizes.items():
            if octave in self.sizes:
                self.sizes[octave].merge(size)
            else:
                self.sizes[octave] = copy.deepcopy(size)


def merge_operations(nodes: Sequence[Sequence[OperationStatistics]]) -> list[OperationStatistics]:
    """Concatenate the rows of several nodes, and merge rows with the same key."""
    found: dict[OperationKey, OperationStatistics] = {}
    for each in itertools.chain.from_iterable(nodes):
        found.setdefault(each.key, OperationStatistics(each.key)).merge(each)
    return list(found.values())


def describe_ranks(key: OperationKey) -> str:
    """Return the ranks of a row as text: "ranks 0-3", or "ranks 2 to 3" for a pair.

    The text is "group 7" if the ranks are not known.
    """
    if key.operation == SEND_RECV and key.pair is not None:
        return f"ranks {key.pair[0]} to {key.pair[1]}"
    return (
        f"ranks {format_ranges(key.group.ranks)}" if key.group.ranks else f"group {key.group.name}"
    )
