"""What the operations of c10d mean: who waits for whom, and what their durations therefore show. Pure.

A rank's record holds when it issued an operation, by a clock that no other rank has, and how long that took. What can
be concluded from the durations of all ranks depends on the operation: no rank leaves an all-reduce before the last has
come, but the root of a broadcast may leave before anyone has. So each operation has a rule here, and a text for what
its durations cannot show.

Bandwidths are those of nccl-tests (doc/PERFORMANCE.md there): the algorithm's is size by time, and the bus's is that
times a factor for what the operation has to move, so that it can be held against the hardware's.
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
    """One process group. A name alone does not identify it: groups that were split off at once share one."""

    name: str
    ranges: str
    """Its members, as "0-7"; "" if they are not known."""
    description: str = ""

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """Its members, ascending; empty if they are not known."""
        return parse_ranges(self.ranges)

    def member(self, position: int | None) -> int | None:
        """The global rank at a position in the group; in a group whose members are not known, the position."""
        if position is None or not self.ranks:
            return position
        return self.ranks[position] if position < len(self.ranks) else None


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


SEND_RECV = "send/recv"
"""The name of a send and its receive together."""
_NAME = re.compile(r"(\S+) group=(.*?)(?: dtype=(\S+))?(?: (root|peer)=(\d+))?")


@dataclasses.dataclass(frozen=True)
class Operation:
    """What one record's name says."""

    operation: str
    """As c10d has it: "allreduce", "reduce_scatter_base"."""
    group: str
    """The process group's name; several groups may have it, see GroupKey."""
    dtype: str = ""
    """"" for a barrier, and for the ranks of a gather that get nothing."""
    root: int | None = None
    """Position of the root in the group."""
    peer: int | None = None
    """Position of the other rank of a send or a receive in the group."""


def parse(name: str) -> Operation | None:
    """Reads the name of a COLLECTIVE record, "allreduce group=0 dtype=float32"; None for any other name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    operation, group, dtype, role, position = found.groups()
    root, peer = (int(position) if role == wanted else None for wanted in ("root", "peer"))
    return Operation(operation, group, dtype or "", root, peer)


class Waits(Enum):
    """Who waits for whom."""

    ALL = "all for all"
    RECEIVERS = "the receivers for the root"
    ROOT = "the root for all"
    PAIR = "a sender and a receiver for each other"
    UNKNOWN = "not known"


class Size(Enum):
    """What a record's bytes, those of the operation's first argument, are of the size that moves."""

    TOTAL = "all of it, the same on each rank"
    PART = "each rank's part; together they are the size"
    OWN = "what this rank gets; the largest counts"
    NONE = "nothing moves"


@dataclasses.dataclass(frozen=True)
class Semantics:
    """What is known of an operation."""

    waits: Waits
    size: Size
    factor: str
    """Name of the bus bandwidth's factor; "" for none."""
    equal_bytes: bool = True
    """Whether all ranks must have the same bytes: if not, they have not issued the same operation."""
    equal_dtype: bool = True
    blocks: bool = False
    """Whether the caller always waits, whatever the record's flag says."""


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
    # With a list of tensors each rank may get another share.
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
    """What is known of an operation; of one that is not known here, that nothing is."""
    return SEMANTICS.get(operation, _UNKNOWN)


def ends_after_all_have_come(operation: str) -> bool:
    """Whether its end on any rank comes after its issue on all. Parts of an all-to-all may be empty: nobody waits."""
    meaning = semantics_of(operation)
    return meaning.waits is Waits.ALL and meaning.equal_bytes


def bus_factor(operation: str, ranks: int) -> float | None:
    """Bus bandwidth by algorithm bandwidth, in a group of so many ranks; None where the operation moves nothing.

    From nccl-tests, doc/PERFORMANCE.md; gather, scatter and send from its sources (GatherGetBw, ScatterGetBw,
    SendRecvGetBw).
    """
    factors = {"2(n-1)/n": 2 * (ranks - 1) / ranks, "(n-1)/n": (ranks - 1) / ranks, "1": 1.0}
    return factors.get(semantics_of(operation).factor)


