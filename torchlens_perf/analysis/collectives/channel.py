"""Records of one sequence of operations, from several ranks, put together by sequence number. Pure.

Times are in ns. An operation whose end was not recorded has a duration of -1 (NOT_ENDED).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.collectives.semantics import GroupKey

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_PENDING = 4096  # operations of a channel that wait for a rank's record
NOT_ENDED = -1
# What is joined: a rank's record of an operation. `call_ns`: of the issuing call; `signature` and `row`: see join.py.
CALL = np.dtype(
    [
        ("sequence", np.int64), ("start_ns", np.int64), ("duration_ns", np.int64), ("bytes", np.int64),
        ("call_ns", np.int64), ("rank", np.int32), ("signature", np.int32), ("row", np.int32),
        ("overlapped", np.bool_), ("by_device", np.bool_), ("held_up", np.bool_),
    ],
    align=True,
)  # fmt: skip


def concatenated(parts: Sequence[npt.NDArray[np.void]]) -> npt.NDArray[np.void]:
    """Calls in one array. As plain bytes: NumPy would copy them field by field, in ten times the time.

    For that reason calls are also chosen by take() and compress(), and not by an index.
    """
    return np.concatenate([part.view(f"V{CALL.itemsize}") for part in parts]).view(CALL)


@dataclasses.dataclass
class Counts:
    """What became of a group's operations, or of those between two ranks. Records, where it says so."""

    joined: int = 0
    unjoined: int = 0
    """A rank's record never came: it left, had another number of steps, or the record was lost."""
    mismatched: int = 0
    """Ranks had other operations, dtypes, roots or bytes at the same sequence number, or one had two."""
    unended: int = 0
    """All records came, but some of them lack the end of the operation."""
    late_records: int = 0
    """They came when their operation had been dropped."""
    unmatched_records: int = 0
    """Their numbers do not show which ones belong together: messages to a rank that receives from any source, groups in
    which the ranks count from different places, and kernels by whose times no rank had waited for the others."""

    def plus(self, other: Counts) -> Counts:
        return Counts(*(mine + theirs for mine, theirs in zip(*map(dataclasses.astuple, (self, other)), strict=True)))


@dataclasses.dataclass(frozen=True)
class ChannelState:
    """What a channel is saved as: its records that wait stay behind, and count as unjoined."""

    group: GroupKey
    pair: tuple[int, int] | None
    ordered: bool
    counts: Counts
    floor: int | None
    """Up to where a successor must join nothing: what came before it is there only in part. None: nowhere."""


