"""Functions that several sections use: tables of the report, and the order of its ranks."""

from __future__ import annotations

from torchlens_perf.page.contents import PageContents
from torchlens_perf.verdicts.words.report import Rank, Report
from torchlens_perf.view.html import build_table
from torchlens_perf.view.markup import Element
from torchlens_perf.view.rank_tables import compute_s

RANK_TABLES = ("ranks", "device_times", "host_gaps", "cpus")


def build_tables(contents: PageContents, *keys: str) -> list[Element]:
    """Return the report's tables with these keys as HTML, in the order of the keys."""
    known = {each.key: each for each in contents["tables"]}
    return [build_table(known[key]) for key in keys if key in known]


def ranks_in_verdicts(report: Report) -> list[int]:
    """Return the ranks that verdicts are about, in the order of the verdicts."""
    return list(
        dict.fromkeys(
            rank
            for verdict in report["verdicts"]
            if verdict.traits.singles_out and verdict.rank is not None
            for rank in (verdict.rank, *verdict.ranks)
        )
    )


def ranks_by_prominence(report: Report) -> list[Rank]:
    """Return all ranks: first ranks in verdicts, then the other ranks by compute time."""
    order = {rank: place for place, rank in enumerate(ranks_in_verdicts(report))}
    return sorted(
        report["ranks"],
        key=lambda rank: (order.get(rank["rank"], len(order)), -compute_s(rank), rank["rank"]),
    )
