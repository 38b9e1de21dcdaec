"""Match the records of several ranks by sequence number. All functions are pure.

Times are in ns. An operation whose end was not recorded has a duration of -1 (NOT_ENDED).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.collectives.semantics import GroupKey

# Largest number of incomplete operations that a channel keeps.
MAX_PENDING = 4096
NOT_ENDED = -1
# A rank's record of an operation. join.py explains `signature` and `row`.
CALL = np.dtype(
    [
        ("sequence", np.int64), ("start_ns", np.int64), ("duration_ns", np.int64), ("bytes", np.int64),
        ("rank", np.int32), ("signature", np.int32), ("row", np.int32),
        ("overlapped", np.bool_), ("by_device", np.bool_), ("held_up", np.bool_),
    ],
    align=True,
)  # fmt: skip


def concatenate_calls(parts: Sequence[npt.NDArray[np.void]]) -> npt.NDArray[np.void]:
    """Concatenate arrays of calls.

    The calls are copied as bytes, because NumPy copies structured arrays field by field, which is
    ten times slower.

    Indexing a structured array is slow for the same reason, so select calls with take() and
    compress().
    """
    return np.concatenate([part.view(f"V{CALL.itemsize}") for part in parts]).view(CALL)


@dataclasses.dataclass
class JoinCounts:
    """Results of joining the operations of a group or a pair.

    Fields named `*_records` count records. All other fields count operations.
    """

    joined: int = 0
    unjoined: int = 0
    """Dropped operations that lack the record of a rank, which exited or lost the record."""
    mismatched: int = 0
    """Operations in which names, dtypes, roots or bytes differ, or a rank has two records."""
    unended: int = 0
    """Operations with a record of every rank, at least one of which has no end time."""
    late_records: int = 0
    """Records that arrived after their operation had been dropped."""
    unmatched_records: int = 0
    """Records that cannot be matched by sequence number:

    - messages to a rank that receives from any source;
    - operations of groups whose ranks began to count at different operations;
    - kernels that ended on one rank before they began on another, although all ranks must wait for
      each other.
    """

    def plus(self, other: JoinCounts) -> JoinCounts:
        return JoinCounts(
            *(
                mine + theirs
                for mine, theirs in zip(*map(dataclasses.astuple, (self, other)), strict=True)
            )
        )


@dataclasses.dataclass(frozen=True)
class ChannelState:
    """Saved state of a channel. Pending operations are not saved, but count as unjoined."""

    group: GroupKey
    pair: tuple[int, int] | None
    ordered: bool
    counts: JoinCounts
    floor: int | None
    """Last sequence number that a restored channel must not join, because some of its records were
    not saved; None if all operations may be joined.
    """


class Channel:
    """Sequence of the collectives of a group, or of the messages from one rank to another."""

    def __init__(self, group: GroupKey, pair: tuple[int, int] | None) -> None:
        self.group = group
        self.pair = pair
        self.counts = JoinCounts()
        # True while equal sequence numbers mean the same operation.
        self.ordered = True
        # Operations up to this sequence number are no longer joined.
        self._floor: int | None = None
        self._newest: int | None = None
        self._seen: set[int] = set()
        self._queue: list[npt.NDArray[np.void]] = []
        self._pending = np.zeros(0, CALL)

    def queue_calls(self, rank: int, rows: npt.NDArray[np.void]) -> None:
        """Queue one rank's calls with 32-bit sequence numbers for CollectiveJoin.join()."""
        if not self.ordered:
            self.counts.unmatched_records += len(rows)
            return
        self._seen.add(rank)
        rows["sequence"] = self._unwrap_sequences(rows["sequence"])
        self._queue.append(rows)

    def _unwrap_sequences(self, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Convert 32-bit sequence numbers, which wrap, to 64-bit numbers that do not wrap."""
        if self._newest is None:
            self._newest = int(sequences[0])
        ahead = (sequences - self._newest + (1 << 31)) % (1 << 32) - (1 << 31)
        numbers: npt.NDArray[np.int64] = self._newest + ahead
        self._newest = max(self._newest, int(numbers.max()))
        return numbers

    def stop_joining(self) -> None:
        """Stop joining and drop the pending records.

        Call it if equal sequence numbers may mean different operations.
        """
        if self.ordered:
            self.ordered = False
            self.counts.unmatched_records += len(self._queued_calls())
            self._queue, self._pending = [], self._pending[:0]

    def _queued_calls(self) -> npt.NDArray[np.void]:
        return concatenate_calls([self._pending, *self._queue])

    @property
    def pending_operations(self) -> int:
        """Number of operations that still have no record of at least one rank."""
        return len(np.unique(self._queued_calls()["sequence"]))

    def to_state(self) -> ChannelState:
        """Return the state that restore() reads."""
        floors = [] if self._floor is None else [self._floor]
        floor = max([*floors, *self._queued_calls()["sequence"].tolist()], default=None)
        counts = self.counts.plus(JoinCounts(unjoined=self.pending_operations))
        return ChannelState(self.group, self.pair, self.ordered, counts, floor)

    def restore(self, earlier: ChannelState) -> None:
        """Continue from the saved state of a channel with the same group and pair."""
        self.counts = dataclasses.replace(earlier.counts)
        self.ordered = self.ordered and earlier.ordered
        self._floor = self._newest = earlier.floor

    def ranks_on_node(self, local: set[int]) -> tuple[int, ...]:
        """Return the members that run on this node.

        The members of a pair are its sender and receiver.

        If the members are not known, return all ranks that have added calls.
        """
        members = self.pair or self.group.ranks
        return (
            tuple(rank for rank in members if rank in local)
            if members
            else tuple(sorted(self._seen))
        )

    def pop_complete_operations(
        self, ranks: tuple[int, ...], left: set[int]
    ) -> npt.NDArray[np.void]:
        """Remove complete operations from the queue and return them, with shape [operations,
        ranks].

        An operation is complete if it has a record of each of `ranks`. Records of ranks that are
        not in `ranks` are dropped.

        left: ranks that have exited. Operations without a record of one of these ranks are dropped.
        """
        nothing = np.zeros((0, len(ranks)), CALL)
        if not self._queue and not (left and len(self._pending)):
            return nothing
        rows = self._queued_calls()
        self._queue, self._pending = [], rows[:0]
        if self._floor is not None:
            in_time = rows["sequence"] > self._floor
            self.counts.late_records += int((~in_time).sum())
            rows = rows.compress(in_time)
        if len(ranks) < 2 or not len(rows):
            # With fewer than two members on this node, there is nothing to compare.
            return nothing
        column_of = np.full(max(*ranks, int(rows["rank"].max())) + 1, -1)
        column_of[list(ranks)] = np.arange(len(ranks))
        column = column_of[rows["rank"]]
        if (column < 0).any():
            rows, column = rows.compress(column >= 0), column[column >= 0]
            if not len(rows):
                return nothing
        places = (rows["sequence"] - rows["sequence"].min()) * len(ranks) + column
        # Each rank's records are almost sorted. NumPy's stable sort is fast on such data.
        order = np.argsort(places, kind="stable")
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
            hopeless = lacking & (
                np.add.reduceat(gone[column].astype(np.int64), starts) < gone.sum()
            )
            self.counts.unjoined += int(hopeless.sum())
            lacking &= ~hopeless
        surplus = int(lacking.sum()) - MAX_PENDING
        if surplus > 0:
            dropped = np.flatnonzero(lacking)[:surplus]
            self.counts.unjoined += surplus
            self._floor = int(rows["sequence"][starts[dropped[-1]]])
            lacking[dropped] = False
        self._pending = rows.compress(np.repeat(lacking, lengths))
        return rows.take(starts[full][:, None] + np.arange(len(ranks)))
