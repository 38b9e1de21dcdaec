"""Collectives in the report: rows of the JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from torchlens_perf.analysis.collectives.channel import JoinCounts
from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.analysis.collectives.semantics import (
    GroupKey,
    WaitRelation,
    describe_limits,
    semantics_of,
)
from torchlens_perf.analysis.collectives.statistics import (
    TOTALS,
    OperationStatistics,
    merge_operations,
)
from torchlens_perf.diagnosis.facts.distribution import summarize_sketch
from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.verdicts.node_state import ProcessState
from torchlens_perf.verdicts.words.report import Collective, LastArrivals

_DEVIATIONS = 3.0
"""Standard deviations above the expected count at which a rank is last to arrive too often."""
_TIMES = {name: f"{name.removesuffix('ns')}s" for name in TOTALS if name.endswith("_ns")}
"""The name in seconds of each total in nanoseconds."""
_OperationPlace = tuple[GroupKey, tuple[int, int] | None]


def collective_rows(joins: Sequence[CollectiveJoin]) -> list[Collective]:
    """Return a row for each operation, dtype and group (or pair of ranks), most bytes first.

    joins: one per node, see latest_joins().

    - `count` and `bytes` are sums over the records of all ranks.
    - `joined` counts operations that were compared between ranks. If `joined_whole` is false, each
      node compared only its own ranks, so the last rank to arrive is not known.
    - `groups_operations` counts the outcomes of all operations of the row's group, not only of this
      row.
    - Times are in seconds, bandwidths in bytes per second. A value that is not known is null.
    """
    counts: dict[_OperationPlace, JoinCounts] = {}
    for node in joins:
        for place, counted in node.join_counts().items():
            counts[place] = counts.get(place, JoinCounts()).plus(counted)
    rows = [
        _build_row(each, counts, whole=any(node.has_all_ranks(each.key.members) for node in joins))
        for each in merge_operations([node.operations() for node in joins])
    ]
    return sorted(
        rows, key=lambda row: (-row["bytes"], -row["count"], row["operation"], row["group"])
    )


def count_last_arrivals(rows: Iterable[Collective]) -> dict[int, LastArrivals]:
    """Return how often each rank was last to arrive.

    Only operations in which every rank waits for all others count. End times of other operations do
    not show the last rank.
    """
    counts: dict[int, list[int]] = {}
    for row in rows:
        if (
            row["joined_whole"]
            and row["joined"]
            and semantics_of(row["operation"]).waits is WaitRelation.ALL
        ):
            for rank, values in row["by_rank"].items():
                count = counts.setdefault(int(rank), [0, 0])
                count[0] += int(values["last"])
                count[1] += row["joined"]
    return {
        rank: {"count": last, "joined": of, "share": last / of}
        for rank, (last, of) in counts.items()
    }


def python_tap_notes(processes: Iterable[ProcessState]) -> list[str]:
    """Return notes on ranks that recorded collectives from Python instead of the native tap.

    processes: the processes of the reported attempt.
    """
    # Only ranks with a group have collectives.
    missing = dict.fromkeys(
        process.facts.missing_tap for process in processes if process.facts.groups
    )
    means = (
        "collectives were recorded from Python, which costs up to 50 us each and records no end"
        " times of asynchronous collectives"
    )
    return [f"{means}; {each}" for each in missing if each]


def _build_row(
    statistics: OperationStatistics, counts: dict[_OperationPlace, JoinCounts], *, whole: bool
) -> Collective:
    """Return one row. whole: True if one node has all ranks of the operation."""
    key, size = statistics.key, statistics.octave_with_most_bytes()
    bandwidth = None if size is None else statistics.compute_bus_bandwidth(size)
    by_rank = statistics.totals_by_rank()
    counted = counts.get((key.group, key.pair), JoinCounts())
    seen = sorted({*statistics.ranks, *by_rank})
    lags_ns = {
        rank: row["exposed_lag_ns"] + row["overlapped_lag_ns"] for rank, row in by_rank.items()
    }
    slowest = max(by_rank, key=lambda rank: (lags_ns[rank], by_rank[rank]["last"]), default=None)
    if slowest is not None and (
        not (whole and by_rank[slowest]["last"])
        or is_last_by_chance(by_rank[slowest]["last"], statistics.joined, lags_ns, slowest)
    ):
        slowest = None
    return {
        "operation": key.operation,
        "group": key.group.name,
        "dtype": key.dtype or None,
        "description": key.group.description,
        "pair": None if key.pair is None else list(key.pair),
        "ranks": format_ranges(sorted(key.members)) if key.members else None,
        "ranks_seen": format_ranges(seen),
        "count": statistics.records,
        "ended": statistics.ended,
        "asynchronous": statistics.asynchronous,
        "by_device": statistics.by_device,
        "bytes": statistics.bytes,
        "joined": statistics.joined,
        "joined_whole": whole,
        "duration_s": summarize_sketch(statistics.duration),
        "wait_s": summarize_sketch(statistics.merge_size_sketches("wait")),
        "wait_upper_bound_s": summarize_sketch(statistics.merge_size_sketches("wait_upper_bound")),
        "transfer_s": summarize_sketch(statistics.merge_size_sketches("transfer")),
        "bandwidth_at_bytes": size.mean_bytes if bandwidth and size else None,
        "busbw": bandwidth,
        "slowest_rank": slowest,
        "by_rank": {
            str(rank): {
                _TIMES.get(name, name): value / 1e9 if name in _TIMES else value
                for name, value in row.items()
            }
            for rank, row in by_rank.items()
        },
        "groups_operations": dataclasses.asdict(counted),
        "cannot_tell": list(
            describe_limits(
                key.operation,
                overlapped=statistics.asynchronous > 0,
                all_seen=whole,
                ended=statistics.ended > 0,
                by_device=0 < statistics.by_device == statistics.ended,
            )
        ),
    }


def is_last_by_chance(last: float, joined: int, lags_ns: Mapping[int, float], rank: int) -> bool:
    """Return True if a rank is last about as often as by chance and has no large share of the
    lag.
    """
    even = 1 / max(2, len(lags_ns))
    often = last > joined * even + _DEVIATIONS * math.sqrt(joined * even * (1 - even))
    most = lags_ns[rank] >= (1 + even) / 2 * sum(lags_ns.values())
    return not (often or most)
