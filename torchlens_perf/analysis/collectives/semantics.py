"""Semantics of c10d operations: which ranks wait for which, and thus what their durations show.

Pure.

A record has the start of an operation by the clock of its rank, and its duration. The conclusions
from all ranks' durations depend on the operation. No rank leaves an all-reduce before the last rank
has come, but the root of a broadcast may leave before any other has come. Each operation has a rule
here, and a text on what its durations cannot show.

Bandwidths are those of nccl-tests (doc/PERFORMANCE.md there). Algorithm bandwidth is size divided
by time. Bus bandwidth multiplies it by a factor for the data that the operation moves, which makes
it comparable to the hardware's.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchlens_perf.run.rank_ranges import parse_ranges

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclasses.dataclass(frozen=True, order=True)
class GroupKey:
    """One process group. The name is not unique: groups created by one split share a name."""

    name: str
    ranges: str
    """Member ranks, such as "0-7"; "" if not known."""
    description: str = ""

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """Member ranks in ascending order; empty if not known."""
        return parse_ranges(self.ranges)

    def member(self, position: int | None) -> int | None:
        """Return the global rank at a position in the group.

        Without known members, return the position.
        """
        if position is None or not self.ranks:
            return position
        return self.ranks[position] if position < len(self.ranks) else None


class OperationKey(NamedTuple):
    """One row of the statistics: an operation with its dtype on a group or a pair of its ranks."""

    operation: str
    dtype: str
    group: GroupKey
    pair: tuple[int, int] | None = None
    """Sender and receiver."""

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that take part; empty if not known."""
        return self.group.ranks if self.pair is None else self.pair


SEND_RECV = "send/recv"
"""The name of a send together with its receive."""
_NAME = re.compile(r"(\S+) group=(.*?)(?: dtype=(\S+))?(?: (root|peer)=(\d+))?")


@dataclasses.dataclass(frozen=True)
class Operation:
    """The content of a record's name."""

    operation: str
    """Name in c10d, such as "allreduce" or "reduce_scatter_base"."""
    group: str
    """Name of the process group, which may not be unique, see GroupKey."""
    dtype: str = ""
    """Data type; "" for a barrier, and on ranks of a gather that receive nothing."""
    root: int | None = None
    """Position of the root in the group."""
    peer: int | None = None
    """Position of the other rank of a send or receive in the group."""


def parse(name: str) -> Operation | None:
    """Parse the name of a COLLECTIVE record, such as "allreduce group=0 dtype=float32".

    Return None for any other name.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    operation, group, dtype, role, position = found.groups()
    root, peer = (int(position) if role == wanted else None for wanted in ("root", "peer"))
    return Operation(operation, group, dtype or "", root, peer)


class Waits(Enum):
    """Wait relation: which ranks wait for which."""

    ALL = "all for all"
    RECEIVERS = "the receivers for the root"
    ROOT = "the root for all"
    PAIR = "a sender and a receiver for each other"
    UNKNOWN = "not known"


class Size(Enum):
    """Relation of a record's bytes to the size that moves.

    The record has the bytes of the operation's first argument.
    """

    TOTAL = "all of it, the same on each rank"
    PART = "each rank's part; together they are the size"
    OWN = "what this rank gets; the largest counts"
    NONE = "nothing moves"


@dataclasses.dataclass(frozen=True)
class Semantics:
    """Properties of an operation."""

    waits: Waits
    size: Size
    factor: str
    """Name of the bus bandwidth's factor; "" for none."""
    equal_bytes: bool = True
    """True if all ranks must have the same bytes. If they differ, the ranks have issued different
    operations.
    """
    equal_dtype: bool = True
    blocks: bool = False
    """True if the caller always waits, whatever the record's flag is."""


_REDUCE = Semantics(Waits.ALL, Size.TOTAL, "2(n-1)/n")
_ALLGATHER = Semantics(Waits.ALL, Size.TOTAL, "(n-1)/n")
_REDUCE_SCATTER = Semantics(Waits.ALL, Size.PART, "(n-1)/n")
_ALLTOALL = Semantics(Waits.ALL, Size.OWN, "(n-1)/n", equal_bytes=False)
_PAIR = Semantics(Waits.PAIR, Size.TOTAL, "1")