class Channel:
    """What shares one sequence: a group's collectives, or the messages from one rank to another."""

    def __init__(self, group: GroupKey, pair: tuple[int, int] | None) -> None:
        self.group = group
        self.pair = pair
        self.counts = Counts()
        self.ordered = True  # whether sequence numbers show which records belong together
        self._floor: int | None = None  # no operation up to this number is joined any more
        self._newest: int | None = None
        self._seen: set[int] = set()
        self._queue: list[npt.NDArray[np.void]] = []
        self._pending = np.zeros(0, CALL)

    def add(self, rank: int, rows: npt.NDArray[np.void]) -> None:
        """Calls of one rank, with sequence numbers of 32 bits; kept until join()."""
        if not self.ordered:
            self.counts.unmatched_records += len(rows)
            return
        self._seen.add(rank)
        rows["sequence"] = self._unwrapped(rows["sequence"])
        self._queue.append(rows)

    def _unwrapped(self, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Sequence numbers that go on beyond 32 bits."""
        if self._newest is None:
            self._newest = int(sequences[0])
        ahead = (sequences - self._newest + (1 << 31)) % (1 << 32) - (1 << 31)
        numbers: npt.NDArray[np.int64] = self._newest + ahead
        self._newest = max(self._newest, int(numbers.max()))
        return numbers

    def disorder(self) -> None:
        """From now on sequence numbers do not show which records belong together: nothing more is joined."""
        if self.ordered:
            self.ordered = False
            self.counts.unmatched_records += len(self._rows())
            self._queue, self._pending = [], self._pending[:0]

    def _rows(self) -> npt.NDArray[np.void]:
        return concatenated([self._pending, *self._queue])

    @property
    def pending_operations(self) -> int:
        """Operations that wait for a rank's record."""
        return len(np.unique(self._rows()["sequence"]))

    def state(self) -> ChannelState:
        """For go_on_from()."""
        floors = [] if self._floor is None else [self._floor]
        floor = max([*floors, *self._rows()["sequence"].tolist()], default=None)
        counts = self.counts.plus(Counts(unjoined=self.pending_operations))
        return ChannelState(self.group, self.pair, self.ordered, counts, floor)

    def go_on_from(self, earlier: ChannelState) -> None:
        """Continues after another one of the same group and pair."""
        self.counts, self.ordered = dataclasses.replace(earlier.counts), self.ordered and earlier.ordered
        self._floor = self._newest = earlier.floor

    def ranks(self, local: set[int]) -> tuple[int, ...]:
        """Those whose records come to this node; for a pair, sender and receiver. Where unknown, those seen."""
        members = self.pair or self.group.ranks
        return tuple(rank for rank in members if rank in local) if members else tuple(sorted(self._seen))

    def join(self, ranks: tuple[int, ...], left: set[int]) -> npt.NDArray[np.void]:
        """Takes out the operations of which every rank's record is there; shape [operations, ranks].

        Records of other ranks are let go. left: ranks of which nothing more comes: what lacks theirs is dropped.
        """
        nothing = np.zeros((0, len(ranks)), CALL)
        if not self._queue and not (left and len(self._pending)):
            return nothing
        rows = self._rows()
        self._queue, self._pending = [], rows[:0]
        if self._floor is not None:
            in_time = rows["sequence"] > self._floor
            self.counts.late_records += int((~in_time).sum())
            rows = rows.compress(in_time)
        if len(ranks) < 2 or not len(rows):
            return nothing  # the others are on other nodes: there is nothing to compare with
        column_of = np.full(max(*ranks, int(rows["rank"].max())) + 1, -1)
        column_of[list(ranks)] = np.arange(len(ranks))
        column = column_of[rows["rank"]]
        if (column < 0).any():
            rows, column = rows.compress(column >= 0), column[column >= 0]
            if not len(rows):
                return nothing
        places = (rows["sequence"] - rows["sequence"].min()) * len(ranks) + column
        order = np.argsort(places, kind="stable")  # each rank's records are nearly a run: sorting merges them
        rows, column, places = rows.take(order), column[order], places[order]
        starts = np.flatnonzero(np.diff(places // len(ranks), prepend=-1))
        lengths = np.diff(starts, append=len(rows))
        twice = np.diff(places, prepend=-1) == 0
        faulty = np.logical_or.reduceat(twice, starts)
        self.counts.mismatched += int(faulty.sum())
        full = (lengths == len(ranks)) & ~faulty
        lacking = ~full & ~faulty
        gone = np.array([rank in left for rank in ranks])
        if gone.any():
            hopeless = lacking & (np.add.reduceat(gone[column].astype(np.int64), starts) < gone.sum())
            self.counts.unjoined += int(hopeless.sum())
            lacking &= ~hopeless
        surplus = int(lacking.sum()) - MAX_PENDING
        if surplus > 0:
            dropped = np.flatnonzero(lacking)[:surplus]
            self.counts.unjoined += surplus
            self._floor = int(rows["sequence"][starts[dropped[-1]]])
            lacking[dropped] = False
        self._pending = rows.compress(np.repeat(lacking, lengths))
        complete: npt.NDArray[np.void] = rows.take(starts[full][:, None] + np.arange(len(ranks)))
        return complete
