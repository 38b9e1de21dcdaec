"""One step's collectives, joined over its ranks: who came when and waited how long; and the clocks of several nodes.

A blocking collective ends everywhere at about the same time. So the surplus of a rank's duration over the shortest one
is waiting, which no clock is needed for; and on several nodes those ends show how far their clocks are apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.analysis.collectives.semantics import (
    OperationKey,
    Waits,
    attribute,
    ends_after_all_have_come,
    parse,
    semantics_of,
)
from torchlens_perf.page.contents import CollectiveJoined
from torchlens_perf.run.ring import Flag, Kind

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.page.gather.span_files import Records
    from torchlens_perf.run.identity import ProcessGroup

MIN_ENDS = 3  # of collectives that two nodes share, from which on their clocks are known
_MAX_SPREAD_NS = 5_000_000  # of those ends: clocks that are known no better tell nothing


class RankRecords(NamedTuple):
    """One rank's records of one step."""

    rank: int
    node: str
    unix_offset_ns: int
    """What to add to its times to have them on the wall clock of its node."""
    groups: Mapping[str, ProcessGroup]
    records: Records


class CommonClock(NamedTuple):
    """What to add to each rank's times to have them on one line; ranks that cannot be laid there are missing."""

    offset_ns: dict[int, int]
    words: str


