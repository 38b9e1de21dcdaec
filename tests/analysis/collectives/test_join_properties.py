"""Joining records of random jobs: only matching records are joined, whatever their order."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.support.collectives import Issued, joined, pending_operations, records, world
from torchlens_perf.analysis.collectives.channel import JoinCounts
from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.node_state import encode_json

NAME = "allreduce group=0 dtype=float32"
COMPLETED = int(Flag.COMPLETED)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[int, list[Issued]], dict[str, dict[str, str]]]:
    """Draw ranks with two groups.

    Some records are missing, have no end, or are of another operation.
    """
    names = [NAME, "allgather_base group=0 dtype=float32", "broadcast group=0 dtype=float32 root=1"]
    by_rank: dict[int, list[Issued]] = {rank: [] for rank in range(3)}
    for sequence in range(draw(st.integers(1, 12))):
        name = draw(st.sampled_from(names))
        for rank in by_rank:
            fate = draw(st.sampled_from(["there"] * 6 + ["missing", "no end", "another"]))
            if fate != "missing":
                by_rank[rank].append(
                    Issued(
                        names[0] if fate == "another" else name,
                        sequence,
                        draw(st.integers(0, 10**9)),
                        draw(st.sampled_from([1000, 1000, 1000, 4000])),
                        0 if fate == "no end" else COMPLETED,
                    )
                )
        if draw(st.booleans()):
            for rank in range(2):
                issued = Issued(
                    "allreduce group=1 dtype=int8", sequence, draw(st.integers(0, 10**6))
                )
                by_rank[rank].append(issued)
    return by_rank, {**world(3), "1": {"ranks": "0-1", "description": "mesh_tp"}}


@given(job=jobs(), data=st.data())
def test_any_order_and_split_of_records_joins_the_same_operations(
    job: tuple[dict[int, list[Issued]], dict[str, dict[str, str]]], data: st.DataObject
) -> None:
    """The times of the joined operations are equal to the nanosecond."""
    by_rank, groups = job
    whole = joined(by_rank, groups)

    chunks = []
    for rank, issued in by_rank.items():
        mixed = data.draw(st.permutations(issued))
        cut = data.draw(st.integers(0, len(mixed)))
        chunks += [(rank, mixed[:cut]), (rank, mixed[cut:])]
    join = CollectiveJoin()
    join.set_ranks(by_rank)
    names = {rank: records(issued)[1] for rank, issued in by_rank.items()}
    for rank, issued in data.draw(st.permutations(chunks)):
        join.add_records(rank, *records(issued, names[rank]), groups)
        if data.draw(st.booleans()):
            join.join()
    join.join()

    def facts(each: CollectiveJoin) -> tuple[object, ...]:
        rows = {
            row.key: msgspec.json.decode(encode_json(row))
            for row in each.operations()
            if row.records
        }
        return rows, {
            place: counted
            for place, counted in each.join_counts().items()
            if counted != JoinCounts()
        }

    assert facts(join) == facts(whole)
    assert pending_operations(join) == pending_operations(whole)


@given(job=jobs())
def test_joined_operations_equal_those_of_a_simple_algorithm(
    job: tuple[dict[int, list[Issued]], dict[str, dict[str, str]]],
) -> None:
    """The simple algorithm joins records of equal number, name and bytes if every member's record
    has an end.
    """
    by_rank, groups = job
    expected: dict[str, int] = {}
    for group, members in (("0", (0, 1, 2)), ("1", (0, 1))):
        mine = {
            rank: {each.sequence: each for each in by_rank[rank] if f"group={group} " in each.name}
            for rank in members
        }
        for sequence in set.intersection(*(set(each) for each in mine.values())):
            found = [mine[rank][sequence] for rank in members]
            if len({(each.name, each.bytes) for each in found}) == 1 and all(
                each.flags for each in found
            ):
                operation = f"{found[0].name.partition(' ')[0]} {group}"
                expected[operation] = expected.get(operation, 0) + 1

    join = joined(by_rank, groups)
    actual = {
        f"{row.key.operation} {row.key.group.name}": row.joined
        for row in join.operations()
        if row.joined
    }
    assert actual == expected
