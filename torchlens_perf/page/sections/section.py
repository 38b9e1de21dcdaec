"""Helpers of several sections: tables of the report, and the order of its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.verdicts.words.order import ranks_of
from torchlens_perf.view.html import table
from torchlens_perf.view.rank_tables import compute_s

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents
    from torchlens_perf.verdicts.words.report import Rank, Report
    from torchlens_perf.view.markup import Element

RANK_TABLES = ("ranks", "device_times", "cpus")
_NAMED = (
    "straggler",
    "hang",
    "out_of_memory",
    "hang_ended",
    "straggler_transient",
    "straggler_ended",
)


def tables_of(contents: Contents, *keys: str) -> list[Element]:
    """Return the report's tables with these keys, in the order of the keys."""
    known = {each.key: each for each in contents["tables"]}
    return [table(known[key]) for key in keys if key in known]


def named_ranks(report: Report) -> list[int]:
    """Return the ranks that verdicts are about, in the order of the verdicts."""
    found: list[int] = []
    for verdict in report["verdicts"]:
        if verdict["kind"] in _NAMED and verdict["rank"] is not None:
            found += [verdict["rank"], *ranks_of(verdict)]
    return list(dict.fromkeys(found))


def by_prominence(report: Report) -> list[Rank]:
    """Return all ranks: those that verdicts are about first, then by compute time, longest
    first.
    """
    order = {rank: place for place, rank in enumerate(named_ranks(report))}
    return sorted(
        report["ranks"],
        key=lambda rank: (order.get(rank["rank"], len(order)), -compute_s(rank), rank["rank"]),
    )
