"""Semantics of c10d operations: which ranks wait for which other ranks. Pure.

A record has the duration of an operation, and its start by the clock of the rank. What can be
concluded from the durations on all ranks depends on the operation. No rank leaves an all-reduce
before the last rank has arrived, but the root of a broadcast may leave before any other rank has
arrived. This module has a rule for each operation, and a text that says what the durations cannot
show.

Bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md there). Algorithm bandwidth is size
divided by time. Bus bandwidth is algorithm bandwidth times a factor that depends on the operation,
and is comparable to the bandwidth of the hardware.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchlens_perf.run.rank_ranges import parse_ranges


@dataclasses.dataclass(frozen=True, order=True)
class GroupKey:
    """One process group. A name is not unique: groups created by one split share a name."""

    name: str
    ranges: str
    """Member ranks, such as "0-7"; "" if not known."""
    description: str = ""

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """Member ranks in ascending order; empty if not known."""
        return parse_ranges(self.ranges)

    def global_rank(self, position: int | None) -> int | None:
        """Return the global rank at a position in the group.

        If the members are not known, return the position itself.
        """
        if position is None or not self.ranks:
            return position
        return self.ranks[position] if position < len(self.ranks) else None


class OperationKey(NamedTuple):
    """Key of one row of the statistics: an operation and dtype on a group or pair of ranks."""

    operation: str
    dtype: str
    group: GroupKey
    pair: tuple[int, int] | None = None
    """Sender and receiver of a message; None for collectives."""

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that take part in the operation; empty if not known."""
        return self.group.ranks if self.pair is None else self.pair


SEND_RECV = "send/recv"
"""Operation name of a send that is joined with its receive."""
_NAME = re.compile(r"(\S+) group=(.*?)(?: dtype=(\S+))?(?: (root|peer|row)=(\d+))?")


@dataclasses.dataclass(frozen=True)
class CollectiveName:
    """The parsed name of a COLLECTIVE record."""

    operation: str
    """Name in c10d, such as "allreduce" or "reduce_scatter_base"."""
    group: str
    """Name of the process group. It may not be unique, see GroupKey."""
    dtype: str = ""
    """Data type; "" for a barrier, and on ranks of a gather that receive nothing."""
    root: int | None = None
    """Position of the root in the group."""
    peer: int | None = None
    """Position in the group of the other rank of a send or receive."""


def parse_collective_name(name: str) -> CollectiveName | None:
    """Parse the name of a COLLECTIVE record, such as "allreduce group=0 dtype=float32".

    Return None if the name has another form.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    operation, group, dtype, role, position = found.groups()
    root, peer = (int(position) if role == wanted else None for wanted in ("root", "peer"))
    return CollectiveName(operation, group, dtype or "", root, peer)


class WaitRelation(Enum):
    """The ranks of an operation that wait, and the ranks that they wait for."""

    ALL = "all for all"
    RECEIVERS = "the receivers for the root"
    ROOT = "the root for all"
    PAIR = "a sender and a receiver for each other"
    UNKNOWN = "not known"


class SizeRule(Enum):
    """Rule that computes the size of an operation from the bytes in the ranks' records.

    A record has the number of bytes of the operation's first argument.
    """

    TOTAL = "all of it, the same on each rank"
    PART = "each rank's part; together they are the size"
    OWN = "what this rank gets; the largest counts"
    NONE = "nothing moves"


@dataclasses.dataclass(frozen=True)
class Semantics:
    """Properties of an operation."""

    waits: WaitRelation
    size: SizeRule
    factor: str
    """Formula of the bus bandwidth's factor, see bus_bandwidth(); "" if no data moves."""
    equal_bytes: bool = True
    """True if all ranks of the operation must have the same number of bytes."""
    equal_dtype: bool = True
    blocks: bool = False
    """True if the caller always waits, even if the record is marked as asynchronous."""


_REDUCE = Semantics(WaitRelation.ALL, SizeRule.TOTAL, "2(n-1)/n")
_ALLGATHER = Semantics(WaitRelation.ALL, SizeRule.TOTAL, "(n-1)/n")
_REDUCE_SCATTER = Semantics(WaitRelation.ALL, SizeRule.PART, "(n-1)/n")
_ALLTOALL = Semantics(WaitRelation.ALL, SizeRule.OWN, "(n-1)/n", equal_bytes=False)
_PAIR = Semantics(WaitRelation.PAIR, SizeRule.TOTAL, "1")

