"""Collectives in the report: rows of the JSON, and the table that a terminal shows of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.collectives.channel import Counts
from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.analysis.collectives.semantics import SEND_RECV, GroupKey, Waits, cannot_tell, semantics_of
from torchlens_perf.analysis.collectives.statistics import TOTALS, OperationStatistics, merged_operations
from torchlens_perf.analysis.statistics.quantities import amount, duration, duration_or_dash, printable
from torchlens_perf.report.distribution import distribution
from torchlens_perf.report.tables import Column, FittingTable
from torchlens_perf.run.rank_ranges import ranges
from torchlens_perf.verdicts.stragglers.detector import dimension

if TYPE_CHECKING:
    from torchlens_perf.verdicts.node_state import NodeState, ProcessState
    from torchlens_perf.verdicts.words.report import ArrivedLast, Collective

_MAX_ROWS = 6
_DEVIATIONS = 3.0
"""Standard deviations beyond chance from which a rank comes last too often."""
_TIMES = tuple(name for name in TOTALS if name.endswith("_ns"))
_Place = tuple[GroupKey, tuple[int, int] | None]


def collective_rows(joins: Iterable[CollectiveJoin]) -> list[Collective]:
    """One row for each operation, dtype and group, or pair of ranks; most bytes first.

    joins: one of each node, see newest_joins(). `count` and `bytes` are sums over the records of all ranks, `joined`
    counts operations that were compared between ranks: all of them if `joined_whole`, else each node's own, so that
    nobody is known to have come last. Times are in seconds, bandwidths in bytes per second; null is
    not known. `groups_operations` counts what became of all operations of the row's group, not of the row's alone.
    """
    nodes = list(joins)
    counts: dict[_Place, Counts] = {}
    for node in nodes:
        for place, counted in node.counts().items():
            counts[place] = counts.get(place, Counts()).plus(counted)
    rows = [
        _row(each, counts, whole=any(node.has_all(each.key.members) for node in nodes))
        for each in merged_operations([node.operations() for node in nodes])
    ]
    return sorted(rows, key=lambda row: (-row["bytes"], -row["count"], row["operation"], row["group"]))


def arrived_last(rows: Iterable[Collective]) -> dict[int, ArrivedLast]:
    """By rank, how often it came last. Where another rank's end does not show who came last, nobody did."""
    counts: dict[int, list[int]] = {}
    for row in rows:
        if row["joined_whole"] and row["joined"] and semantics_of(row["operation"]).waits is Waits.ALL:
            for rank, values in row["by_rank"].items():
                count = counts.setdefault(int(rank), [0, 0])
                count[0] += int(values["last"])
                count[1] += row["joined"]
    return {rank: {"count": last, "joined": of, "share": last / of} for rank, (last, of) in counts.items()}


def python_tap_notes(nodes: Iterable[NodeState], processes: Iterable[ProcessState]) -> list[str]:
    """For nodes where collectives were tapped from Python: what that means, and what becomes of the native tap.

    processes: those that the report is about.
    """
    hosts = {
        process.identity.node or process.identity.host
        for process in processes
        if process.missing_tap and process.groups
    }
    outlooks = dict.fromkeys(node.tap_outlook for node in nodes if node.host in hosts)
    means = "collectives were tapped from Python: some 50 us each, and no end of asynchronous ones"
    return [f"{means}; {outlook}" if outlook else means for outlook in outlooks]


def _row(statistics: OperationStatistics, counts: dict[_Place, Counts], *, whole: bool) -> Collective:
    """whole: all of its ranks are on one node. Those of several were compared on each node alone."""
    key, size = statistics.key, statistics.main_size()
    bandwidth = None if size is None else statistics.bandwidth(size)
    by_rank = statistics.totals()
    counted = counts.get((key.group, key.pair), Counts())
    seen = sorted({*statistics.ranks, *by_rank})
    lags_ns = {rank: row["exposed_lag_ns"] + row["overlapped_lag_ns"] for rank, row in by_rank.items()}
    slowest = max(by_rank, key=lambda rank: (lags_ns[rank], by_rank[rank]["last"]), default=None)
    if slowest is not None and not (whole and by_rank[slowest]["last"]):
        slowest = None
    if slowest is not None and is_chance(by_rank[slowest]["last"], statistics.joined, lags_ns, slowest):
        slowest = None
    return {
        "operation": key.operation,
        "group": key.group.name,
        "dtype": key.dtype or None,
        "description": key.group.description,
        "pair": None if key.pair is None else list(key.pair),
        "ranks": ranges(sorted(key.members)) if key.members else None,
        "ranks_seen": ranges(seen),
        "count": statistics.records,
        "ended": statistics.ended,
        "asynchronous": statistics.asynchronous,
        "by_device": statistics.by_device,
        "bytes": statistics.bytes,
        "joined": statistics.joined,
        "joined_whole": whole,
        "issue_s": distribution(statistics.issue),
        "duration_s": distribution(statistics.duration),
        "wait_s": distribution(statistics.whole("wait")),
        "wait_upper_bound_s": distribution(statistics.whole("wait_upper_bound")),
        "transfer_s": distribution(statistics.whole("transfer")),
        "bandwidth_at_bytes": size.mean_bytes if bandwidth and size else None,
        "algbw": bandwidth[0] if bandwidth else None,
        "busbw": bandwidth[1] if bandwidth else None,
        "slowest_rank": slowest,
        "by_rank": {
            str(rank): {_unit(name): value / 1e9 if name in _TIMES else value for name, value in row.items()}
            for rank, row in by_rank.items()
        },
        "groups_operations": dataclasses.asdict(counted),
        "cannot_tell": list(
            cannot_tell(
                key.operation,
                overlapped=statistics.asynchronous > 0,
                all_seen=whole,
                ended=statistics.ended > 0,
                by_device=_is_by_device(statistics.by_device, statistics.ended),
            )
        ),
    }


