"""The tables of collectives and of slow links. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torchlens_perf.analysis.collectives.semantics import SEND_RECV
from torchlens_perf.verdicts.stragglers.detector import mesh_dimension
from torchlens_perf.verdicts.words.report import Collective, Report
from torchlens_perf.view.rank_tables import slow_ranks
from torchlens_perf.view.specs import Column, Quantity, Table, columns_if

_FIRST_ROWS = 6
_MIN_BANDWIDTH_BYTES = 1 << 16
"""Operations below this size have no bandwidth in the table: latency dominates their duration."""
_LEAST, _MOST, _ABOUT = ">= ", "<= ", "~ "


def build_collective_table(report: Report) -> Table | None:
    """Return a row per operation, group and dtype. Rows that wait for a slow rank come first."""
    late = slow_ranks(report)
    rows = sorted(report["collectives"], key=lambda row: row["slowest_rank"] not in late)
    if not rows or report["run"]["world_size"] == 1:
        return None
    waits = [_marked_wait_s(row) for row in rows]
    transfers = [_marked_transfer_s(row) for row in rows]
    bandwidths = [_marked_bus_bandwidth(row) for row in rows]
    last = [_last_rank_and_share(row) for row in rows]
    columns = [
        Column("collective", [row["operation"] for row in rows], Quantity.TEXT),
        Column("ranks", [operation_ranks_text(row) for row in rows], Quantity.TEXT),
        Column("count", [row["count"] for row in rows], Quantity.NUMBER, 0.8, "Number of records on all ranks."),
        Column("bytes", [row["bytes"] for row in rows], Quantity.BYTES, 0.5),
        Column("duration p50", [row["duration_s"]["p50_s"] for row in rows], optional=0.4),
        Column("comm wait", [value for _, value in waits], marks=[mark for mark, _ in waits],
               help="Mean time that a rank waits for the last rank. For asynchronous operations (~), it is the"
               " time from the issue on this rank to the issue on the last rank."),
        Column("transfer", [value for _, value in transfers], optional=0.6, marks=[mark for mark, _ in transfers],
               help="Median duration from the arrival of the last rank to the end."),
        Column("bus bandwidth", [value for _, value in bandwidths], Quantity.RATE, 0.7,
               "Bus bandwidth as defined by nccl-tests.",
               marks=[mark for mark, _ in bandwidths]),
        *columns_if(
            any(rank is not None for rank, _ in last),
            Column("last to arrive", [rank for rank, _ in last], Quantity.TEXT, 0.1,
                   "The rank that other ranks wait for most."),
            Column("of operations", [share for _, share in last], Quantity.SHARE, 0.2,
                   "Share of operations in which this rank arrived last."),
        ),
    ]  # fmt: skip
    slow = frozenset(at for at, row in enumerate(rows) if row["slowest_rank"] in late)
    return Table(
        "collectives", "Collectives", columns, slow, _FIRST_ROWS, _why_unknown(rows[:_FIRST_ROWS]),
        "collective", "comm wait",
    )  # fmt: skip


def build_slow_link_table(report: Report) -> Table:
    """Return the links that are slower than their peers, costliest first."""
    links = report["slow_links"].links
    columns = [
        Column("ranks", ["-".join(map(str, each.ranks)) for each in links], Quantity.TEXT),
        Column("operation", [each.operation for each in links], Quantity.TEXT),
        Column(
            "transfer", [each.transfer_ns / 1e9 for each in links], help="Median transfer time."
        ),
        Column("transfer of peers", [each.peers_transfer_ns / 1e9 for each in links]),
        Column("operations", [each.operations for each in links], Quantity.NUMBER, 0.5),
        Column("total cost", [each.cost_ns / 1e9 for each in links]),
    ]
    slow = frozenset(range(len(links)))
    return Table(
        "slow_links", "Slow links", columns, slow, _FIRST_ROWS, noun="link", ranged="transfer"
    )


def operation_ranks_text(row: Collective) -> str:
    """Return the ranks of an operation as text, such as "0-3 tp" or "0 to 1"."""
    if row["pair"] is not None:
        return f"{row['pair'][0]} to {row['pair'][1]}"
    if row["ranks"] is None:
        return f"{row['ranks_seen']} seen"
    text = f"{row['ranks']} {mesh_dimension(row['description'])}".rstrip()
    return text if row["ranks_seen"] == row["ranks"] else f"{text} ({row['ranks_seen']} seen)"


def _marked_wait_s(row: Collective) -> tuple[str, float | None]:
    """Return the mean wait of a rank, and the mark of a bound or estimate.

    The median would hide a rank that is late only occasionally.
    """
    least, most = row["wait_s"]["mean_s"], row["wait_upper_bound_s"]["mean_s"]
    if least is None or most is None:
        return "", None
    if not row["joined_whole"]:
        return _LEAST, least
    if most > 1.1 * least:
        return _MOST, most
    return _ABOUT if row["asynchronous"] else "", least


def _marked_transfer_s(row: Collective) -> tuple[str, float | None]:
    shortest = row["transfer_s"]["p50_s"]
    return _MOST if shortest is not None and not row["joined_whole"] else "", shortest


def _marked_bus_bandwidth(row: Collective) -> tuple[str, float | None]:
    """Return the mark and the bus bandwidth; None if it is dominated by latency or waiting."""
    least, most = row["wait_s"]["mean_s"], row["wait_upper_bound_s"]["mean_s"]
    mostly_waiting = (
        row["pair"] is None and least is not None and most is not None and most > 1.1 * least
    )
    if (
        row["busbw"] is None
        or mostly_waiting
        or (row["bandwidth_at_bytes"] or 0) < _MIN_BANDWIDTH_BYTES
    ):
        return "", None
    queues = row["asynchronous"] and not 0 < row["by_device"] == row["ended"]
    at_least = queues or not row["joined_whole"]
    return _ABOUT if row["pair"] is not None else _LEAST if at_least else "", row["busbw"]


def _last_rank_and_share(row: Collective) -> tuple[int | None, float | None]:
    rank = row["slowest_rank"]
    return (
        (None, None) if rank is None else (rank, row["by_rank"][str(rank)]["last"] / row["joined"])
    )


def _why_unknown(rows: Sequence[Collective]) -> str:
    """Return sentences on the operations whose waits are not known, with the reasons."""
    unknown = [row for row in rows if row["wait_s"]["mean_s"] is None]
    return " ".join(
        dict.fromkeys(f"{row['operation']}: {_why_not_compared(row)}." for row in unknown)
    )


def _why_not_compared(row: Collective) -> str:
    counts = row["groups_operations"]
    if not row["ended"]:
        return row["cannot_tell"][0]
    if counts["unmatched_records"]:
        if row["operation"] == SEND_RECV:
            return "a rank receives from any source, so its messages cannot be matched"
        if row["by_device"]:
            return (
                "kernel times show ranks that left operations before other ranks arrived, so"
                " operations cannot be matched"
            )
        return "sequence numbers differ between ranks, for example after messages between two ranks"
    if counts["mismatched"]:
        return (
            f"ranks issued different operations at the same position, {counts['mismatched']} times"
        )
    if counts["unjoined"]:
        return f"records of some ranks are missing, {counts['unjoined']} times"
    return "no other rank of the group is on this node"
