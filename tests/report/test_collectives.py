"""Collectives in the report: rows of the JSON, and their table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.collectives import US, Issued, add, joined, world
from tests.support.ranks import Rank, identity_of, read_to_end, run
from tests.support.saved import save_and_load
from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.diagnosis.facts.collective_rows import (
    collective_rows,
    count_last_arrivals,
    is_last_by_chance,
)
from torchlens_perf.report.build import build_report
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.latest_attempt import latest_collective_joins
from torchlens_perf.verdicts.node_state import NodeState, ProcessState, load_all
from torchlens_perf.view.collective_table import build_collective_table
from torchlens_perf.view.specs import Table

__all__ = ["run"]  # A fixture.
NAME = "allreduce group=0 dtype=float32"


def table_of(rows: list[dict[str, Any]]) -> Table:
    report = {"collectives": rows, "verdicts": [], "run": {"world_size": 2}}
    made = build_collective_table(cast("Any", report))
    assert made is not None
    return made


def cells(rows: list[dict[str, Any]], operation: str) -> dict[str, str]:
    """Return the cells of an operation's first row by column heading."""
    table = table_of(rows)
    row = list(table.columns[0].values).index(operation)
    return {column.heading: column.texts()[row] for column in table.columns}


def late(rank: int) -> CollectiveJoin:
    """Return the joined collectives of three ranks, one of which arrives 3 ms late."""
    issued = {
        each: [
            Issued(NAME, n, 1000 * US if each == rank else 4000 * US, 3_000_000) for n in range(10)
        ]
        for each in range(3)
    }
    return joined(issued)


def test_collective_row_has_stable_keys_and_units() -> None:
    (row,) = collective_rows([save_and_load(late(1))])

    assert (row["operation"], row["group"], row["count"], row["bytes"]) == (
        "allreduce",
        "0",
        30,
        90_000_000,
    )
    assert (row["joined"], row["ranks"], row["ranks_seen"], row["pair"]) == (10, "0-2", "0-2", None)
    assert row["duration_s"]["p50_s"] == pytest.approx(4e-3, rel=0.02)
    assert row["wait_s"]["mean_s"] == pytest.approx(2e-3)
    assert row["busbw"] == pytest.approx(4e9, rel=0.02)
    assert row["bandwidth_at_bytes"] == 3_000_000
    assert row["slowest_rank"] == 1
    assert row["by_rank"]["1"] == {
        "exposed_wait_s": 0, "overlapped_wait_s": 0, "wait_upper_bound_s": 0, "last": 10,
        "exposed_lag_s": pytest.approx(0.03), "overlapped_lag_s": 0,
    }  # fmt: skip
    assert row["groups_operations"]["unjoined"] == 0
    assert row["cannot_tell"] == []


def test_unknown_values_of_a_collective_are_null_and_not_zero() -> None:
    """Collectives of a single rank have no wait, transfer, bandwidth or slowest rank."""
    join = CollectiveJoin()
    add(join, {0: [Issued(NAME, 0, 10 * US)]}, world(2))
    rows = collective_rows([save_and_load(join)])

    assert rows[0]["duration_s"]["p50_s"] == pytest.approx(10e-6, rel=0.02)
    for key in ("wait_s", "wait_upper_bound_s", "transfer_s"):
        assert rows[0][key]["mean_s"] is None
    assert (rows[0]["busbw"], rows[0]["slowest_rank"]) == (None, None)
    assert (rows[0]["ranks"], rows[0]["ranks_seen"]) == ("0-1", "0")
    assert "no other rank of the group is on this node" in table_of(rows).note


def test_collectives_of_all_nodes_of_the_newest_attempt_are_merged() -> None:
    halves = []
    for ranks in ((0, 1), (2, 3)):
        half = CollectiveJoin()
        add(half, {rank: [Issued(NAME, 0, 10 + rank)] for rank in ranks}, world(4), generation=1)
        halves.append(save_and_load(half))
    nodes = [
        NodeState(f"node-{number}", join=join)
        for number, join in enumerate([*halves, save_and_load(late(0))])
    ]
    for node, attempt in zip(nodes, (1, 1, 0), strict=True):
        who = identity_of(RunDirectory(Path("run")), 0, 4, attempt=attempt)
        node.processes[who.key] = ProcessState(who, Anchor(0, 0, 0), RankStatistics())
    (row,) = collective_rows(latest_collective_joins(nodes))

    assert (row["count"], row["joined"], row["ranks_seen"]) == (4, 1, "0-3")
    # The count is the sum of the operations that each node has joined.
    assert row["groups_operations"]["joined"] == 2


