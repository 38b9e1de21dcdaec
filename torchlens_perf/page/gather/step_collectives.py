"""Single steps' collectives, joined over their ranks: who came when, and who waited how long.

A blocking collective ends everywhere at about the same time. So the surplus of a rank's duration over the shortest one
is waiting, which no clock is needed for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.analysis.collectives.semantics import OperationKey, Waits, attribute, parse, semantics_of
from torchlens_perf.page.contents import CollectiveJoined
from torchlens_perf.run.ring import Kind

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from torchlens_perf.page.gather.node_clocks import RankRecords


class _Call(NamedTuple):
    key: OperationKey
    number: int
    ranks: tuple[int, ...]
    start_ns: npt.NDArray[np.int64] | None
    """None where the ranks have no common clock."""
    duration_ns: npt.NDArray[np.int64]
    bytes: int
    asynchronous: bool
    root: int | None


def joined_by_step(
    ranks: Collection[RankRecords], shown: Collection[int], uncomparable: Collection[str]
) -> dict[int, list[CollectiveJoined]]:
    """By step, the collectives that several of these ranks have issued, in the order of their ends.

    Who came last is known where all ranks of the group are among `ranks`. shown: of them, those whose arrival and
    waiting is wanted. uncomparable: names of groups whose sequence numbers do not compare.
    """
    calls: list[_Call] = []
    one_clock = len({each.node for each in ranks}) == 1

    def take(key: OperationKey, members: tuple[int, ...], rows: npt.NDArray[np.void], root: int | None) -> None:
        blocks = semantics_of(key.operation).blocks
        for row in rows:
            overlapped = bool(row["overlapped"].any()) and not blocks
            starts = row["start_ns"] if one_clock else None
            size = int(row["bytes"].max())
            calls.append(
                _Call(key, int(row["sequence"][0]), members, starts, row["duration_ns"], size, overlapped, root)
            )

    join = CollectiveJoin(take)
    join.set_ranks([each.rank for each in ranks])
    for each in ranks:
        records = each.records.records
        if not one_clock:  # so that none is asked for: all ends lie together
            records = records.copy()
            records["start_ns"] = -records["duration_ns"]
        join.add(each.rank, records, each.records.names, each.groups, 0, str(each.rank))
    join.join()
    places = _places([each for each in ranks if each.rank in shown])
    known, wanted = {each.rank for each in ranks}, set(shown)
    found: dict[int, list[tuple[int, CollectiveJoined]]] = defaultdict(list)
    for call in calls:
        member = next((rank for rank in call.ranks if rank in wanted), None)
        place = places.get((member, call.key.group.name, call.number)) if member is not None else None
        if place is not None and call.key.group.name not in uncomparable:
            step, end_ns = place
            found[step].append((end_ns, _row(call, known, wanted)))
    return {step: [row for _, row in sorted(rows, key=lambda each: each[0])] for step, rows in found.items()}


def _places(ranks: Collection[RankRecords]) -> Mapping[tuple[int, str, int], tuple[int, int]]:
    """By rank, group and number of an operation: its step, and when it ended, by the rank's own clock."""
    found = {}
    for each in ranks:
        records, names = each.records
        rows = records[records["kind"] == int(Kind.COLLECTIVE)]
        operations = [parse(name) for name in names]
        ends = (rows["start_ns"] + rows["duration_ns"]).tolist()
        numbers = (rows["value1"] & 0xFFFFFFFF).tolist()
        for name_id, number, step, end_ns in zip(
            rows["name_id"].tolist(), numbers, rows["step"].tolist(), ends, strict=True
        ):
            operation = operations[name_id]
            if operation is not None:
                found[each.rank, operation.group, number] = step, end_ns
    return found


def _row(call: _Call, known: Collection[int], shown: Collection[int]) -> CollectiveJoined:
    key, ranks = call.key, call.ranks
    durations = call.duration_ns[None, :]
    found = attribute(key.operation, durations, call.root)
    whole = bool(key.members) and set(key.members) <= set(known)
    last = int(found.last[0])
    if semantics_of(key.operation).waits is Waits.ALL:
        arrival: list[float | None] = ((durations.max() - durations[0]) / 1e3).tolist()
    elif call.start_ns is not None:
        arrival = ((call.start_ns - call.start_ns.min()) / 1e3).tolist()
    else:
        arrival = [None] * len(ranks)
    return {
        "name": f"{key.operation} {key.dtype}".strip(),
        "group": key.group.description or key.group.name,
        "group_name": key.group.name,
        "number": call.number,
        "bytes": call.bytes,
        "asynchronous": call.asynchronous,
        "last_rank": ranks[last] if whole and last >= 0 else None,
        "arrival_us": {str(rank): _rounded(us) for rank, us in zip(ranks, arrival, strict=True) if rank in shown},
        "wait_us": {
            str(rank): _rounded(wait_ns / 1e3)
            for rank, wait_ns in zip(ranks, found.wait_ns[0].tolist(), strict=True)
            if rank in shown
        },
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