SEMANTICS = {
    "allreduce": _REDUCE,
    "allreduce_coalesced": _REDUCE,
    "allgather": _ALLGATHER,
    "allgather_base": _ALLGATHER,
    "allgather_coalesced": _ALLGATHER,
    "allgather_into_tensor_coalesced": _ALLGATHER,
    # With a list of tensors, each rank may receive a different size.
    "reduce_scatter": dataclasses.replace(_REDUCE_SCATTER, equal_bytes=False),
    "reduce_scatter_base": _REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": _REDUCE_SCATTER,
    "alltoall": _ALLTOALL,
    "alltoall_base": _ALLTOALL,
    "barrier": Semantics(WaitRelation.ALL, SizeRule.NONE, ""),
    "monitored_barrier": Semantics(WaitRelation.ALL, SizeRule.NONE, "", blocks=True),
    "broadcast": Semantics(WaitRelation.RECEIVERS, SizeRule.TOTAL, "1"),
    "scatter": Semantics(WaitRelation.RECEIVERS, SizeRule.PART, "(n-1)/n"),
    "reduce": Semantics(WaitRelation.ROOT, SizeRule.TOTAL, "1"),
    # Only the root has the output tensors.
    "gather": Semantics(
        WaitRelation.ROOT, SizeRule.OWN, "(n-1)/n", equal_bytes=False, equal_dtype=False
    ),
    "send": _PAIR,
    "recv": _PAIR,
    SEND_RECV: _PAIR,
}
_UNKNOWN = Semantics(WaitRelation.UNKNOWN, SizeRule.NONE, "", equal_bytes=False, equal_dtype=False)


def semantics_of(operation: str) -> Semantics:
    """Return the semantics of an operation. An unknown operation allows no conclusions."""
    return SEMANTICS.get(operation, _UNKNOWN)


def ends_after_all_started(operation: str) -> bool:
    """Return True if no rank can finish the operation before all ranks have started it.

    An all-to-all is not included, because some of its parts may be empty.
    """
    meaning = semantics_of(operation)
    return meaning.waits is WaitRelation.ALL and meaning.equal_bytes


def bus_bandwidth(
    operation: str, ranks: int, mean_bytes: float, transfer_ns: float
) -> float | None:
    """Return the bus bandwidth in bytes per second; None if no data moves in any known time.

    The bus bandwidth is the algorithm bandwidth times a factor. The factors are those of
    doc/PERFORMANCE.md in nccl-tests. The factors of gather, scatter and send are in its source code
    (GatherGetBw, ScatterGetBw, SendRecvGetBw).
    """
    factors = {"2(n-1)/n": 2 * (ranks - 1) / ranks, "(n-1)/n": (ranks - 1) / ranks, "1": 1.0}
    factor = factors.get(semantics_of(operation).factor)
    if factor is None or not mean_bytes or not transfer_ns > 0:
        return None
    return mean_bytes / transfer_ns * 1e9 * factor


def operation_sizes(
    operation: str, record_bytes: npt.NDArray[np.int64], ranks: int
) -> npt.NDArray[np.int64]:
    """Return the size of each operation, from which its bandwidth is computed.

    record_bytes: bytes in each rank's record, shape [operations, ranks that have a record]. ranks:
    size of the group.
    """
    size = semantics_of(operation).size
    if size is SizeRule.NONE:
        return np.zeros(len(record_bytes), np.int64)
    if size is SizeRule.PART:
        return record_bytes.sum(axis=1) * ranks // record_bytes.shape[1]
    return record_bytes.max(axis=1)


@dataclasses.dataclass(frozen=True)
class WaitAndTransfer:
    """Wait and transfer times, computed from the durations of operations of one kind.

    Times are in ns, with one row per operation and one column per rank.

    A rank's real wait is between `wait_ns` and `wait_upper_bound_ns`, if all ranks finish at about
    the same time.
    """

    wait_ns: npt.NDArray[np.int64]
    """Shape [operations, ranks]: lower bound of the wait."""
    wait_upper_bound_ns: npt.NDArray[np.int64]
    """Shape [operations, ranks]: upper bound of the wait. It may include other reasons why the
    operation took longer on this rank.
    """
    last: npt.NDArray[np.int64]
    """Shape [operations]: column of the last rank to arrive; -1 if it cannot be determined."""
    lag_ns: npt.NDArray[np.int64]
    """Shape [operations]: delay of the last rank after the second to last; 0 if not known."""
    transfer_ns: npt.NDArray[np.int64]
    """Shape [operations]: duration after all ranks had arrived; -1 if not known."""