def common_clock(ranks: Collection[RankRecords], uncomparable: Collection[str]) -> CommonClock:
    """uncomparable: names of groups whose sequence numbers do not compare."""
    nodes = list(dict.fromkeys(each.node for each in ranks))
    if len(nodes) < 2:
        return CommonClock(
            {each.rank: each.unix_offset_ns for each in ranks}, "The ranks are on one node, by its clock."
        )
    ends: dict[tuple[str, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for each in ranks:
        for key, end_ns in _ends(each, uncomparable):
            ends[key][each.node].append(end_ns + each.unix_offset_ns)
    shift_ns, known, spread_ns = {nodes[0]: 0}, [], 0.0
    for node in nodes[1:]:
        apart = np.array(
            [np.median(of[node]) - np.median(of[nodes[0]]) for of in ends.values() if node in of and nodes[0] in of]
        )
        if len(apart) >= MIN_ENDS:
            middle = float(np.median(apart))
            deviation = float(np.median(np.abs(apart - middle)))
            if deviation <= _MAX_SPREAD_NS:
                shift_ns[node], spread_ns = -round(middle), max(spread_ns, deviation)
                known.append(len(apart))
    offset_ns = {each.rank: each.unix_offset_ns + shift_ns[each.node] for each in ranks if each.node in shift_ns}
    if len(shift_ns) < 2:
        return CommonClock(offset_ns, f"The clocks of {len(nodes)} nodes cannot be compared in this step.")
    words = (
        f"The clocks of {len(shift_ns)} nodes are laid together by the ends of {min(known)} or more collectives, to "
        f"within about {max(spread_ns / 1e6, 0.001):.3f} ms."
    )
    left = len(nodes) - len(shift_ns)
    return CommonClock(offset_ns, words + (f" Those of {left} others cannot be compared." if left else ""))


def _ends(each: RankRecords, uncomparable: Collection[str]) -> list[tuple[tuple[str, int], int]]:
    """Of its blocking collectives that end everywhere together: name and number, and when they ended."""
    records, names = each.records
    rows = records[(records["kind"] == Kind.COLLECTIVE) & ((records["flags"] & Flag.COMPLETED) != 0)]
    found = []
    for row in rows:
        operation = parse(names[row["name_id"]])
        if operation is None or operation.group in uncomparable or not ends_after_all_have_come(operation.operation):
            continue
        group = each.groups.get(operation.group)
        key = f"{names[row['name_id']]} {group['ranks'] if group is not None else ''}"
        found.append(((key, int(row["value1"]) & 0xFFFFFFFF), int(row["start_ns"] + row["duration_ns"])))
    return found


class _Call(NamedTuple):
    key: OperationKey
    number: int
    ranks: tuple[int, ...]
    start_ns: npt.NDArray[np.int64]
    duration_ns: npt.NDArray[np.int64]
    bytes: int
    asynchronous: bool
    root: int | None


def joined(ranks: Collection[RankRecords], clock: CommonClock, uncomparable: Collection[str]) -> list[CollectiveJoined]:
    """The collectives of one step that several of these ranks have issued, in the order of their ends.

    Who came last is known where all ranks of the group are among `ranks`.
    """
    calls: list[_Call] = []

    def take(key: OperationKey, members: tuple[int, ...], rows: npt.NDArray[np.void], root: int | None) -> None:
        blocks = semantics_of(key.operation).blocks
        for row in rows:
            number, size = int(row["sequence"][0]), int(row["bytes"].max())
            overlapped = bool(row["overlapped"].any()) and not blocks
            calls.append(_Call(key, number, members, row["start_ns"], row["duration_ns"], size, overlapped, root))

    join = CollectiveJoin(take)
    by_rank = {each.rank: each for each in ranks}
    join.set_ranks(0, by_rank)
    one_node = len({each.node for each in ranks}) == 1
    order = {number: place for place, number in enumerate(_numbers_by_end(ranks))}
    for each in ranks:
        records = each.records.records.copy()
        if not one_node:  # by no common clock, so that none is asked for: all ends lie together
            records["start_ns"] = -records["duration_ns"]
        join.add(0, each.rank, records, each.records.names, each.groups, 0, str(each.rank))
    join.join()
    comparable = [call for call in calls if call.key.group.name not in uncomparable]
    comparable.sort(key=lambda call: order.get((call.ranks[0], call.key.group.name, call.number), 0))
    return [_row(call, by_rank, clock) for call in comparable]


def _numbers_by_end(ranks: Collection[RankRecords]) -> list[tuple[int, str, int]]:
    """Rank, group and number of all operations, in the order of their ends, by each rank's own clock."""
    found = []
    for each in ranks:
        records, names = each.records
        rows = records[records["kind"] == Kind.COLLECTIVE]
        begin_ns = int(records["start_ns"].min(initial=1 << 62))
        for row in rows:
            operation = parse(names[row["name_id"]])
            if operation is not None:
                end_ns = int(row["start_ns"] + row["duration_ns"]) - begin_ns
                found.append((end_ns, (each.rank, operation.group, int(row["value1"]) & 0xFFFFFFFF)))
    return [number for _, number in sorted(found)]


def _row(call: _Call, by_rank: Mapping[int, RankRecords], clock: CommonClock) -> CollectiveJoined:
    key, ranks = call.key, call.ranks
    durations = call.duration_ns[None, :]
    found = attribute(key.operation, durations, call.root)
    whole = bool(key.members) and set(key.members) <= set(by_rank)
    last = int(found.last[0])
    if semantics_of(key.operation).waits is Waits.ALL:
        arrival: list[float | None] = ((durations.max() - durations[0]) / 1e3).tolist()
    elif all(rank in clock.offset_ns for rank in ranks) and len({by_rank[rank].node for rank in ranks}) == 1:
        arrival = ((call.start_ns - call.start_ns.min()) / 1e3).tolist()
    else:
        arrival = [None] * len(ranks)
    waits = zip(ranks, found.wait_ns[0].tolist(), strict=True)
    return {
        "name": f"{key.operation} {key.dtype}".strip(),
        "group": key.group.description or key.group.name,
        "group_name": key.group.name,
        "number": call.number,
        "bytes": call.bytes,
        "asynchronous": call.asynchronous,
        "last_rank": ranks[last] if whole and last >= 0 else None,
        "arrival_us": {str(rank): _rounded(value) for rank, value in zip(ranks, arrival, strict=True)},
        "wait_us": {str(rank): _rounded(wait_ns / 1e3) for rank, wait_ns in waits},
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