def is_chance(last: float, joined: int, lags_ns: Mapping[int, float], rank: int) -> bool:
    """Whether a rank comes last about as often as any other would by chance, and has not most of the lag either."""
    even = 1 / max(2, len(lags_ns))
    often = last > joined * even + _DEVIATIONS * math.sqrt(joined * even * (1 - even))
    most = lags_ns[rank] >= (1 + even) / 2 * sum(lags_ns.values())
    return not (often or most)


def _is_by_device(by_device: int, ended: int) -> bool:
    return 0 < by_device == ended


def _unit(name: str) -> str:
    return name.removesuffix("_ns") + "_s" if name in _TIMES else name


def collective_table(rows: Sequence[Collective]) -> FittingTable:
    """The rows for a terminal. A value that could not be determined is a dash, and the lines below say why."""
    shown = rows[:_MAX_ROWS]
    columns = [
        Column("collective", [printable(row["operation"]) for row in shown], left=True),
        Column("ranks", [printable(ranks_of(row)) for row in shown], left=True),
        Column("count", [str(row["count"]) for row in shown], 0.2),
        Column("bytes", [amount(row["bytes"], "B") for row in shown], 0.5),
        Column("p50", [duration_or_dash(row["duration_s"]["p50_s"]) for row in shown], 0.6),
        Column("wait", [wait_of(row) for row in shown]),
        Column("transfer", [transfer_of(row) for row in shown], 0.4),
        Column("bus", [bus_of(row) for row in shown], 0.3),
        Column("slowest rank", [slowest_of(row) for row in shown]),
    ]
    return FittingTable("collectives", columns, lambda headers: notes_on(rows, _MAX_ROWS))


def ranks_of(row: Collective) -> str:
    if row["pair"] is not None:
        return f"{row['pair'][0]} to {row['pair'][1]}"
    if row["ranks"] is None:
        return f"{row['ranks_seen']} seen"
    text = f"{row['ranks']} {dimension(row['description'])}".rstrip()
    return text if row["ranks_seen"] == row["ranks"] else f"{text} ({row['ranks_seen']} seen)"


def wait_of(row: Collective) -> str:
    """Total waiting of a rank by the mean, because a rank that is late now and then leaves no mark on the median."""
    least, most = row["wait_s"]["mean_s"], row["wait_upper_bound_s"]["mean_s"]
    if least is None or most is None:
        return "-"
    mark = " ~" if row["asynchronous"] else ""
    if not row["joined_whole"]:
        return f">= {duration(least)}{mark}"
    return f"{duration(least)}{mark}" if most <= 1.1 * least else f"<= {duration(most)}{mark}"


def transfer_of(row: Collective) -> str:
    shortest = duration_or_dash(row["transfer_s"]["p50_s"])
    return shortest if row["joined_whole"] or shortest == "-" else f"<= {shortest}"


def bus_of(row: Collective) -> str:
    """A dash where the transfer may be mostly waiting."""
    least, most = row["wait_s"]["mean_s"], row["wait_upper_bound_s"]["mean_s"]
    mostly_waiting = row["pair"] is None and least is not None and most is not None and most > 1.1 * least
    if row["busbw"] is None or mostly_waiting:
        return "-"
    queues = row["asynchronous"] and not _is_by_device(row["by_device"], row["ended"])
    at_least = queues or not row["joined_whole"]
    about = "~ " if row["pair"] is not None else ">= " if at_least else ""
    return about + amount(row["busbw"], "B/s")


def slowest_of(row: Collective) -> str:
    if row["slowest_rank"] is None:
        return "-"
    share = row["by_rank"][str(row["slowest_rank"])]["last"] / row["joined"]
    return f"{row['slowest_rank']} (last in {share:.0%})"


def notes_on(rows: Sequence[Collective], most: int) -> list[str]:
    """What is to be said below a table of so many of these rows."""
    notes = ["wait: mean a rank; transfer: once the last was there; bus: bandwidth as nccl-tests has it"]
    if any(row["asynchronous"] and row["joined"] for row in rows[:most]):
        on_device = any(row["by_device"] for row in rows[:most])
        what = "a rank's kernel began" if on_device else "a rank issued it"
        notes.append(f"~ asynchronous: how much earlier {what}, not time that it was blocked")
    if any(row["joined"] and not row["joined_whole"] for row in rows[:most]):
        notes.append(
            "where no node has all ranks, each compares its own: the wait is at least that, the transfer at most, and "
            "who came last is not known"
        )
    shown = [row for row in rows[:most] if row["wait_s"]["mean_s"] is None]
    if shown:
        reasons = dict.fromkeys(f"{row['operation']}: {_why_not_joined(row)}" for row in shown)
        notes += list(reasons)
    if len(rows) > most:
        notes.append(f"{most} of {len(rows)}; --json has all, and what each cannot tell")
    return notes


def _why_not_joined(row: Collective) -> str:
    counts = row["groups_operations"]
    if not row["ended"]:
        return str(row["cannot_tell"][0])
    if counts["unmatched_records"]:
        if row["operation"] == SEND_RECV:
            return "a rank receives from any source, so its messages cannot be distinguished"
        if row["by_device"]:
            return "by their kernels' times, ranks left operations before others had come: they do not belong together"
        return "the ranks count this group's operations from different places, as after messages between two of them"
    if counts["mismatched"]:
        return f"ranks had other operations at the same place, {counts['mismatched']} times"
    if counts["unjoined"]:
        return f"the records of some ranks never came, {counts['unjoined']} times"
    return "no other rank of the group is on this node"
