"""Join the collectives of single steps over their ranks: arrival and waiting time of each rank.

A blocking collective ends at about the same time on all ranks. A rank's wait is therefore its
duration minus the shortest one, for which no common clock is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.analysis.collectives.semantics import (
    OperationKey,
    WaitRelation,
    semantics_of,
    split_wait_and_transfer,
)
from torchlens_perf.page.contents import JoinedCollective
from torchlens_perf.page.gather.node_clocks import RankRecords


def join_collectives_by_step(
    ranks: Collection[RankRecords], shown: Collection[int], uncomparable: Collection[str]
) -> dict[int, list[JoinedCollective]]:
    """Return the collectives of each step that several of these ranks issued, sorted by end.

    The last rank to arrive is known if `ranks` has all ranks of the group. shown: the ranks whose
    arrival and wait are returned. uncomparable: names of groups whose sequence numbers differ
    between ranks.
    """
    one_clock = len({each.node for each in ranks}) == 1
    known, wanted = {each.rank for each in ranks}, set(shown)
    places = {
        (each.rank, operation.group, number): record
        for each in ranks
        if each.rank in wanted
        for operation, number, record in each.iterate_collectives()
    }
    found: dict[int, list[tuple[int, JoinedCollective]]] = defaultdict(list)

    def collect_rows(
        key: OperationKey, members: tuple[int, ...], rows: npt.NDArray[np.void], root: int | None
    ) -> None:
        member = next((rank for rank in members if rank in wanted), None)
        if member is None or key.group.name in uncomparable:
            return
        for row in rows:
            place = places.get((member, key.group.name, int(row["sequence"][0])))
            if place is not None:
                found[int(place["step"])].append(
                    (
                        int(place["start_ns"] + place["duration_ns"]),
                        _build_joined_collective(
                            key, members, row, root, known, wanted, one_clock=one_clock
                        ),
                    )
                )

    join = CollectiveJoin(collect_rows)
    join.set_ranks([each.rank for each in ranks])
    for each in ranks:
        records = each.records.records
        # Without a common clock, shift all records so that every collective ends at time 0.
        if not one_clock:
            records = records.copy()
            records["start_ns"] = -records["duration_ns"]
        join.add_records(each.rank, records, each.records.names, each.groups, 0, str(each.rank))
    join.join()
    return {
        step: [row for _, row in sorted(rows, key=lambda each: each[0])]
        for step, rows in found.items()
    }


def _build_joined_collective(
    key: OperationKey,
    ranks: tuple[int, ...],
    row: np.void,
    root: int | None,
    known: Collection[int],
    shown: Collection[int],
    *,
    one_clock: bool,
) -> JoinedCollective:
    durations, starts = row["duration_ns"], row["start_ns"]
    semantics = semantics_of(key.operation)
    found = split_wait_and_transfer(key.operation, durations[None, :], root)
    whole = bool(key.members) and set(key.members) <= set(known)
    last = int(found.last[0])
    arrival_ns: list[int | None] = [None] * len(ranks)
    if semantics.waits is WaitRelation.ALL:
        arrival_ns = (durations.max() - durations).tolist()
    elif one_clock:
        arrival_ns = (starts - starts.min()).tolist()

    def for_shown_ranks(times_ns: Sequence[int | None]) -> dict[str, float | None]:
        known_ns = {rank: ns for rank, ns in zip(ranks, times_ns, strict=True) if rank in shown}
        return {
            str(rank): None if ns is None else round(ns / 1e3, 1) for rank, ns in known_ns.items()
        }

    return {
        "name": f"{key.operation} {key.dtype}".strip(),
        "group": key.group.description or key.group.name,
        "group_name": key.group.name,
        "number": int(row["sequence"][0]),
        "bytes": int(row["bytes"].max()),
        "asynchronous": bool(row["overlapped"].any()) and not semantics.blocks,
        "last_rank": ranks[last] if whole and last >= 0 else None,
        "arrival_us": for_shown_ranks(arrival_ns),
        "wait_us": for_shown_ranks(found.wait_ns[0].tolist()),
    }