def split_wait_and_transfer(
    operation: str, duration_ns: npt.NDArray[np.int64], root: int | None
) -> WaitAndTransfer:
    """Split durations into wait and transfer, and find the last rank to arrive.

    If the semantics of the operation do not allow this, values are -1, 0 or an upper bound.

    - duration_ns: time from each rank's start to its end, shape [operations, ranks], for at least
      two ranks. For SEND_RECV, the columns are sender and receiver.
    - root: column of the root; None if the operation has no root or the root has no column.
    """
    waits = semantics_of(operation).waits
    shortest = duration_ns.min(axis=1)
    surplus = duration_ns - shortest[:, None]
    nothing = np.zeros_like(surplus)
    nobody = np.full(len(duration_ns), -1, np.int64)
    no_lag = np.zeros(len(duration_ns), np.int64)
    if waits is WaitRelation.ALL:
        # All ranks finish together, once the last rank has arrived and the transfer is done. The
        # last rank to arrive has the shortest duration.
        lag_ns = np.partition(duration_ns, 1, axis=1)[:, 1] - shortest
        last = np.where(lag_ns > 0, duration_ns.argmin(axis=1), -1)
        return WaitAndTransfer(surplus, surplus, last, lag_ns, shortest)
    if waits is WaitRelation.RECEIVERS:
        # A receiver waits for the root in the time by which it exceeds the shortest receiver's
        # duration. A late root for which all receivers waited equally cannot be distinguished from
        # a root that left early, so only an upper bound is known.
        receivers = np.delete(duration_ns, root, axis=1) if root is not None else duration_ns
        transfer_ns = receivers.min(axis=1)
        wait_ns, upper_bound_ns = np.maximum(duration_ns - transfer_ns[:, None], 0), surplus
        if root is not None:
            wait_ns[:, root] = 0
        return WaitAndTransfer(wait_ns, upper_bound_ns, nobody, no_lag, transfer_ns)
    if waits is WaitRelation.ROOT and root is not None:
        # Other ranks may leave when they have sent their parts, so the root's excess also includes
        # the root's own work.
        upper_bound_ns = nothing.copy()
        upper_bound_ns[:, root] = surplus[:, root]
        return WaitAndTransfer(nothing, upper_bound_ns, nobody, no_lag, duration_ns[:, root])
    if waits is WaitRelation.PAIR and duration_ns.shape[1] == 2:
        # A send that takes longer than its receive has waited for the receiver. A send that takes
        # less time may have been buffered.
        wait_ns = surplus.copy()
        wait_ns[:, 1] = 0
        receiver_last = wait_ns[:, 0] > 0
        return WaitAndTransfer(
            wait_ns, surplus, np.where(receiver_last, 1, -1), wait_ns[:, 0], shortest
        )
    return WaitAndTransfer(nothing, nothing, nobody, no_lag, nobody)


_CANNOT_TELL = {
    WaitRelation.ALL: "",
    WaitRelation.RECEIVERS: (
        "the root may leave before its receivers have all data: if all receivers waited "
        "equally, only an upper bound of the root's delay is known"
    ),
    WaitRelation.ROOT: (
        "ranks other than the root may leave before the root arrives: the last to "
        "arrive is not known, the root's wait is an upper bound, and the transfer is the root's "
        "whole duration"
    ),
    WaitRelation.PAIR: (
        "a send may be buffered and end before its receive: the receiver's wait and the bandwidth"
        " are upper bounds; messages that tags bring into another order than that of their issue"
        " are not joined"
    ),
    WaitRelation.UNKNOWN: (
        "which ranks wait in this operation is not known: nothing is concluded from its durations"
    ),
}


@functools.cache
def describe_limits(
    operation: str, *, overlapped: bool, all_seen: bool, ended: bool, by_device: bool = False
) -> tuple[str, ...]:
    """Return texts that say what the numbers of an operation do not show.

    - overlapped: the operation was asynchronous.
    - all_seen: all ranks of the group are on this node.
    - ended: the end of the operation was recorded.
    - by_device: all times are kernel times by the device's clock.
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