def size_bytes(operation: str, record_bytes: npt.NDArray[np.int64], ranks: int) -> npt.NDArray[np.int64]:
    """The size that bandwidth is computed from, for each operation.

    record_bytes: shape [operations, ranks seen], the bytes of each rank's record. ranks: how many the group has.
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
    """What the durations of some operations of one kind show; times in ns, one row per operation, one column per rank.

    A rank's real waiting lies between `wait_ns` and `wait_upper_bound_ns`, as far as the ranks' ends lie together.
    """

    wait_ns: npt.NDArray[np.int64]
    """Shape [operations, ranks]: waiting that is certain."""
    wait_upper_bound_ns: npt.NDArray[np.int64]
    """Shape [operations, ranks]: waiting, and whatever else made the rank's operation longer than another's."""
    last: npt.NDArray[np.int64]
    """Shape [operations]: column of the rank that came last; -1 where that cannot be determined."""
    lag_ns: npt.NDArray[np.int64]
    """Shape [operations]: how much later than the second to last it came; 0 where that cannot be determined."""
    transfer_ns: npt.NDArray[np.int64]
    """Shape [operations]: what the operation took when all were there; -1 where that cannot be determined."""


def attribute(operation: str, duration_ns: npt.NDArray[np.int64], root: int | None) -> Attribution:
    """Separates waiting from the transfer, and names the last to come, as far as the operation's semantics allow.

    duration_ns: shape [operations, ranks], from each rank's issue to its end; at least two ranks. For SEND_RECV the
    columns are the sender's and the receiver's. root: column of the root; None if it has none or was not seen.
    """
    waits = semantics_of(operation).waits
    shortest = duration_ns.min(axis=1)
    surplus = duration_ns - shortest[:, None]
    nothing = np.zeros_like(surplus)
    nobody = np.full(len(duration_ns), -1, np.int64)
    no_lag = np.zeros(len(duration_ns), np.int64)
    if waits is Waits.ALL:
        # All end together, when the last has come and the transfer is over: who came last has the shortest duration.
        lag_ns = np.partition(duration_ns, 1, axis=1)[:, 1] - shortest
        last = np.where(lag_ns > 0, duration_ns.argmin(axis=1), -1)
        return Attribution(surplus, surplus, last, lag_ns, shortest)
    if waits is Waits.RECEIVERS:
        # A receiver's surplus over the shortest one is time in which only the root was missing. Receivers that all
        # waited alike for a late root look the same as a root that left early: only an upper bound can be given.
        receivers = np.delete(duration_ns, root, axis=1) if root is not None else duration_ns
        transfer_ns = receivers.min(axis=1)
        wait_ns, upper_bound_ns = np.maximum(duration_ns - transfer_ns[:, None], 0), surplus
        if root is not None:
            wait_ns[:, root] = 0
        return Attribution(wait_ns, upper_bound_ns, nobody, no_lag, transfer_ns)
    if waits is Waits.ROOT:
        # The others may leave when their part is sent, so that the root's surplus holds its own work too.
        if root is None:
            return Attribution(nothing, nothing, nobody, no_lag, nobody)
        upper_bound_ns = nothing.copy()
        upper_bound_ns[:, root] = surplus[:, root]
        return Attribution(nothing, upper_bound_ns, nobody, no_lag, duration_ns[:, root])
    if waits is Waits.PAIR and duration_ns.shape[1] == 2:
        # A send that takes longer than its receive waited for the receiver. One that is shorter may have been buffered.
        wait_ns = surplus.copy()
        wait_ns[:, 1] = 0
        receiver_last = wait_ns[:, 0] > 0
        return Attribution(wait_ns, surplus, np.where(receiver_last, 1, -1), wait_ns[:, 0], shortest)
    return Attribution(nothing, nothing, nobody, no_lag, nobody)


_CANNOT_TELL = {
    Waits.ALL: "",
    Waits.RECEIVERS: "a root may leave before its receivers have everything: how late a root was that all receivers "
    "waited for alike is only known as at most",
    Waits.ROOT: "ranks other than the root may leave before the root is there: nobody is named as last, the root's "
    "waiting is known as at most, and the transfer is the root's whole duration",
    Waits.PAIR: "a send may be buffered and end before its receive: the receiver's waiting is known as at most, the "
    "bandwidth is at most that; messages that tags bring into another order than that of their issue are not joined",
    Waits.UNKNOWN: "who waits for whom is not known for this operation: nothing is concluded from its durations",
}


@functools.cache
def cannot_tell(
    operation: str, *, overlapped: bool, all_seen: bool, ended: bool, by_device: bool = False
) -> tuple[str, ...]:
    """What the numbers on an operation do not show, in words.

    overlapped: asynchronous. all_seen: all of the group's ranks are on this node. ended: the ends were recorded.
    by_device: all of these are times of kernels, by the device's clock.
    """
    if not ended:
        return ("the backend does not tell when this operation ends: only its count, bytes and issue are known",)
    found = [_CANNOT_TELL[semantics_of(operation).waits]]
    if operation.startswith("alltoall"):
        found.append("a rank that gets nothing from another does not wait for it: uneven splits blur who came last")
    if overlapped and by_device:
        found.append(
            "asynchronous: the duration is the kernel's, so waiting is how much earlier a rank's kernel began, beside "
            "which its other streams may have worked"
        )
    elif overlapped:
        found.append(
            "asynchronous: the duration goes from the issue to the end in the background, so waiting is how much "
            "earlier a rank issued, no time that it was blocked, and the transfer holds queueing behind other "
            "operations: the bandwidth is at least that"
        )
    if not all_seen:
        found.append(
            "some of the group's ranks are on other nodes: waiting is at least that, the last is the last of those "
            "seen, and the transfer at most that"
        )
    return tuple(text for text in found if text)


def sole_operations(issued: Mapping[str, int], names: Iterable[str]) -> dict[str, dict[int, str]]:
    """`operations` for Progress, of groups that have issued one kind of collective only: the last is of that kind too.

    names: all that the rank's ring has interned, as "allreduce group=0 dtype=float32".
    """
    kinds: dict[str, set[str]] = {}
    for name in names:
        operation, _, rest = name.partition(" group=")
        if rest and " peer=" not in rest:
            kinds.setdefault(rest.partition(" ")[0], set()).add(operation)
    return {group: {issued[group]: min(kinds[group])} for group in issued if len(kinds.get(group, ())) == 1}
