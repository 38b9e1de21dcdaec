"""Modules and the user's sections: where forward and backward time goes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torchlens_perf.analysis.statistics.quantities import format_duration
from torchlens_perf.page.sections.bars import build_bar_figure
from torchlens_perf.page.sections.section import build_tables, ranks_in_verdicts
from torchlens_perf.view.html import build_section
from torchlens_perf.view.markup import Element, tag
from torchlens_perf.view.specs import Bar, sanitize_line

if TYPE_CHECKING:
    from torchlens_perf.page.contents import PageContents

_MAX_BARS, _FEW_RANKS = 6, 4
# A module is marked on a slow rank if its gap exceeds this share of the largest gap.
_MIN_MARKED_GAP = 0.1
# Modules with bars below this share of the longest bar are shown only in the table.
_MIN_BAR = 0.01


class _ModuleTimes(NamedTuple):
    name: str
    by_rank: Mapping[int, float]
    slowest: int
    slowest_s: float
    others_s: float
    """Median of the other ranks, or the rank's own time if it is the only rank."""

    @property
    def gap_s(self) -> float:
        return self.slowest_s - self.others_s


def build_modules_section(contents: PageContents) -> Element | None:
    """Return the section on modules; None if neither modules nor user sections were timed."""
    report = contents["report"]
    found = build_tables(contents, "modules", "sections", "device_sections")
    if not found:
        return None
    on_device = any(row["device_own_by_rank"] for row in report["modules"])
    rows = [
        _summarize_module(row["name"], {int(rank): own_s for rank, own_s in by_rank.items()})
        for row in report["modules"]
        if (by_rank := row["device_own_by_rank"] if on_device else row["by_rank"])
    ][:_MAX_BARS]
    title = f"Self time of modules per step ({'device' if on_device else 'forward'})"
    shown = _build_module_figure(rows, ranks_in_verdicts(report), title) if rows else None
    note = tag("p", "Modules nested more deeply than those shown are not timed.", class_="note")
    return build_section(
        "modules",
        "Modules and sections",
        shown,
        found,
        note if report["run"]["deeper_modules"] else None,
    )


def _summarize_module(name: str, by_rank: Mapping[int, float]) -> _ModuleTimes:
    *others, slowest = sorted(by_rank, key=lambda rank: (by_rank[rank], -rank))
    others_s = statistics.median([by_rank[rank] for rank in others or [slowest]])
    return _ModuleTimes(sanitize_line(name), by_rank, slowest, by_rank[slowest], others_s)


def _build_module_figure(rows: Sequence[_ModuleTimes], named: Sequence[int], title: str) -> Element:
    """Draw one bar per rank for each module or, if there are many ranks, the slowest rank and the
    median of the other ranks.
    """
    longest_s = max(row.slowest_s for row in rows)
    rows = [row for row in rows if row.slowest_s >= _MIN_BAR * longest_s]
    most = max(rows, key=lambda row: row.gap_s)
    several = any(len(row.by_rank) > 1 for row in rows)
    made: list[Bar] = []
    for row in rows:
        shown: list[tuple[str, float, int | None]] = [
            (f"rank {rank}" * several, own_s, rank) for rank, own_s in sorted(row.by_rank.items())
        ]
        if len(shown) > _FEW_RANKS:
            slowest = (f"rank {row.slowest} (slowest)", row.slowest_s, row.slowest)
            shown = [slowest, ("median of the other ranks", row.others_s, None)]
        for at, (label, own_s, rank) in enumerate(shown):
            slow = (
                rank in named and rank == row.slowest and row.gap_s >= _MIN_MARKED_GAP * most.gap_s
            )
            made.append(
                Bar(
                    label,
                    {"slower" if slow else "module": own_s},
                    rank,
                    slow,
                    "" if at else row.name,
                )
            )
    caption = "Self time excludes the time in inner modules."
    if len(most.by_rank) > 1:
        others = "the others" if len(most.by_rank) > 2 else "the other"
        gap = (
            f"{format_duration(most.slowest_s)} on rank {most.slowest}, {format_duration(most.others_s)} on"
            f" {others}"
        )
        caption = f"Largest gap: {most.name} takes {gap}."
    return build_bar_figure(
        "modules-bars", title, made, caption, names={"slower": "slow rank", "module": "other ranks"}
    )