SEMANTICS = {
    "allreduce": _REDUCE,
    "allreduce_coalesced": _REDUCE,
    "allgather": _ALLGATHER,
    "allgather_base": _ALLGATHER,
    "allgather_coalesced": _ALLGATHER,
    "allgather_into_tensor_coalesced": _ALLGATHER,
    # With a list of tensors, each rank may receive another size.
    "reduce_scatter": dataclasses.replace(_REDUCE_SCATTER, equal_bytes=False),
    "reduce_scatter_base": _REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": _REDUCE_SCATTER,
    "alltoall": _ALLTOALL,
    "alltoall_base": _ALLTOALL,
    "barrier": Semantics(Waits.ALL, Size.NONE, ""),
    "monitored_barrier": Semantics(Waits.ALL, Size.NONE, "", blocks=True),
    "broadcast": Semantics(Waits.RECEIVERS, Size.TOTAL, "1"),
    "scatter": Semantics(Waits.RECEIVERS, Size.PART, "(n-1)/n"),
    "reduce": Semantics(Waits.ROOT, Size.TOTAL, "1"),
    # Only the root has the tensors that are gathered into.
    "gather": Semantics(Waits.ROOT, Size.OWN, "(n-1)/n", equal_bytes=False, equal_dtype=False),
    "send": _PAIR,
    "recv": _PAIR,
    SEND_RECV: _PAIR,
}
_UNKNOWN = Semantics(Waits.UNKNOWN, Size.NONE, "", equal_bytes=False, equal_dtype=False)


def semantics_of(operation: str) -> Semantics:
    """Return the properties of an operation. An unknown one has no properties."""
    return SEMANTICS.get(operation, _UNKNOWN)


def ends_after_all_have_come(operation: str) -> bool:
    """Return True if an operation ends on each rank after all ranks have started it.

    Parts of an all-to-all may be empty, so it is not included.
    """
    meaning = semantics_of(operation)
    return meaning.waits is Waits.ALL and meaning.equal_bytes


def bus_factor(operation: str, ranks: int) -> float | None:
    """Return bus bandwidth divided by algorithm bandwidth; None if no data moves.

    Source: nccl-tests, doc/PERFORMANCE.md; for gather, scatter and send its sources (GatherGetBw,
    ScatterGetBw, SendRecvGetBw).
    """
    factors = {"2(n-1)/n": 2 * (ranks - 1) / ranks, "(n-1)/n": (ranks - 1) / ranks, "1": 1.0}
    return factors.get(semantics_of(operation).factor)


def size_bytes(
    operation: str, record_bytes: npt.NDArray[np.int64], ranks: int
) -> npt.NDArray[np.int64]:
    """Return the size of each operation for computing bandwidth.

    record_bytes: shape [operations, ranks seen], bytes in each rank's record. ranks: size of the
    group.
    """
    size = semantics_of(operation).size
    if size is Size.NONE:
        return np.zeros(len(record_bytes), np.int64)
    if size is Size.PART:
        parts: npt.NDArray[np.int64] = record_bytes.sum(axis=1) * ranks // record_bytes.shape[1]
        return parts
    largest: npt.NDArray[np.int64] = record_bytes.max(axis=1)
    return largest


@dataclasses.dataclass(frozen=True)
class Attribution:
    """Conclusions from the durations of operations of one kind.

    Times in ns, one row per operation, one column per rank.

    A rank's real wait is between `wait_ns` and `wait_upper_bound_ns`, as far as the ranks' ends are
    close to each other.
    """

    wait_ns: npt.NDArray[np.int64]
    """Shape [operations, ranks]: wait that is certain."""
    wait_upper_bound_ns: npt.NDArray[np.int64]
    """Shape [operations, ranks]: wait, plus any other reason why the rank's operation was longer
    than another's.
    """
    last: npt.NDArray[np.int64]
    """Shape [operations]: column of the last rank to arrive; -1 if it cannot be determined."""
    lag_ns: npt.NDArray[np.int64]
    """Shape [operations]: its delay after the second to last; 0 if it cannot be determined."""
    transfer_ns: npt.NDArray[np.int64]
    """Shape [operations]: duration of the operation once all ranks had arrived; -1 if it cannot be
    determined.
    """


