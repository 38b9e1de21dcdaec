"""Phases: what a typical step of each rank is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import duration, percent
from torchlens_perf.page.sections.bars import Bar, bars
from torchlens_perf.page.sections.section import RANK_TABLES, by_prominence, named_ranks, tables_of
from torchlens_perf.run.records import PARTS
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.view.html import section
from torchlens_perf.view.markup import Element, tag
from torchlens_perf.view.theme import PARTS as NAMES

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents
    from torchlens_perf.verdicts.words.report import Rank, Report

_MAX_BARS = 8
_NOTICEABLE = 0.01  # Share of the slow rank's step from which a gap is worth a sentence.
_HIDDEN = "A device that waits for other ranks hides what its host does."


def phases(contents: Contents) -> Element | None:
    report = contents["report"]
    rows = [rank for rank in by_prominence(report) if rank["typical"] is not None]
    if not rows:
        return None
    shown = rows[:_MAX_BARS]
    of_host = {rank["rank"]: rank["typical"]["parts"] for rank in shown if rank["typical"] is not None}
    made = [_part(report, shown, "host", of_host)]
    of_device = {
        rank["rank"]: rank["device"]["parts"]
        for rank in shown
        if rank["device"] is not None and rank["device"]["parts"]
    }
    if of_device:
        made.insert(0 if report["steps"]["by"] == DEVICE else 1, _part(report, shown, "device", of_device))
    rest = f"{len(shown)} of {len(rows)} ranks, slow ones first." if len(shown) < len(rows) else None
    note = tag("p", rest, class_="note") if rest else None
    one = report["run"]["world_size"] == 1
    return section("phases", "Phases", made, note, tables_of(contents, *RANK_TABLES) if one else None)


def _part(report: Report, ranks: list[Rank], clock: str, parts_of: dict[int, dict[str, float]]) -> list[Element]:
    named = named_ranks(report)
    shown = [rank for rank in ranks if rank["rank"] in parts_of]
    seen = [part for part in PARTS if any(part in parts for parts in parts_of.values())]
    rows = []
    for rank in shown:
        parts = {part: parts_of[rank["rank"]].get(part, 0.0) for part in seen}
        if clock == "host":
            parts = _without_contention(parts, rank)
        rows.append(Bar(f"rank {rank['rank']}", parts, rank["rank"], rank["rank"] in named))
    own = report["steps"]["own_time"]
    hidden = clock == "device" and own is not None and own["is_hidden"]
    title = f"Typical step by part ({clock} clock)"
    made = [bars(f"phases-{clock}", title, rows, _words(rows, hidden=hidden))]
    missing = sorted({part for rank in ranks for part in rank["not_measured"]})
    if missing and clock == "host":
        names = ", ".join(NAMES[part].name for part in missing)
        made.append(tag("p", f"Not measured on some ranks, and part of backward there: {names}.", class_="note"))
    return made


def _without_contention(parts: dict[str, float], rank: Rank) -> dict[str, float]:
    """Take CPU contention out of the parts it lies in, as a part of its own."""
    lack = rank["typical"]["lack_of_cpu"] if rank["typical"] is not None else None
    if not lack or sum(lack.values()) <= 0:
        return parts
    taken = {part: min(value, lack.get(part, 0.0)) for part, value in parts.items()}
    return {**{part: value - taken[part] for part, value in parts.items()}, "cpu": sum(taken.values())}


def _words(rows: list[Bar], *, hidden: bool) -> str:
    """Return the largest part, or what takes longer on the slow rank.

    hidden: devices that wait hide what their hosts do, so that this clock cannot tell.
    """
    if hidden:
        return _HIDDEN
    parts = list(dict.fromkeys(part for row in rows for part in row.seconds))
    total = sum(sum(row.seconds.values()) for row in rows)
    if not total:
        return "No part was measured."
    slow = next((row for row in rows if row.slow), None)
    others = [row for row in rows if not row.slow]
    if slow is not None and others:
        usual = {part: sum(row.seconds.get(part, 0.0) for row in others) / len(others) for part in parts}
        own = [part for part in parts if part != "communication"]
        more = max(own, key=lambda part: slow.seconds.get(part, 0.0) - usual[part], default=None)
        if more is not None and slow.seconds.get(more, 0.0) - usual[more] > _NOTICEABLE * sum(slow.seconds.values()):
            return (
                f"Largest gap: {slow.label} spends {duration(slow.seconds[more])} in {NAMES[more].name}; the others "
                f"average {duration(usual[more])}."
            )
    sums = {part: sum(row.seconds.get(part, 0.0) for row in rows) for part in parts}
    largest = max(sums, key=lambda part: sums[part])
    return f"Largest part: {NAMES[largest].name}, {percent(sums[largest] / total)}."
