"""Join the records that all ranks have of the same collective, and sum up statistics. Pure.

Records are joined by group and sequence number.

No clock that all nodes share is needed, because the durations on each rank are enough
(semantics.py). Records are not joined if they differ in members, generation, name or bytes. Records
are also not joined if their times cannot belong to one operation (_have_possible_times). Operations
that stay incomplete, because a rank exited or lost a record, are dropped and counted, which bounds
memory and time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from torchlens_perf.analysis.collectives.channel import (
    CALL,
    NOT_ENDED,
    Channel,
    ChannelState,
    JoinCounts,
    concatenate_calls,
)
from torchlens_perf.analysis.collectives.semantics import (
    SEND_RECV,
    CollectiveName,
    GroupKey,
    OperationKey,
    WaitRelation,
    ends_after_all_started,
    operation_sizes,
    parse_collective_name,
    semantics_of,
    split_wait_and_transfer,
)
from torchlens_perf.analysis.collectives.statistics import OperationStatistics, SizeStatistics
from torchlens_perf.run.ring import Flag, Kind

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.rank_facts import ProcessGroup

_ANY_SOURCE = "recv_any_source"
_NOT_LEARNT, _NONE = -2, -1
_CLOCK_SLACK_NS = 100_000
# Each rank converts kernel times to its host's clock. The error is at most the delay of the rank's
# NCCL thread.
_DEVICE_SLACK_NS = 5_000_000


@dataclasses.dataclass(frozen=True)
class _Signature:
    """Properties of a call that must be equal on all ranks of an operation."""

    row: int
    root: int | None
    """Global rank of the root."""


@dataclasses.dataclass(frozen=True)
class JoinState:
    """Saved state of a CollectiveJoin."""

    generation: int
    outdated_records: int
    local: tuple[int, ...]
    left: tuple[int, ...]
    operations: list[OperationStatistics]
    from_any: list[tuple[GroupKey, int]]
    channels: list[ChannelState]


class JoinedCallback(Protocol):
    """Callback for joined operations with the same key, each of which all `ranks` have finished."""

    def __call__(
        self,
        key: OperationKey,
        ranks: tuple[int, ...],
        calls: npt.NDArray[np.void],
        root: int | None,
        /,
    ) -> None:
        """Handle joined operations.

        calls: array of channel.CALL, shape [operations, ranks]. root: column of the root.
        """


class CollectiveJoin:
    """Joins the records of this node's ranks. Use it from one thread only.

    add_records() stores records, and join() joins complete operations.

    Results cover the newest generation of processes (statistics/restarts.py). A restart may give
    ranks to other processes, so it resets all counts. join() keeps at most MAX_PENDING incomplete
    operations of each group.
    """

    def __init__(self, joined: JoinedCallback | None = None) -> None:
        """joined: callback for all joined operations."""
        self._joined = joined
        # Number of records of earlier generations.
        self.outdated_records = 0
        self._reset(0)

    def _reset(self, generation: int) -> None:
        self.generation = generation
        self._local: set[int] = set()
        self._left: set[int] = set()
        # For each rank and process, an array that maps name ids to channel, signature and row.
        # Names of records that are not collectives have the value _NONE.
        self._places: dict[tuple[int, str], npt.NDArray[np.int64]] = {}
        self._channels: list[Channel] = []
        self._channel_of: dict[tuple[GroupKey, tuple[int, int] | None], int] = {}
        self._signatures: list[_Signature] = []
        self._signature_of: dict[_Signature, int] = {}
        self._rows: list[OperationStatistics] = []
        self._row_of: dict[OperationKey, int] = {}
        # Groups with known members, by name.
        self._groups: dict[str, set[GroupKey]] = {}
        self._uncounted: list[npt.NDArray[np.void]] = []
        # Ranks that have received messages without naming the source.
        self._from_any: set[tuple[GroupKey, int]] = set()

    # -- input

    def set_ranks(self, ranks: Iterable[int], generation: int = 0) -> None:
        """Add ranks to the set of this node's ranks.

        An operation is joined once all of its members on this node have added their records.
        """
        if self._accepts_generation(generation):
            self._local.update(ranks)

    def add_records(
        self,
        rank: int,
        records: npt.NDArray[np.void],
        names: Sequence[str],
        groups: Mapping[str, ProcessGroup],
        generation: int = 0,
        process: str = "",
        held_up: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Add records of one rank, of any kind and in any order.

        The caller leaves out steps that must not count, such as the warm-up.

        - records: dtype ring.record_dtype(). A record's name_id is an index in `names`.
        - groups: process groups that the rank has published, such as {"0": {"ranks": "0-3",
          "description": "default_pg"}}.
        - generation: number of the process's generation, see GenerationNumbers.
        - process: Identity.key of the process that `names` belong to.
        - held_up: True for records that a capture delayed. Operations with such records are joined,
          but not added to the statistics.
        """
        collective = records["kind"] == Kind.COLLECTIVE
        records = records[collective]
        if not self._accepts_generation(generation):
            self.outdated_records += len(records)
            return
        self._local.add(rank)
        if not len(records):
            return
        places = self._find_channels_and_rows(
            rank, process, records["name_id"].astype(np.int64), names, groups
        )
        flags = records["flags"].astype(np.int64)
        ended = flags & (Flag.COMPLETED | Flag.EXCEPTION) == Flag.COMPLETED
        calls = np.empty(len(records), CALL)
        calls["sequence"] = records["value1"] & 0xFFFFFFFF
        calls["rank"] = rank
        calls["start_ns"] = records["start_ns"]
        calls["duration_ns"] = np.where(ended, np.maximum(records["duration_ns"], 0), NOT_ENDED)
        calls["signature"] = places[:, 1]
        calls["bytes"] = records["value0"]
        calls["overlapped"] = flags & (Flag.ASYNC | Flag.OTHER_THREAD) != 0
        calls["row"] = places[:, 2]
        calls["by_device"] = flags & Flag.DEVICE != 0
        calls["held_up"] = False if held_up is None else held_up[collective]
        self._uncounted.append(calls)
        for index, chosen in _group_indexes_by_value(places[:, 0]):
            self._channels[index].queue_calls(rank, calls.take(chosen))

    def mark_ended(self, rank: int, generation: int = 0) -> None:
        """Mark the rank as ended, after all of its records were added.

        Operations without a record of this rank are dropped.
        """
        if generation == self.generation:
            self._left.add(rank)

    def _accepts_generation(self, generation: int) -> bool:
        if generation > self.generation:
            self._reset(generation)
        return generation == self.generation

    # -- names

    def _find_channels_and_rows(
        self,
        rank: int,
        process: str,
        name_ids: npt.NDArray[np.int64],
        names: Sequence[str],
        groups: Mapping[str, ProcessGroup],
    ) -> npt.NDArray[np.int64]:
        """Return the channel, signature and row of each record; shape [records, 3]."""
        known = self._places.get((rank, process), np.zeros((0, 3), np.int64))
        missing = max(0, max(len(names), int(name_ids.max()) + 1) - len(known))
        known = np.concatenate([known, np.full((missing, 3), _NOT_LEARNT, np.int64)])
        self._places[rank, process] = known
        # Ids of names whose group has no published members yet, which are looked up again later.
        passing = []
        for name_id in np.flatnonzero(np.bincount(name_ids)).tolist():
            if known[name_id, 2] == _NOT_LEARNT:
                operation = parse_collective_name(names[name_id]) if name_id < len(names) else None
                if operation is None:
                    known[name_id] = _NONE
                    continue
                group = self._find_group(rank, operation.group, groups)
                known[name_id] = self._locate_operation(rank, operation, group)
                if not group.ranks:
                    passing.append(name_id)
        found: npt.NDArray[np.int64] = known[name_ids]
        known[passing] = _NOT_LEARNT
        return found

    def _find_group(self, rank: int, name: str, groups: Mapping[str, ProcessGroup]) -> GroupKey:
        """Return the group as published by the rank, or else by another member of the group."""
        published = groups.get(name)
        if published is not None:
            key = GroupKey(name, published["ranks"], published["description"])
            self._groups.setdefault(name, set()).add(key)
            return key
        others = [key for key in self._groups.get(name, ()) if rank in key.ranks]
        return others[0] if len(others) == 1 else GroupKey(name, "")

    def _locate_operation(
        self, rank: int, operation: CollectiveName, group: GroupKey
    ) -> tuple[int, int, int]:
        pair = _sender_and_receiver(rank, operation, group)
        meaning = semantics_of(operation.operation)
        dtype = operation.dtype if meaning.equal_dtype else ""
        key = OperationKey(SEND_RECV if pair else operation.operation, dtype, group, pair)
        row = self._row_of.setdefault(key, len(self._rows))
        if row == len(self._rows):
            self._rows.append(OperationStatistics(key))
        if operation.operation == _ANY_SOURCE:
            self._stop_joining_receives(group, rank)
        if operation.operation == _ANY_SOURCE or (
            pair is None and meaning.waits is WaitRelation.PAIR
        ):
            return _NONE, _NONE, row
        signature = _Signature(row, group.global_rank(operation.root))
        code = self._signature_of.setdefault(signature, len(self._signatures))
        if code == len(self._signatures):
            self._signatures.append(signature)
        return self._channel_index(group, pair), code, row

    def _channel_index(self, group: GroupKey, pair: tuple[int, int] | None) -> int:
        """Return the index of a channel.

        Every backend counts the collectives of a group in one sequence, and the messages of a pair
        in one sequence for each direction. The type of the operation does not matter.
        """
        index = self._channel_of.setdefault((group, pair), len(self._channels))
        if index == len(self._channels):
            self._channels.append(Channel(group, pair))
            if pair is not None and (group, pair[1]) in self._from_any:
                self._channels[index].stop_joining()
        return index

    def _stop_joining_receives(self, group: GroupKey, rank: int) -> None:
        """Stop joining messages to a rank that has received from any source.

        The sources of such messages are not known, so the rank's receives cannot be assigned to the
        senders' sequences.
        """
        self._from_any.add((group, rank))
        for channel in self._channels:
            if channel.group == group and channel.pair is not None and channel.pair[1] == rank:
                channel.stop_joining()

    # -- joining

    def join(self) -> None:
        """Join complete operations, and drop operations that can no longer become complete.

        Call it after adding every rank's new records.
        """
        if self._uncounted:
            calls = concatenate_calls(self._uncounted)
            self._uncounted = []
            for index, chosen in _group_indexes_by_value(calls["row"]):
                self._rows[index].count_records(calls.take(chosen))
        for channel in self._channels:
            if not channel.group.ranks and self._groups.get(channel.group.name):
                # Several groups share this name, and these records do not show which group they
                # belong to.
                channel.stop_joining()
            ranks = channel.ranks_on_node(self._local)
            calls = channel.pop_complete_operations(ranks, self._left)
            if len(calls):
                self._add_complete_operations(channel, ranks, calls)

    def _add_complete_operations(
        self, channel: Channel, ranks: tuple[int, ...], calls: npt.NDArray[np.void]
    ) -> None:
        """Check complete operations and add them to the sums. calls: shape [operations, ranks]."""
        codes, sizes = calls["signature"], calls["bytes"]
        same = (codes == codes[:, :1]).all(axis=1)
        operations = (self._rows[signature.row].key.operation for signature in self._signatures)
        # True for operations whose bytes must be equal on all ranks.
        equal_bytes = np.array([semantics_of(operation).equal_bytes for operation in operations])
        same &= (sizes == sizes[:, :1]).all(axis=1) | ~equal_bytes[codes[:, 0]]
        ended = (calls["duration_ns"] != NOT_ENDED).all(axis=1)
        channel.counts.mismatched += int((~same).sum())
        channel.counts.unended += int((same & ~ended).sum())
        calls = calls.compress(same & ended, axis=0)
        possible = self._have_possible_times(calls)
        if not (possible | calls["by_device"].any(axis=1)).all():
            channel.stop_joining()
            channel.counts.unmatched_records += calls.size
            return
        # A single impossible kernel time does not end the joining, because the rank's NCCL thread
        # may have reported it late.
        channel.counts.unmatched_records += int((~possible).sum()) * len(ranks)
        channel.counts.joined += int(possible.sum())
        calls = calls.compress(possible & ~calls["held_up"].any(axis=1), axis=0)
        for code, chosen in _group_indexes_by_value(calls["signature"][:, 0]):
            self._add_statistics(self._signatures[code], ranks, calls.take(chosen, axis=0))

    def _have_possible_times(self, calls: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Return for each joined operation whether its ranks' times may belong to one operation.

        In most operations, no rank may leave before all ranks have arrived.

        Gloo's counter includes point-to-point messages. If ranks had sent different numbers of
        messages before the watch started, equal sequence numbers belong to different collectives.
        """
        waits = [
            ends_after_all_started(self._rows[each.row].key.operation) for each in self._signatures
        ]
        must_wait = np.array(waits, bool)[calls["signature"][:, 0]]
        started_ns = calls["start_ns"]
        ended_ns = started_ns + calls["duration_ns"]
        slack_ns = np.where(calls["by_device"].any(axis=1), _DEVICE_SLACK_NS, _CLOCK_SLACK_NS)
        return ~must_wait | (started_ns.max(axis=1) <= ended_ns.min(axis=1) + slack_ns)

    def _add_statistics(
        self, signature: _Signature, ranks: tuple[int, ...], calls: npt.NDArray[np.void]
    ) -> None:
        row = self._rows[signature.row]
        operation = row.key.operation
        sizes = operation_sizes(operation, calls["bytes"], len(row.key.members) or len(ranks))
        root = ranks.index(signature.root) if signature.root in ranks else None
        if self._joined is not None:
            self._joined(row.key, ranks, calls, root)
        overlapped = calls["overlapped"] & (not semantics_of(operation).blocks)
        for octave, chosen in _group_indexes_by_value(
            np.frexp(sizes.astype(np.float64))[1].astype(np.int64)
        ):
            found = split_wait_and_transfer(operation, calls["duration_ns"][chosen], root)
            row.sizes.setdefault(octave, SizeStatistics()).add_operations(
                ranks, sizes[chosen], overlapped[chosen], found
            )

    # -- output

    def has_all_ranks(self, members: Sequence[int]) -> bool:
        """Return True if all members of a group or pair are ranks of this node."""
        return bool(members) and self._local.issuperset(members)

    def operations(self) -> list[OperationStatistics]:
        """Return statistics by operation, dtype and group, which join() updates.

        The returned list must not be modified.
        """
        return self._rows

    def join_counts(self) -> dict[tuple[GroupKey, tuple[int, int] | None], JoinCounts]:
        """Return how many operations of each group and pair were joined or dropped."""
        return {
            (channel.group, channel.pair): dataclasses.replace(channel.counts)
            for channel in self._channels
        }

    def uncomparable_groups(self) -> set[str]:
        """Return the names of groups whose ranks began to count at different operations.

        Sequence numbers of these groups are not comparable between ranks.
        """
        return {
            channel.group.name
            for channel in self._channels
            if channel.pair is None and not channel.ordered
        }

    def to_state(self) -> JoinState:
        """Return the state that from_state() reads. Pending operations count as unjoined."""
        return JoinState(
            self.generation,
            self.outdated_records,
            tuple(sorted(self._local)),
            tuple(sorted(self._left)),
            self._rows,
            sorted(self._from_any),
            [channel.to_state() for channel in self._channels],
        )

    @classmethod
    def from_state(cls, earlier: JoinState) -> CollectiveJoin:
        join = cls()
        join._reset(earlier.generation)
        join.outdated_records = earlier.outdated_records
        join._local, join._left = set(earlier.local), set(earlier.left)
        join._from_any = set(earlier.from_any)
        join._rows = earlier.operations
        join._row_of = {row.key: at for at, row in enumerate(earlier.operations)}
        for each in earlier.channels:
            join._channels[join._channel_index(each.group, each.pair)].restore(each)
            if each.group.ranks:
                join._groups.setdefault(each.group.name, set()).add(each.group)
        return join


def _group_indexes_by_value(
    values: npt.NDArray[np.signedinteger[Any]],
) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield each non-negative value with the ascending indexes of its occurrences."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1 << 40))
    for first, stop in zip(starts.tolist(), [*starts.tolist(), len(order)][1:], strict=True):
        if ordered[first] >= 0:
            yield int(ordered[first]), order[first:stop]


def _sender_and_receiver(
    rank: int, operation: CollectiveName, group: GroupKey
) -> tuple[int, int] | None:
    """Return sender and receiver; None if the operation is no message or its peer is not known."""
    if operation.operation not in ("send", "recv") or not group.ranks:
        return None
    peer = group.global_rank(operation.peer)
    if peer is None or peer == rank:
        return None
    return (rank, peer) if operation.operation == "send" else (peer, rank)