def attribute(operation: str, duration_ns: npt.NDArray[np.int64], root: int | None) -> Attribution:
    """Separate waiting from the transfer, and find the last rank to arrive.

    Operations whose semantics do not allow that have -1, 0 or an upper bound.

    duration_ns: shape [operations, ranks], from each rank's start to its end, for at least two
    ranks. For SEND_RECV the columns are sender and receiver. root: column of the root; None without
    one, or if it was not seen.
    """
    waits = semantics_of(operation).waits
    shortest = duration_ns.min(axis=1)
    surplus = duration_ns - shortest[:, None]
    nothing = np.zeros_like(surplus)
    nobody = np.full(len(duration_ns), -1, np.int64)
    no_lag = np.zeros(len(duration_ns), np.int64)
    if waits is Waits.ALL:
        # All end together, after the last has arrived and the transfer is done. The last to arrive
        # has the shortest duration.
        lag_ns = np.partition(duration_ns, 1, axis=1)[:, 1] - shortest
        last = np.where(lag_ns > 0, duration_ns.argmin(axis=1), -1)
        return Attribution(surplus, surplus, last, lag_ns, shortest)
    if waits is Waits.RECEIVERS:
        # A receiver's excess over the shortest one is time in which only the root was missing. If
        # all receivers waited equally for a late root, that looks the same as a root that left
        # early. Only an upper bound is known.
        receivers = np.delete(duration_ns, root, axis=1) if root is not None else duration_ns
        transfer_ns = receivers.min(axis=1)
        wait_ns, upper_bound_ns = np.maximum(duration_ns - transfer_ns[:, None], 0), surplus
        if root is not None:
            wait_ns[:, root] = 0
        return Attribution(wait_ns, upper_bound_ns, nobody, no_lag, transfer_ns)
    if waits is Waits.ROOT:
        # Other ranks may leave when their part is sent, so the root's excess also includes its own
        # work.
        if root is None:
            return Attribution(nothing, nothing, nobody, no_lag, nobody)
        upper_bound_ns = nothing.copy()
        upper_bound_ns[:, root] = surplus[:, root]
        return Attribution(nothing, upper_bound_ns, nobody, no_lag, duration_ns[:, root])
    if waits is Waits.PAIR and duration_ns.shape[1] == 2:
        # A send that takes longer than its receive waited for the receiver. A shorter one may have
        # been buffered.
        wait_ns = surplus.copy()
        wait_ns[:, 1] = 0
        receiver_last = wait_ns[:, 0] > 0
        return Attribution(
            wait_ns, surplus, np.where(receiver_last, 1, -1), wait_ns[:, 0], shortest
        )
    return Attribution(nothing, nothing, nobody, no_lag, nobody)


_CANNOT_TELL = {
    Waits.ALL: "",
    Waits.RECEIVERS: (
        "the root may leave before its receivers have all data: if all receivers waited "
        "equally, only an upper bound of the root's delay is known"
    ),
    Waits.ROOT: (
        "ranks other than the root may leave before the root arrives: the last to "
        "arrive is not known, the root's wait is an upper bound, and the transfer is the root's "
        "whole duration"
    ),
    Waits.PAIR: (
        "a send may be buffered and end before its receive: the receiver's wait and the bandwidth"
        " are upper bounds; messages that tags bring into another order than that of their issue"
        " are not joined"
    ),
    Waits.UNKNOWN: (
        "which ranks wait in this operation is not known: nothing is concluded from its durations"
    ),
}


@functools.cache
def cannot_tell(
    operation: str, *, overlapped: bool, all_seen: bool, ended: bool, by_device: bool = False
) -> tuple[str, ...]:
    """Return a text on what the numbers of an operation do not show.

    overlapped: the operation was asynchronous. all_seen: all ranks of the group are on this node.
    ended: ends were recorded. by_device: all times are kernel times by the device's clock.
    """
    if not ended:
        return (
            (
                "the backend does not report the end of this operation: only its count, bytes and"
                " issue are known"
            ),
        )
    found = [_CANNOT_TELL[semantics_of(operation).waits]]
    if operation.startswith("alltoall"):
        found.append(
            "a rank that receives no data from another does not wait for it: with uneven "
            "splits the last to arrive is uncertain"
        )
    if overlapped and by_device:
        found.append(
            "asynchronous: the duration is the kernel's, so the wait is how much earlier a "
            "rank's kernel began; other streams may have worked meanwhile"
        )
    elif overlapped:
        found.append(
            "asynchronous: the duration is from the issue to the end in the background, so the wait"
            " is how much earlier a rank issued, not a time that it was blocked; the transfer"
            " includes queueing behind other operations, so the bandwidth is a lower bound"
        )
    if not all_seen:
        found.append(
            "some of the group's ranks are on other nodes: the wait is a lower bound, the transfer "
            "an upper bound, and the last to arrive is the last of those seen"
        )
    return tuple(text for text in found if text)


def sole_operations(issued: Mapping[str, int], names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Return `operations` for Progress, for groups that have only issued one kind of collective.

    The last is of that kind, too.

    names: all names interned in the rank's ring, such as "allreduce group=0 dtype=float32".
    """
    kinds: dict[str, set[str]] = {}
    for name in names:
        operation, _, rest = name.partition(" group=")
        if rest and " peer=" not in rest:
            kinds.setdefault(rest.partition(" ")[0], set()).add(operation)
    return {
        group: {issued[group]: min(kinds[group])}
        for group in issued
        if len(kinds.get(group, ())) == 1
    }
