"""Tests that records of three real gloo ranks are joined without a common clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.collectives import pending_operations
from tests.support.gloo import run_ranks
from tests.support.recording import Recording, recorded, records_of
from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.analysis.collectives.statistics import OperationStatistics
from torchlens_perf.commands import tap_build
from torchlens_perf.diagnosis.facts.collective_rows import collective_rows
from torchlens_perf.run.ring import Kind

pytestmark = pytest.mark.distributed

RANKS = 3
REPEATED = 8
# This delay is longer than other programs usually delay a rank.
LATE_S = 0.15
FLOATS = 4096


def delay_this_rank(rank: int) -> None:
    """Delay this rank."""
    if dist.get_rank() == rank:
        time.sleep(LATE_S)


def one_rank(folder: Path) -> Recording:
    """Run all-reduces with a late rank, broadcasts from a late root, messages, and a subgroup."""
    rank = dist.get_rank()
    subgroup = dist.new_group([1, 2])
    tensor = torch.ones(FLOATS)
    # The first operation connects the ranks.
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    with recorded(folder) as recording:
        # Attaching the watch takes longer on some ranks than on others.
        dist.barrier()
        for _ in range(REPEATED):
            delay_this_rank(2)
            dist.all_reduce(tensor)
            dist.barrier()
            delay_this_rank(1)
            dist.broadcast(tensor, 1)
            dist.barrier()
            if rank == 0:
                dist.send(tensor, 1)
            elif rank == 1:
                dist.recv(tensor, 0)
            if rank in (1, 2):
                delay_this_rank(1)
                dist.all_reduce(tensor, group=subgroup)
        recording.watch.step()
    return recording


@pytest.fixture(scope="module")
def join(tmp_path_factory: pytest.TempPathFactory) -> CollectiveJoin:
    """Join the records of the three ranks."""
    tap_build.build_tap()
    join = CollectiveJoin()
    join.set_ranks(range(RANKS))
    for rank, recording in enumerate(run_ranks(one_rank, tmp_path_factory.mktemp("ranks"), RANKS)):
        assert recording.of(Kind.COLLECTIVE)
        join.add_records(
            rank, records_of(recording), recording.interned, recording.metadata["groups"]
        )
    join.join()
    return join


def of(join: CollectiveJoin, operation: str, ranks: tuple[int, ...]) -> OperationStatistics:
    (row,) = [
        row
        for row in join.operations()
        if (row.key.operation, row.key.members) == (operation, ranks)
    ]
    return row


def test_late_rank_is_last_to_arrive_in_all_reduces(join: CollectiveJoin) -> None:
    """The late rank is nearly always the last to arrive, by about its delay.

    Only the two other ranks waited as long as the delay.
    """
    totals = of(join, "allreduce", (0, 1, 2)).totals_by_rank()
    late_ns = REPEATED * LATE_S * 1e9

    assert of(join, "allreduce", (0, 1, 2)).joined == REPEATED
    assert totals[2]["last"] >= REPEATED - 1
    assert totals[2]["exposed_lag_ns"] > 0.8 * late_ns
    for victim in (0, 1):
        assert totals[victim]["exposed_wait_ns"] > 0.8 * late_ns
        assert totals[victim]["exposed_lag_ns"] < 0.5 * totals[2]["exposed_lag_ns"]
        assert totals[2]["exposed_wait_ns"] < 0.5 * totals[victim]["exposed_wait_ns"]


def test_late_rank_of_a_subgroup_is_found_separately_from_that_of_the_world(
    join: CollectiveJoin,
) -> None:
    """Rank 1 is late in the subgroup.

    The subgroup's numbers are not mixed with those of the world.
    """
    row = of(join, "allreduce", (1, 2))

    assert row.joined == REPEATED
    assert row.totals_by_rank()[1]["last"] >= REPEATED - 1


def test_wait_for_a_late_broadcast_root_is_an_upper_bound_and_names_no_rank(
    join: CollectiveJoin,
) -> None:
    """The two receivers waited equally, and at most as long as the delay."""
    row = of(join, "broadcast", (0, 1, 2))
    totals, late_ns = row.totals_by_rank(), REPEATED * LATE_S * 1e9

    assert row.joined == REPEATED
    assert totals[0]["wait_upper_bound_ns"] + totals[2]["wait_upper_bound_ns"] > 1.6 * late_ns
    assert totals[0]["exposed_wait_ns"] + totals[2]["exposed_wait_ns"] < late_ns
    assert [each["last"] for each in totals.values()] == [0, 0, 0]


def test_messages_without_a_known_end_are_matched_but_name_no_late_rank(
    join: CollectiveJoin,
) -> None:
    """gloo has no callback for sends.

    Each send is counted and matched with its receive.
    """
    row = of(join, "send/recv", (0, 1))
    (counts,) = [counts for (_, pair), counts in join.join_counts().items() if pair == (0, 1)]
    (told,) = [row for row in collective_rows([join]) if row["pair"] == [0, 1]]

    assert (row.records, row.joined, row.ended) == (2 * REPEATED, 0, 0)
    assert counts.unended == REPEATED
    assert "does not report the end" in told["cannot_tell"][0]


def test_every_operation_of_real_ranks_is_joined(join: CollectiveJoin) -> None:
    for counts in join.join_counts().values():
        assert (
            counts.unjoined,
            counts.mismatched,
            counts.late_records,
            counts.unmatched_records,
        ) == (0, 0, 0, 0)
    assert pending_operations(join) == 0