def test_last_arrivals_are_counted_for_each_rank() -> None:
    """Only operations that show the last rank count.

    A rank that is never last has 0; without operations there is no value.
    """
    send = "broadcast group=0 dtype=float32 root=0"
    issued = {
        rank: [
            *(
                Issued(NAME, n, (1000 if rank == n % 4 else 4000) * US, 3_000_000)
                for n in range(20)
            ),
            *(Issued(send, 20 + n, (1000 + rank) * US, 3_000_000) for n in range(20)),
        ]
        for rank in range(3)
    }
    rows = collective_rows([save_and_load(joined(issued))])
    found = count_last_arrivals(rows)

    assert {row["operation"]: row["joined"] for row in rows} == {"allreduce": 20, "broadcast": 20}
    assert found == {rank: {"count": 5, "joined": 20, "share": 0.25} for rank in range(3)}
    assert count_last_arrivals(on_nodes((0, 1), (2, 3), last=3)) == {}
    assert count_last_arrivals([]) == {}


def on_nodes(*nodes: tuple[int, ...], last: int) -> list[dict[str, Any]]:
    """Return joins of a group's all-reduces on several nodes.

    On a node with the rank `last`, this rank arrived last.
    """
    joins = []
    for ranks in nodes:
        join = CollectiveJoin()
        issued = {
            rank: [
                Issued(NAME, n, (1000 if rank == last else 4000) * US, 3_000_000) for n in range(10)
            ]
            for rank in ranks
        }
        add(join, issued, world(sum(map(len, nodes))))
        joins.append(save_and_load(join))
    return collective_rows(joins)


def test_last_rank_of_a_group_on_several_nodes_is_unknown() -> None:
    """Each node sees only some ranks.

    The table marks the wait as a lower bound and the transfer as an upper bound.
    """
    (row,) = on_nodes((0, 1), (2, 3), last=3)
    found = cells([row], "allreduce")

    assert (row["joined_whole"], row["slowest_rank"], row["by_rank"]["3"]["last"]) == (
        False,
        None,
        10,
    )
    assert "other nodes" in row["cannot_tell"][0]
    assert "last to arrive" not in found
    assert found["comm wait us"] == ">= 750"
    assert next(
        text for heading, text in found.items() if heading.startswith("transfer ")
    ).startswith("<= ")
    assert found["bus bandwidth"] == ">= 4.5 GB/s"


def test_last_rank_of_a_group_within_one_of_several_nodes_is_known() -> None:
    (row,) = collective_rows([save_and_load(late(1)), save_and_load(CollectiveJoin())])

    assert (row["joined_whole"], row["slowest_rank"], row["cannot_tell"]) == (True, 1, [])
    found = cells([row], "allreduce")
    assert (found["last to arrive"], found["of operations"]) == ("1", "100%")
    assert table_of([row]).note == ""


def test_collective_rows_are_sorted_by_bytes() -> None:
    join = joined(
        {
            rank: [Issued(NAME, 0, 10, 8), Issued("broadcast group=0 dtype=int8 root=0", 1, 10, 9)]
            for rank in range(2)
        }
    )

    assert [row["operation"] for row in collective_rows([save_and_load(join)])] == [
        "broadcast",
        "allreduce",
    ]
    assert collective_rows([]) == []


def test_table_of_collectives_shows_last_rank_and_transfer_time() -> None:
    found = cells(collective_rows([save_and_load(late(1))]), "allreduce")

    assert (found["ranks"], found["count"], found["bytes"], found["comm wait ms"]) == (
        "0-2",
        "30",
        "90.0 MB",
        "2.00",
    )
    assert found["bus bandwidth"].endswith("GB/s")
    assert (found["last to arrive"], found["of operations"]) == ("1", "100%")


def test_table_of_collectives_marks_bounds_and_explains_missing_values() -> None:
    broadcast = "broadcast group=0 dtype=float32 root=0"
    flags = int(Flag.COMPLETED | Flag.ASYNC)
    join = joined({rank: [
        Issued(broadcast, 0, (10, 4000, 4000)[rank] * US),
        Issued("allgather group=0 dtype=int8", 1, (100, 200, 300)[rank] * US, flags=flags),
        Issued("allreduce group=0 dtype=int8", 2, 10, flags=0),
    ] for rank in range(3)})  # fmt: skip
    rows = collective_rows([save_and_load(join)])
    note = table_of(rows).note

    assert cells(rows, "broadcast")["comm wait ms"] == "<= 2.66"
    assert cells(rows, "broadcast")["bus bandwidth"] == "-"
    assert cells(rows, "allgather")["comm wait ms"].startswith("~ ")
    assert cells(rows, "allgather")["bus bandwidth"] == ">= 7.0 GB/s"
    assert cells(rows, "allreduce")["comm wait ms"] == "-"
    assert "allreduce: the backend does not report the end" in note


