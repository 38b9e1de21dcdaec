"""Clocks of several nodes are aligned by the ends of shared collectives, or reported as unknown."""

from __future__ import annotations

import numpy as np
import pytest

from torchlens_perf.page.gather.node_clocks import NodeClocks, RankRecords
from torchlens_perf.page.gather.step_collectives import join_collectives_by_step
from torchlens_perf.run.ring import Flag, Kind, record_dtype
from torchlens_perf.store.segments import ProcessRecords

MS = 1_000_000
NAMES = ["(other)", "allreduce group=0 dtype=float32"]
GROUPS = {"0": {"ranks": "0-3", "description": "default_pg"}}
# Nanoseconds by which each node's wall clock is ahead.
AHEAD_NS = {"one": 0, "other": 5_000 * MS}


def rank_records(rank: int, node: str, arrives_ms: list[int], jitter_ns: int = 0) -> RankRecords:
    """Return a step of 100 ms for each collective.

    The rank enters the collective at the given time, and all ranks leave the collective at 80 ms.
    """
    records = np.zeros((len(arrives_ms), 2), record_dtype())
    for step, arrives in enumerate(arrives_ms):
        begin_ns = 10**9 + step * 100 * MS + AHEAD_NS[node]
        noise = (-1) ** step * step * jitter_ns
        end_ns = begin_ns + 80 * MS + noise
        row = records[step]
        row["step"] = step
        row["kind"] = [int(Kind.COLLECTIVE), int(Kind.STEP)]
        row["flags"] = [int(Flag.COMPLETED), 0]
        row["name_id"] = [1, 0]
        row["value0"], row["value1"] = [4096, 0], [step, 0]
        row["start_ns"] = [begin_ns + arrives * MS, begin_ns]
        row["duration_ns"] = [end_ns - begin_ns - arrives * MS, 100 * MS]
    return RankRecords(rank, node, 0, GROUPS, ProcessRecords(records.reshape(-1), NAMES))  # type: ignore[arg-type]


def of_step(ranks: list[RankRecords], step: int) -> list[RankRecords]:
    return [
        each._replace(
            records=each.records._replace(
                records=each.records.records[each.records.records["step"] == step]
            )
        )
        for each in ranks
    ]


ARRIVES = [50, 40, 30, 50, 20]


def job(jitter_ns: int = 0) -> list[RankRecords]:
    late = [70, 70, 70, 70, 70]
    return [
        rank_records(0, "one", ARRIVES), rank_records(1, "one", late), rank_records(2, "other", ARRIVES, jitter_ns),
        rank_records(3, "other", ARRIVES, jitter_ns),
    ]  # fmt: skip


def test_node_clocks_5_s_apart_are_aligned() -> None:
    ranks = job()
    clock = NodeClocks([of_step(ranks, step) for step in range(5)], ()).common_clock(
        of_step(ranks, 2)
    )

    assert clock.offset_ns == {0: 0, 1: 0, 2: -AHEAD_NS["other"], 3: -AHEAD_NS["other"]}
    assert clock.words.startswith(
        "The clocks of 2 nodes are aligned by the ends of 5 or more collectives"
    )


def test_clocks_of_a_single_node_are_not_corrected() -> None:
    ranks = job()[:2]
    clock = NodeClocks([of_step(ranks, 0)], ()).common_clock(of_step(ranks, 0))

    assert clock.offset_ns == {0: 0, 1: 0}
    assert clock.words == ""


@pytest.mark.parametrize(
    ("jitter_ns", "steps", "uncomparable"),
    [
        pytest.param(20 * MS, 5, (), id="the ends do not lie together"),
        pytest.param(0, 2, (), id="too few collectives"),
        pytest.param(0, 5, ("0",), id="sequence numbers do not compare"),
    ],
)
def test_ranks_with_unknown_clocks_are_left_out_of_the_timeline(
    jitter_ns: int, steps: int, uncomparable: tuple[str, ...]
) -> None:
    ranks = job(jitter_ns)
    clock = NodeClocks([of_step(ranks, step) for step in range(steps)], uncomparable).common_clock(
        of_step(ranks, 0)
    )

    assert clock.offset_ns == {0: 0, 1: 0}
    assert clock.words == "The clocks of 2 nodes cannot be compared."


def test_waits_are_known_without_synchronized_clocks() -> None:
    """The last rank and the waits are computed from durations."""
    found = join_collectives_by_step(job(), [0, 1, 2], ())

    assert sorted(found) == [0, 1, 2, 3, 4]
    (row,) = found[2]
    assert (row["last_rank"], row["group"], row["bytes"], row["asynchronous"]) == (
        1,
        "default_pg",
        4096,
        False,
    )
    assert row["wait_us"] == {"0": 40e3, "1": 0.0, "2": 40e3}
    assert row["arrival_us"] == {"0": 0.0, "1": 40e3, "2": 0.0}


def test_last_rank_is_known_only_for_complete_groups() -> None:
    """The rank without records may have arrived last."""
    (row,) = join_collectives_by_step(job()[:3], [0, 1, 2], ())[2]

    assert row["last_rank"] is None
    assert row["wait_us"]["0"] == 40e3


def test_groups_with_different_sequence_numbers_are_not_joined() -> None:
    assert join_collectives_by_step(job(), [0, 1, 2, 3], ("0",)) == {}
