"""Joining records of one collective by its sequence number, and counts of records that are not
joined.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.collectives import US, Issued, add, joined, pending_operations, records, world
from tests.support.saved import save_and_load
from torchlens_perf.analysis.collectives.channel import MAX_PENDING, JoinCounts
from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.analysis.collectives.semantics import SEND_RECV, GroupKey
from torchlens_perf.analysis.collectives.statistics import OperationStatistics, merge_operations
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.verdicts.node_state import encode_json

NAME = "allreduce group=0 dtype=float32"
WORLD_OF_3 = GroupKey("0", "0-2", "default_pg")
COMPLETED = int(Flag.COMPLETED)


def of(
    join: CollectiveJoin, operation: str, pair: tuple[int, int] | None = None
) -> OperationStatistics:
    """Return the only row of an operation."""
    (row,) = [
        row for row in join.operations() if (row.key.operation, row.key.pair) == (operation, pair)
    ]
    return row


def counts(join: CollectiveJoin) -> JoinCounts:
    """Return the counts of joined and not joined records of the only group."""
    (only,) = join.join_counts().values()
    return only


# -- records that are joined


def test_joined_row_has_lag_of_the_last_rank_and_wait_of_the_others() -> None:
    """The row also has how often a rank arrived last."""
    late = joined({0: [Issued(NAME, 4, 90), Issued(NAME, 5, 80)], 1: [Issued(NAME, 4, 10), Issued(NAME, 5, 30)],
                   2: [Issued(NAME, 4, 70), Issued(NAME, 5, 20)]})  # fmt: skip
    row = of(late, "allreduce")

    assert counts(late) == JoinCounts(joined=2)
    assert (row.records, row.joined, row.bytes) == (6, 2, 6 << 20)
    totals = row.totals_by_rank()
    assert {rank: each["exposed_wait_ns"] for rank, each in totals.items()} == {
        0: 140,
        1: 10,
        2: 60,
    }
    assert {rank: (each["last"], each["exposed_lag_ns"]) for rank, each in totals.items()} == {
        0: (0, 0), 1: (1, 60), 2: (1, 10),
    }  # fmt: skip
    assert (
        row.merge_size_sketches("transfer").sum_ns,
        row.merge_size_sketches("wait").sum_ns,
        row.duration.sum_ns,
    ) == (
        30,
        210,
        300,
    )


def test_operations_delayed_by_a_capture_are_joined_without_waits() -> None:
    """The operations are counted, but no rank is last."""
    join = CollectiveJoin()
    for rank, first_ns in enumerate((90_000, 10)):
        made, names = records([Issued(NAME, 4, first_ns), Issued(NAME, 5, 10 + 40 * rank)])
        join.add_records(rank, made, names, world(2), held_up=np.array([rank == 1, False]))
    join.join()
    row = of(join, "allreduce")

    assert counts(join) == JoinCounts(joined=2)
    assert (row.records, row.joined) == (4, 1)
    assert {rank: (each["exposed_wait_ns"], each["last"]) for rank, each in row.totals_by_rank().items()} == {
        0: (0, 1), 1: (40, 0),
    }  # fmt: skip


def test_waits_of_asynchronous_operations_are_counted_separately() -> None:
    """The time since an operation's issue is not blocked time if its rank did not block, or issued
    it on another thread.
    """
    for flag in (Flag.ASYNC, Flag.OTHER_THREAD):
        flags = COMPLETED | int(flag)
        join = joined(
            {rank: [Issued(NAME, 0, ns, flags=flags)] for rank, ns in enumerate((90, 10))}
        )
        totals = of(join, "allreduce").totals_by_rank()

        assert (totals[0]["exposed_wait_ns"], totals[0]["overlapped_wait_ns"]) == (0, 80)
        assert (totals[1]["exposed_lag_ns"], totals[1]["overlapped_lag_ns"]) == (0, 80)
        assert of(join, "allreduce").asynchronous == 2


def test_monitored_barrier_counts_as_blocking() -> None:
    """The call blocks although its flag is asynchronous, because it returns no handle."""
    flags = COMPLETED | int(Flag.ASYNC)
    join = joined(
        {r: [Issued("monitored_barrier group=0", 0, ns, 0, flags)] for r, ns in enumerate((90, 10))}
    )

    assert of(join, "monitored_barrier").totals_by_rank()[0]["exposed_wait_ns"] == 80
    assert of(join, "monitored_barrier").asynchronous == 0


def test_joined_row_shows_the_bandwidth_of_the_size_class_with_most_bytes() -> None:
    """Small and large operations of one name have separate bandwidths."""
    issued = [
        Issued(NAME, n, 1000 * US if n % 2 else 10 * US, 1_000_000 if n % 2 else 100)
        for n in range(20)
    ]
    row = of(joined({0: issued, 1: issued}), "allreduce")
    main = row.octave_with_most_bytes()

    assert main is not None
    assert (row.joined, main.joined, main.mean_bytes) == (20, 10, 1_000_000)
    assert row.compute_bus_bandwidth(main) == pytest.approx(1e9, rel=0.02)


def test_send_is_joined_with_its_receive() -> None:
    """The key is sender, receiver and number, so each direction counts separately."""
    # Peers are positions in the group.
    groups = {"9": {"ranks": "4,6", "description": "mesh_pp"}}
    join = joined(
        {
            4: [
                Issued("send group=9 dtype=float16 peer=1", 0, 90),
                Issued("recv group=9 dtype=float16 peer=1", 0, 50),
            ],
            6: [
                Issued("recv group=9 dtype=float16 peer=0", 0, 20),
                Issued("send group=9 dtype=float16 peer=0", 0, 50),
            ],
        },
        groups,
    )
    there, back = of(join, SEND_RECV, (4, 6)), of(join, SEND_RECV, (6, 4))

    assert (there.joined, there.records, back.joined) == (1, 2, 1)
    assert there.totals_by_rank()[4]["exposed_wait_ns"] == 70
    assert (
        there.totals_by_rank()[6] | {"last": 1, "exposed_lag_ns": 70} == there.totals_by_rank()[6]
    )


def test_gather_is_joined_although_other_ranks_record_no_type() -> None:
    """Only the root passes tensors to gather into.

    Records of other ranks have no type and no bytes.
    """
    join = joined(
        {
            0: [Issued("gather group=0 dtype=float32 root=0", 0, 90, 4096)],
            1: [Issued("gather group=0 root=0", 0, 10, 0)],
        }
    )
    row = of(join, "gather")

    assert (counts(join).joined, counts(join).mismatched) == (1, 0)
    assert row.totals_by_rank()[0]["wait_upper_bound_ns"] == 80
    assert row.octave_with_most_bytes().mean_bytes == 4096  # type: ignore[union-attr]


def test_all_to_all_with_different_sizes_is_no_mismatch() -> None:
    """Ranks may receive different sizes of an all-to-all."""
    name = "alltoall_base group=0 dtype=int64"
    join = joined({0: [Issued(name, 0, 90, 100)], 1: [Issued(name, 0, 10, 300)]})

    assert (counts(join).joined, counts(join).mismatched) == (1, 0)


def test_only_ranks_of_this_node_are_joined() -> None:
    """A rank that is the only member of its group on this node has no partner."""
    groups = {
        "0": {"ranks": "0-15", "description": "default_pg"},
        "1": {"ranks": "0,8", "description": "mesh_dp"},
    }
    other = "allreduce group=1 dtype=float32"
    join = joined(
        {rank: [Issued(NAME, 0, 10 + rank), Issued(other, 0, 10)] for rank in range(4)}, groups
    )
    whole = next(row for row in join.operations() if row.key.group.name == "0")

    assert (whole.joined, sorted(whole.ranks), len(whole.key.members)) == (1, [0, 1, 2, 3], 16)
    assert join.join_counts()[GroupKey("1", "0,8", "mesh_dp"), None] == JoinCounts()
    assert pending_operations(join) == 0


def test_rows_of_two_nodes_are_merged_to_one_row_with_all_ranks() -> None:
    """The transfer is that of the node with the last rank to arrive."""
    groups = world(4)
    halves = []
    for ranks, ns in ((range(2), 900), (range(2, 4), 100)):
        half = CollectiveJoin()
        add(half, {rank: [Issued(NAME, 0, ns + 50 * (rank % 2))] for rank in ranks}, groups)
        halves.append(save_and_load(half).operations())
    (row,) = merge_operations(halves)

    assert (row.joined, row.records, sorted(row.ranks)) == (1, 4, [0, 1, 2, 3])
    assert row.merge_size_sketches("transfer").sum_ns == 100
    assert {rank: each["exposed_wait_ns"] for rank, each in row.totals_by_rank().items()} == {
        0: 0,
        1: 50,
        2: 0,
        3: 50,
    }
    # The merged inputs are unchanged.
    assert halves[0][0].joined == 1
    assert sorted(halves[0][0].totals_by_rank()) == [0, 1]


# -- records that are never joined


@pytest.mark.parametrize(
    "other",
    [
        Issued("allgather group=0 dtype=float32", 0, 10),
        Issued("allreduce group=0 dtype=float16", 0, 10),
        Issued(NAME, 0, 10, bytes=8),
    ],
)
def test_different_operation_at_the_same_number_counts_as_mismatched(other: Issued) -> None:
    """The operations may differ in name, type or size. They have no wait."""
    join = joined({0: [Issued(NAME, 0, 90)], 1: [other]})

    assert counts(join) == JoinCounts(mismatched=1)
    assert all(row.joined == 0 for row in join.operations())


def test_different_root_at_the_same_number_counts_as_mismatched() -> None:
    join = joined(
        {rank: [Issued(f"broadcast group=0 dtype=int8 root={rank}", 0, 10)] for rank in range(2)}
    )

    assert counts(join) == JoinCounts(mismatched=1)


def test_records_with_a_duplicate_number_are_not_joined() -> None:
    """If two records of a rank have the same number, one belongs to another operation."""
    for other in ([Issued(NAME, 0, 10)], []):
        join = joined({0: [Issued(NAME, 0, 90), Issued(NAME, 0, 95)], 1: other})

        assert counts(join) == JoinCounts(mismatched=1)


@pytest.mark.parametrize("flags", [0, COMPLETED | int(Flag.EXCEPTION), int(Flag.ASYNC)])
def test_operation_without_an_end_is_not_joined(flags: int) -> None:
    """A record with only the duration of the issuing call would look like the last rank to
    arrive.
    """
    join = joined({0: [Issued(NAME, 0, 90), Issued(NAME, 1, 90)],
                   1: [Issued(NAME, 0, 1, flags=flags), Issued(NAME, 1, 10)]})  # fmt: skip

    assert counts(join) == JoinCounts(joined=1, unended=1)
    assert of(join, "allreduce").totals_by_rank()[1]["last"] == 1
    assert (of(join, "allreduce").records, of(join, "allreduce").ended) == (4, 3)


def test_groups_with_one_name_are_distinguished_by_members() -> None:
    """Groups created by one split may share a name, but have different members."""
    join = CollectiveJoin()
    join.set_ranks(range(4))
    for rank in range(4):
        members = "0-1" if rank < 2 else "2-3"
        groups = {"1": {"ranks": members, "description": "mesh_tp"}}
        join.add_records(
            rank, *records([Issued("allreduce group=1 dtype=float32", 0, 10 + 10 * rank)]), groups
        )
    join.join()

    assert {group.ranks: each.joined for (group, _), each in join.join_counts().items()} == {
        (0, 1): 1,
        (2, 3): 1,
    }
    waits = {
        rank: each["exposed_wait_ns"]
        for row in join.operations()
        for rank, each in row.totals_by_rank().items()
    }
    assert waits == {0: 0, 1: 10, 2: 0, 3: 10}


def test_group_without_known_members_is_joined_by_the_ranks_seen() -> None:
    """The records are not joined if a group of that name has known members, because it may be
    another group.
    """
    issued = {rank: [Issued(NAME, 0, 10 + rank)] for rank in range(2)}
    assert counts(joined(issued, {})).joined == 1

    join = joined({2: [], 3: [Issued(NAME, 0, 10)]}, {"0": {"ranks": "2-3", "description": "x"}})
    add(join, issued, {})
    assert all(each.joined == 0 for each in join.join_counts().values())
    assert sum(each.unmatched_records for each in join.join_counts().values()) == 2


def test_records_before_a_group_is_published_are_not_counted_for_the_group() -> None:
    """Earlier records are not mixed with those of the known group."""
    join = CollectiveJoin()
    for sequence, groups in ((0, {}), (1, world(3))):
        add(join, {rank: [Issued(NAME, sequence, 10 + rank)] for rank in range(3)}, groups)

    assert join.join_counts()[WORLD_OF_3, None].joined == 1


def test_ranks_that_number_operations_differently_are_not_joined() -> None:
    """Rank 0's operation 1 is rank 1's operation 0.

    By the node's clock, one rank left an operation of this number before the other rank arrived.
    """
    ms = 1_000_000
    calls = [Issued(NAME, number, 2 * ms, start_ns=10 * ms * number) for number in range(5)]
    ahead = [call._replace(sequence=call.sequence + 1) for call in calls]
    join = joined({0: ahead, 1: calls})

    # The count includes records without a partner.
    assert counts(join) == JoinCounts(unmatched_records=10)
    assert of(join, "allreduce").joined == 0
    assert join.uncomparable_groups() == {"0"}
    add(join, {0: [Issued(NAME, 6, ms)], 1: [Issued(NAME, 6, ms)]}, world(2))
    assert counts(join) == JoinCounts(unmatched_records=12)

    right = joined({0: calls, 1: calls})
    assert (counts(right), right.uncomparable_groups()) == (JoinCounts(joined=5), set())


def test_kernels_with_inconsistent_times_on_one_rank_are_not_joined() -> None:
    """If a kernel on one rank seems to be over a millisecond later than on the other one, only this
    kernel is skipped.
    """
    ms, device = 1_000_000, int(Flag.COMPLETED | Flag.DEVICE)
    kernels = [
        Issued(NAME, number, 50 * US, start_ns=20 * ms * number, flags=device)
        for number in range(5)
    ]
    late = [each._replace(start_ns=each.start_ns + ms) for each in kernels]
    assert counts(joined({0: kernels, 1: late})) == JoinCounts(joined=5)
    ahead = [each._replace(sequence=each.sequence + 1) for each in kernels]
    # The matching record of the other rank may still arrive.
    assert counts(joined({0: kernels, 1: ahead})) == JoinCounts(unmatched_records=8)
    one = [
        each._replace(start_ns=each.start_ns + 6 * ms * (each.sequence == 2)) for each in kernels
    ]
    join = joined({0: kernels, 1: one})
    assert (counts(join), join.uncomparable_groups()) == (
        JoinCounts(joined=4, unmatched_records=2),
        set(),
    )
    assert of(join, "allreduce").joined == 4

    on_host = {
        rank: [each._replace(flags=int(Flag.COMPLETED)) for each in of]
        for rank, of in enumerate((kernels, late))
    }
    assert counts(joined(on_host)) == JoinCounts(unmatched_records=10)


def test_operation_without_waiting_may_end_before_another_rank_arrives() -> None:
    """A root of a broadcast, or a rank with empty parts of an all-to-all, may leave early."""
    for name in ("alltoall_base group=0 dtype=float32", "broadcast group=0 dtype=float32 root=0"):
        early, late = Issued(name, 0, 10 * US), Issued(name, 0, 10 * US, start_ns=10_000_000)
        assert counts(joined({0: [early], 1: [late]})) == JoinCounts(joined=1)


def test_receive_from_any_source_ends_joining_of_messages_to_that_rank() -> None:
    """After such a receive, numbers no longer identify the messages to that rank."""
    send, any_source = "send group=0 dtype=int8 peer=1", "recv_any_source group=0 dtype=int8"
    join = joined({0: [Issued(send, 0, 10), Issued(send, 1, 10)],
                   1: [Issued(any_source, 0, 10), Issued("recv group=0 dtype=int8 peer=0", 0, 10)]})  # fmt: skip

    assert counts(join) == JoinCounts(unmatched_records=3)
    assert of(join, "recv_any_source").records == 1


# -- ranks with different operations or processes


def test_operations_of_some_ranks_stay_pending_and_others_are_joined() -> None:
    """Pending operations are counted, and their number is limited."""
    join = joined(
        {rank: [Issued(NAME, n, 10 + rank) for n in range(10 + 3 * rank)] for rank in range(3)}
    )
    assert counts(join) == JoinCounts(joined=10)
    assert pending_operations(join) == 6

    for rank in range(3):
        join.mark_ended(rank)
    join.join()
    assert counts(join) == JoinCounts(joined=10, unjoined=6)
    assert pending_operations(join) == 0


def test_pending_operations_are_dropped_after_a_member_left() -> None:
    """Groups without the member that left continue."""
    groups = {**world(3), "1": {"ranks": "0-1", "description": ""}}
    other = "allreduce group=1 dtype=float32"
    join = CollectiveJoin()
    for first in range(0, 50, 10):
        ranks = range(3) if first == 0 else range(2)
        numbers = range(first, first + 10)
        add(join, {rank: [Issued(name, n, 10) for n in numbers for name in (NAME, other) if rank < 2 or name == NAME]
                   for rank in ranks}, groups)  # fmt: skip
        if first == 0:
            join.mark_ended(2)

    assert join.join_counts()[WORLD_OF_3, None] == JoinCounts(joined=10, unjoined=40)
    assert join.join_counts()[GroupKey("1", "0-1"), None] == JoinCounts(joined=50)
    assert pending_operations(join) == 0


def test_oldest_pending_operations_are_dropped_and_counted_at_the_limit() -> None:
    """The other rank never reports. Late records of dropped operations are not joined."""
    join = CollectiveJoin()
    many = MAX_PENDING + 1000
    add(join, {0: [Issued(NAME, n, 10) for n in range(many)], 1: []}, world(2))
    assert pending_operations(join) == MAX_PENDING
    assert counts(join) == JoinCounts(unjoined=1000)

    add(join, {1: [Issued(NAME, n, 10) for n in range(many)]}, world(2))
    assert counts(join) == JoinCounts(joined=MAX_PENDING, unjoined=1000, late_records=1000)
    assert pending_operations(join) == 0


def test_all_records_are_joined_if_one_rank_is_read_far_ahead() -> None:
    """The limit on pending operations applies after joining."""
    many = 2 * MAX_PENDING
    join = joined({rank: [Issued(NAME, n, 10) for n in range(many)] for rank in range(2)})

    assert counts(join) == JoinCounts(joined=many)


def test_operations_wait_for_a_rank_that_is_read_later() -> None:
    """The rank is known, but its ring is read later."""
    join = CollectiveJoin()
    join.set_ranks(range(3))
    for rank in (0, 1, 2):
        join.add_records(rank, *records([Issued(NAME, 0, 10 + rank)]), world(3))
        join.join()
        assert counts(join).joined == (rank == 2)


def test_records_of_an_earlier_generation_are_dropped_after_a_restart() -> None:
    """Another generation has its own numbers and members."""
    join = joined({rank: [Issued(NAME, n, 10) for n in range(5 + rank)] for rank in range(3)})
    assert pending_operations(join) == 2
    add(join, {rank: [Issued(NAME, 0, 20 + rank)] for rank in range(2)}, world(2), generation=1)
    add(join, {2: [Issued(NAME, n, 10) for n in range(5, 7)]}, world(3), generation=0)

    assert join.join_counts() == {(GroupKey("0", "0-1", "default_pg"), None): JoinCounts(joined=1)}
    assert join.outdated_records == 2
    assert of(join, "allreduce").totals_by_rank()[0]["last"] == 1


def test_name_ids_of_restarted_ranks_replace_the_old_ones() -> None:
    """After nodes joined or left, torch's agents restart all ranks.

    Name ids change, and numbers start at 0.
    """
    first, second = NAME, "broadcast group=0 dtype=float32 root=0"
    join = CollectiveJoin()
    for generation, (names, used) in enumerate(
        (([first, second], first), ([second, first], second))
    ):
        join.set_ranks(range(2), generation)
        for rank in range(2):
            made, known = records([Issued(used, n, 10 + rank) for n in range(5)], names)
            join.add_records(
                rank, made, known, world(2), generation, f"process {generation} of {rank}"
            )
        join.join()
        for rank in range(2):
            join.mark_ended(rank, generation)
    # Late records of the earlier processes are not joined.
    for rank in range(2):
        join.mark_ended(rank, 0)
        join.add_records(
            rank, *records([Issued(first, 5, 10)]), world(2), 0, f"process 0 of {rank}"
        )
    join.join()

    assert {row.key.operation: (row.records, row.joined) for row in join.operations()} == {
        "broadcast": (10, 5)
    }
    assert (counts(join), join.outdated_records) == (JoinCounts(joined=5), 2)


def test_name_ids_of_two_processes_with_one_rank_are_separate() -> None:
    """A process that a rank has started may have the same rank and run in parallel."""
    join = CollectiveJoin()
    join.set_ranks([0])
    for process, name in (("one", NAME), ("its child", "broadcast group=7 dtype=int8 root=0")):
        join.add_records(0, *records([Issued(name, 0, 10)]), world(1), 0, process)

    join.join()
    assert {row.key.operation: row.records for row in join.operations()} == {
        "allreduce": 1,
        "broadcast": 1,
    }


def test_operations_are_joined_in_order_when_32_bit_numbers_wrap() -> None:
    """Records have only the low 32 bits of a number."""
    first = (1 << 32) - 3
    join = CollectiveJoin()
    for part in (range(first, first + 4), range(first + 4, first + 8)):
        add(join, {rank: [Issued(NAME, n, 10) for n in part] for rank in range(2)}, world(2))

    assert counts(join) == JoinCounts(joined=8)

    many = MAX_PENDING + 1000
    numbers = range((1 << 32) + 10 - many, (1 << 32) + 10)
    join = joined({0: [Issued(NAME, n, 10) for n in numbers], 1: []})
    add(join, {1: [Issued(NAME, n, 10) for n in numbers[-10:]]}, world(2))
    # Numbers after the wrap are the newest, not the oldest.
    assert counts(join) == JoinCounts(joined=10, unjoined=1000)


# -- a restart of the sidecar


def test_pending_records_are_not_joined_after_a_sidecar_restart() -> None:
    """Records from before the restart are counted as unjoined, and new records are joined."""
    join = joined(
        {0: [Issued(NAME, n, 10) for n in range(6)], 1: [Issued(NAME, n, 30) for n in range(4)]}
    )
    again = save_and_load(join)
    assert encode_json(again.operations()) == encode_json(join.operations())
    assert (counts(join).unjoined, counts(again).unjoined) == (0, 2)

    add(again, {0: [Issued(NAME, 6, 10)], 1: [Issued(NAME, n, 30) for n in range(4, 7)]}, world(2))
    assert counts(again) == JoinCounts(joined=5, unjoined=2, late_records=2)
    assert of(again, "allreduce").totals_by_rank()[0]["last"] == 5


def test_ranks_that_number_operations_differently_are_not_joined_after_a_restart() -> None:
    """Numbers of the ranks still differ after a restart of the sidecar.

    Joining stops again at the next operation that one rank left before the other rank arrived.
    """
    ms = 1_000_000
    calls = [Issued(NAME, number, 2 * ms, start_ns=10 * ms * number) for number in range(5)]
    join = joined({0: [call._replace(sequence=call.sequence + 1) for call in calls], 1: calls})
    again = save_and_load(join)
    add(again, {0: [Issued(NAME, 9, ms)], 1: [Issued(NAME, 9, ms)]}, world(2))

    assert again.uncomparable_groups() == {"0"}
    assert counts(again) == JoinCounts(unmatched_records=12)


def test_messages_of_different_types_share_one_sequence_of_numbers() -> None:
    """The native tap and the Python tap number messages by pair and direction.

    A different type at the same number is a mismatch.
    """
    names = [f"{{}} group=0 dtype={dtype} peer={{}}" for dtype in ("float32", "int8")]
    sent = [Issued(names[n % 2].format("send", 1), n, 10) for n in range(6)]
    got = [Issued(names[n % 2].format("recv", 0), n, 20) for n in range(6)]
    assert counts(joined({0: sent, 1: got}, world(2))) == JoinCounts(joined=6)

    wrong = joined(
        {0: sent[:2], 1: [got[1]._replace(sequence=0), got[0]._replace(sequence=1)]}, world(2)
    )
    assert counts(wrong) == JoinCounts(mismatched=2)


def test_records_that_are_no_collectives_are_ignored_by_the_join() -> None:
    """Records that are no collectives belong to steps, modules and unknown names."""
    made, names = records(
        [Issued(NAME, 0, 10), Issued("forward Model", 0, 10), Issued("(other)", 1, 10)]
    )
    made["kind"][1] = Kind.MODULE
    made = np.concatenate([made, made[:1]])
    # This name id is beyond the list of names.
    made["name_id"][3] = 77
    join = CollectiveJoin()
    join.add_records(0, made, names, world(1))
    join.join()

    assert [(row.key.operation, row.records) for row in join.operations()] == [("allreduce", 1)]
