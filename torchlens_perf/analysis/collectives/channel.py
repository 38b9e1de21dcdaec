"""Match the records of several ranks by sequence number, for one sequence of operations. Pure.

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

# Largest number of operations of a channel that wait for a rank's record.
MAX_PENDING = 4096
NOT_ENDED = -1
# A rank's record of an operation. `call_ns`: duration of the issuing call; `signature` and `row`:
# see join.py.
CALL = np.dtype(
    [
        ("sequence", np.int64), ("start_ns", np.int64), ("duration_ns", np.int64), ("bytes", np.int64),
        ("call_ns", np.int64), ("rank", np.int32), ("signature", np.int32), ("row", np.int32),
        ("overlapped", np.bool_), ("by_device", np.bool_), ("held_up", np.bool_),
    ],
    align=True,
)  # fmt: skip


def concatenated(parts: Sequence[npt.NDArray[np.void]]) -> npt.NDArray[np.void]:
    """Return calls in one array.

    They are copied as bytes, because NumPy copies structures field by field, ten times slower.

    For the same reason, select calls with take() and compress() instead of an index.
    """
    return np.concatenate([part.view(f"V{CALL.itemsize}") for part in parts]).view(CALL)


@dataclasses.dataclass
class Counts:
    """Results of joining the operations of a group or a pair.

    Fields named `*_records` count records, the others operations.
    """

    joined: int = 0
    unjoined: int = 0
    """Operations that lack a rank's record: the rank left, made another number of steps, or lost
    the record.
    """
    mismatched: int = 0
    """Operations whose ranks differ in operation, dtype, root or bytes, or that have two records of
    a rank.
    """
    unended: int = 0
    """Operations whose records have all arrived, but some of them without an end."""
    late_records: int = 0
    """Records that came after their operation had been dropped."""
    unmatched_records: int = 0
    """Records that cannot be matched by their numbers.

    These are messages to a rank that receives from any source, and operations of groups whose ranks
    count from different starts. They also include kernels whose times contradict that all ranks
    waited for each other.
    """

    def plus(self, other: Counts) -> Counts:
        return Counts(
            *(
                mine + theirs
                for mine, theirs in zip(*map(dataclasses.astuple, (self, other)), strict=True)
            )
        )


@dataclasses.dataclass(frozen=True)
class ChannelState:
    """Saved state of a channel. Pending records are not saved and count as unjoined."""

    group: GroupKey
    pair: tuple[int, int] | None
    ordered: bool
    counts: Counts
    floor: int | None
    """Last sequence number of which a successor must not join records, because they are incomplete;
    None if all may be joined.
    """


class Channel:
    """One sequence of operations: a group's collectives, or the messages from one rank to
    another.
    """

    def __init__(self, group: GroupKey, pair: tuple[int, int] | None) -> None:
        self.group = group
        self.pair = pair
        self.counts = Counts()
        # True while sequence numbers show which records belong together.
        self.ordered = True
        # Operations up to this number are not joined anymore.
        self._floor: int | None = None
        self._newest: int | None = None
        self._seen: set[int] = set()
        self._queue: list[npt.NDArray[np.void]] = []
        self._pending = np.zeros(0, CALL)

    def add(self, rank: int, rows: npt.NDArray[np.void]) -> None:
        """Add calls of one rank, with 32-bit sequence numbers. They are kept until join()."""
        if not self.ordered:
            self.counts.unmatched_records += len(rows)
            return
        self._seen.add(rank)
        rows["sequence"] = self._unwrapped(rows["sequence"])
        self._queue.append(rows)

    def _unwrapped(self, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return sequence numbers that do not wrap at 32 bits."""
        if self._newest is None:
            self._newest = int(sequences[0])
        ahead = (sequences - self._newest + (1 << 31)) % (1 << 32) - (1 << 31)
        numbers: npt.NDArray[np.int64] = self._newest + ahead
        self._newest = max(self._newest, int(numbers.max()))
        return numbers

    def disorder(self) -> None:
        """Stop joining, because sequence numbers do not show which records belong together."""
        if self.ordered:
            self.ordered = False
            self.counts.unmatched_records += len(self._rows())
            self._queue, self._pending = [], self._pending[:0]

    def _rows(self) -> npt.NDArray[np.void]:
        return concatenated([self._pending, *self._queue])

    @property
    def pending_operations(self) -> int:
        """Number of operations that lack a rank's record so far."""
        return len(np.unique(self._rows()["sequence"]))

    def state(self) -> ChannelState:
        """Return the state for go_on_from()."""
        floors = [] if self._floor is None else [self._floor]
        floor = max([*floors, *self._rows()["sequence"].tolist()], default=None)
        counts = self.counts.plus(Counts(unjoined=self.pending_operations))
        return ChannelState(self.group, self.pair, self.ordered, counts, floor)

    def go_on_from(self, earlier: ChannelState) -> None:
        """Continue after an earlier channel of the same group and pair."""
        self.counts, self.ordered = (
            dataclasses.replace(earlier.counts),
            self.ordered and earlier.ordered,
        )
        self._floor = self._newest = earlier.floor

    def ranks(self, local: set[int]) -> tuple[int, ...]:
        """Return the members whose records come to this node.

        For a pair these are sender and receiver.

        Without known members, return the ranks seen so far.
        """
        members = self.pair or self.group.ranks
        return (
            tuple(rank for rank in members if rank in local)
            if members
            else tuple(sorted(self._seen))
        )

    def join(self, ranks: tuple[int, ...], left: set[int]) -> npt.NDArray[np.void]:
        """Remove and return the operations that have a record of every rank; shape [operations,
        ranks].

        Records of other ranks are dropped. left: ranks that send no more records. Operations that
        lack theirs are dropped.
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
            # The other ranks are on other nodes, so there is nothing to compare.
            return nothing
        column_of = np.full(max(*ranks, int(rows["rank"].max())) + 1, -1)
        column_of[list(ranks)] = np.arange(len(ranks))
        column = column_of[rows["rank"]]
        if (column < 0).any():
            rows, column = rows.compress(column >= 0), column[column >= 0]
            if not len(rows):
                return nothing
        places = (rows["sequence"] - rows["sequence"].min()) * len(ranks) + column
        # Each rank's records are almost sorted, so a stable sort merges them fast.
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
        complete: npt.NDArray[np.void] = rows.take(starts[full][:, None] + np.arange(len(ranks)))
        return complete
