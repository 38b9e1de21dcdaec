"""Waits, transfers and bandwidths from durations of each operation, compared with calculated
values.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.collectives import Issued, joined
from torchlens_perf.analysis.collectives.semantics import (
    SEMANTICS,
    SEND_RECV,
    CollectiveName,
    SizeRule,
    WaitRelation,
    bus_bandwidth,
    describe_limits,
    operation_sizes,
    parse_collective_name,
    semantics_of,
    split_wait_and_transfer,
)
from torchlens_perf.hooks.collectives.hook import list_collective_operators

ALL_FOR_ALL = [name for name, meaning in SEMANTICS.items() if meaning.waits is WaitRelation.ALL]


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("allreduce group=0 dtype=float32", CollectiveName("allreduce", "0", "float32")),
        (
            "broadcast group=12 dtype=bfloat16 root=3",
            CollectiveName("broadcast", "12", "bfloat16", root=3),
        ),
        ("send group=0 dtype=float16 peer=1", CollectiveName("send", "0", "float16", peer=1)),
        ("barrier group=a b", CollectiveName("barrier", "a b")),
        ("gather group=0 root=0", CollectiveName("gather", "0", root=0)),
        ("(other)", None),
        ("forward Model", None),
    ],
)
def test_operation_is_read_from_the_name_of_a_collective_only(
    name: str, operation: CollectiveName | None
) -> None:
    assert parse_collective_name(name) == operation


def test_every_collective_operator_of_this_torch_has_known_semantics() -> None:
    """Every operator that c10d dispatches is known, except a receive from any source, which allows
    no conclusion.
    """
    named = {operator.partition("::")[2].strip("_") for operator in list_collective_operators()}

    assert named - SEMANTICS.keys() == {"recv_any_source"}
    assert SEMANTICS.keys() - named == {SEND_RECV}
    assert semantics_of("recv_any_source").waits is WaitRelation.UNKNOWN


@pytest.mark.parametrize("operation", ALL_FOR_ALL)
def test_all_ranks_of_an_all_reduce_wait_for_the_last_one(operation: str) -> None:
    """The last rank has the shortest duration.

    The lag of the last rank is the difference between its duration and the second shortest one.
    """
    found = split_wait_and_transfer(operation, np.array([[50, 20, 90], [30, 30, 70]]), None)

    assert found.wait_ns.tolist() == [[30, 0, 70], [0, 0, 40]]
    assert found.wait_upper_bound_ns.tolist() == found.wait_ns.tolist()
    # If two ranks arrive together, no rank is last.
    assert found.last.tolist() == [1, -1]
    assert found.lag_ns.tolist() == [30, 0]
    assert found.transfer_ns.tolist() == [20, 30]


@pytest.mark.parametrize("operation", ["broadcast", "scatter"])
def test_receivers_of_a_broadcast_wait_for_the_root(operation: str) -> None:
    """The additional time of a receiver over the shortest receiver is its wait.

    The shortest receiver's time may be due to a late root or to the transfer.
    """
    found = split_wait_and_transfer(operation, np.array([[5, 100, 140], [300, 100, 100]]), 0)

    assert found.wait_ns.tolist() == [[0, 0, 40], [0, 0, 0]]
    assert found.wait_upper_bound_ns.tolist() == [[0, 95, 135], [200, 0, 0]]
    # A root that leaves early did not arrive late.
    assert found.last.tolist() == [-1, -1]
    assert found.lag_ns.tolist() == [0, 0]
    assert found.transfer_ns.tolist() == [100, 100]


def test_all_local_ranks_are_receivers_if_the_root_is_on_another_node() -> None:
    found = split_wait_and_transfer("broadcast", np.array([[100, 140]]), None)

    assert found.wait_ns.tolist() == [[0, 40]]


@pytest.mark.parametrize("operation", ["reduce", "gather"])
def test_only_the_root_of_a_gather_waits(operation: str) -> None:
    """The root waits at most for its additional time. Other ranks leave when their part is sent."""
    found = split_wait_and_transfer(operation, np.array([[5, 200, 8]]), 1)

    assert found.wait_ns.tolist() == [[0, 0, 0]]
    assert found.wait_upper_bound_ns.tolist() == [[0, 195, 0]]
    assert (found.last.tolist(), found.lag_ns.tolist(), found.transfer_ns.tolist()) == (
        [-1],
        [0],
        [200],
    )

    unseen = split_wait_and_transfer(operation, np.array([[5, 200, 8]]), None)
    assert unseen.wait_upper_bound_ns.tolist() == [[0, 0, 0]]
    assert unseen.transfer_ns.tolist() == [-1]


def test_send_longer_than_its_receive_waited_for_it() -> None:
    """A receive that is longer than its send may have waited, or the send was buffered."""
    found = split_wait_and_transfer(SEND_RECV, np.array([[90, 20], [20, 90]]), None)

    assert found.wait_ns.tolist() == [[70, 0], [0, 0]]
    assert found.wait_upper_bound_ns.tolist() == [[70, 0], [0, 70]]
    assert (found.last.tolist(), found.lag_ns.tolist()) == ([1, -1], [70, 0])
    assert found.transfer_ns.tolist() == [20, 20]


def test_unknown_operation_has_no_wait_and_no_transfer() -> None:
    """The operation may belong to a newer torch."""
    found = split_wait_and_transfer("allshuffle", np.array([[50, 20]]), None)

    assert (found.wait_ns.tolist(), found.last.tolist(), found.transfer_ns.tolist()) == (
        [[0, 0]],
        [-1],
        [-1],
    )
    assert (
        "nothing is concluded"
        in describe_limits("allshuffle", overlapped=False, all_seen=True, ended=True)[0]
    )


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("allreduce", 1.5), ("allreduce_coalesced", 1.5), ("allgather", 0.75), ("allgather_base", 0.75),
        ("reduce_scatter_base", 0.75), ("alltoall_base", 0.75), ("broadcast", 1.0), ("reduce", 1.0), ("gather", 0.75),
        ("scatter", 0.75), ("send", 1.0), (SEND_RECV, 1.0), ("barrier", None), ("allshuffle", None),
    ],
)  # fmt: skip
def test_bus_factor_equals_that_of_nccl_tests(operation: str, factor: float | None) -> None:
    assert bus_bandwidth(operation, 4, 8.0, 8e9) == factor


def test_operation_size_equals_that_of_nccl_tests() -> None:
    """The size is the whole output of a gather, the whole input of a scatter, or for an all-to-all
    the largest number of bytes of a rank.
    """
    record_bytes = np.array([[10, 10, 40]])

    assert operation_sizes("allgather", record_bytes[:, :2], 4).tolist() == [10]
    assert operation_sizes("reduce_scatter", record_bytes, 3).tolist() == [60]
    # Two of eight ranks were seen.
    assert operation_sizes("reduce_scatter_base", record_bytes[:, :2], 8).tolist() == [80]
    assert operation_sizes("alltoall", record_bytes, 3).tolist() == [40]
    assert operation_sizes("gather", np.array([[0, 30, 0]]), 3).tolist() == [30]
    assert operation_sizes("barrier", record_bytes, 3).tolist() == [0]
    assert semantics_of("barrier").size is SizeRule.NONE


def test_bandwidth_is_computed_from_the_transfer() -> None:
    """1 MB all-reduced by four ranks in 1 ms after the last arrival is 1 GB/s, and 1.5 GB/s on the
    bus.
    """
    durations_us = (5000, 1000, 3000, 2000)
    issued = {
        rank: [Issued("allreduce group=0 dtype=float32", n, us * 1000, 1_000_000) for n in range(9)]
        for rank, us in enumerate(durations_us)
    }
    (row,) = joined(issued).operations()
    size = row.octave_with_most_bytes()

    assert size is not None
    assert row.compute_bus_bandwidth(size) == pytest.approx(1.5e9, rel=0.02)


def test_each_reason_for_inexact_collective_numbers_has_a_text() -> None:
    """The numbers of an all-reduce are exact if its ends are known on all ranks."""
    told = {"overlapped": False, "all_seen": True, "ended": True}

    assert describe_limits("allreduce", **told) == ()
    assert "the root may leave" in describe_limits("broadcast", **told)[0]
    assert "the last to arrive is not known" in describe_limits("reduce", **told)[0]
    assert "uneven splits" in describe_limits("alltoall_base", **told)[0]
    assert "queueing" in describe_limits("allreduce", **{**told, "overlapped": True})[0]
    assert (
        "kernel began"
        in describe_limits("allreduce", **{**told, "overlapped": True}, by_device=True)[0]
    )
    assert "other nodes" in describe_limits("allreduce", **{**told, "all_seen": False})[0]
    assert "does not report the end" in describe_limits("send", **{**told, "ended": False})[0]