def test_kernel_times_give_exact_bandwidth_and_wait() -> None:
    """Durations by the device's clock include no queueing."""
    flags = int(Flag.COMPLETED | Flag.ASYNC | Flag.DEVICE)
    join = joined({rank: [
        Issued("allgather group=0 dtype=int8", 1, (100, 200, 300)[rank] * US, flags=flags),
    ] for rank in range(3)})  # fmt: skip
    (row,) = collective_rows([save_and_load(join)])

    assert (row["by_device"], row["ended"]) == (3, 3)
    assert cells([row], "allgather")["bus bandwidth"] == "7.0 GB/s"


def test_table_of_many_collectives_is_short_and_without_control_characters() -> None:
    """Names cannot control the terminal."""
    join = joined(
        {rank: [Issued(f"op{n}\x1b[31m group=0", n, 10) for n in range(9)] for rank in range(2)}
    )
    table = table_of(collective_rows([save_and_load(join)]))

    assert (table.first, table.rows) == (6, 9)
    assert not any("\x1b" in text for text in table.columns[0].texts())


@pytest.mark.parametrize(
    ("ranks", "joined_times", "last", "lag_ms", "named"),
    [
        (2, 100, 48, {0: 9.0, 1: 10.0}, False),
        (2, 100, 56, {0: 9.0, 1: 10.0}, False),
        (8, 80, 14, dict.fromkeys(range(7), 5.0) | {7: 9.0}, False),
        (4, 3, 1, dict.fromkeys(range(3), 1.0) | {3: 1.1}, False),
        (2, 100, 80, {0: 9.0, 1: 10.0}, True),
        (8, 80, 30, dict.fromkeys(range(7), 5.0) | {7: 9.0}, True),
        (2, 100, 30, {0: 9.0, 1: 90.0}, True),  # Rank 1 is rarely last, and then very late.
    ],
)
def test_rank_last_as_often_as_by_chance_is_not_the_slowest(
    ranks: int, joined_times: int, last: int, lag_ms: dict[int, float], named: bool
) -> None:
    """Each of two equal ranks is last in about half of all operations by chance."""
    assert len(lag_ms) == ranks
    lags_ns = {rank: round(each * 1e6) for rank, each in lag_ms.items()}
    assert is_last_by_chance(last, joined_times, lags_ns, ranks - 1) is not named


@pytest.mark.parametrize(("late_share", "slowest"), [(0.5, (None, None)), (0.9, ("1", "90%"))])
def test_slowest_rank_of_a_collective_is_shown_only_above_chance(
    late_share: float, slowest: tuple[str | None, str | None]
) -> None:
    late_in = [1 if number < 40 * late_share else 0 for number in range(40)]
    issued = {
        rank: [
            Issued(NAME, number, 1000 * US if late == rank else 2000 * US, 3_000_000)
            for number, late in enumerate(late_in)
        ]
        for rank in range(2)
    }
    found = cells(collective_rows([save_and_load(joined(issued))]), "allreduce")
    assert (found.get("last to arrive"), found.get("of operations")) == slowest


TAPPED = (
    "collectives were recorded from Python, which costs up to 50 us each and records no end times"
    " of asynchronous collectives"
)


@pytest.mark.parametrize(
    ("missing", "attempt", "grouped", "expected"),
    [
        (("no tap", "no tap"), (0, 0), True, [f"{TAPPED}; no tap"]),
        (("no tap", "old tap"), (0, 0), True, [f"{TAPPED}; no tap", f"{TAPPED}; old tap"]),
        (("no tap", ""), (0, 0), True, [f"{TAPPED}; no tap"]),
        (("", ""), (0, 0), True, []),
        # The ranks after a restart may have the tap.
        (("no tap", ""), (0, 1), True, []),
        # Ranks without a common group have no collectives.
        (("no tap", "no tap"), (0, 0), False, []),
    ],
)
def test_missing_tap_is_one_note_for_each_reason_of_the_last_attempt(
    missing: tuple[str, str],
    attempt: tuple[int, int],
    grouped: bool,
    expected: list[str],
    run: RunDirectory,
) -> None:
    for number, (reason, each) in enumerate(zip(missing, attempt, strict=True)):
        rank = Rank(run, 0 if attempt[1] else number, 2, identity={"attempt": each})
        rank.session.facts.missing_tap = reason
        rank.session.publish()
        if grouped:
            rank.session.metadata.add_group("0", [0, 1], "default")
        rank.steps(12, forward=4, host=1)
        rank.close()
    read_to_end(run)

    notes = build_report(run.run_id, load_all(run))["quality"]["notes"]
    assert [note for note in notes if "tap" in note] == expected
