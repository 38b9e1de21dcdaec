"""Phases: the parts of each rank's typical step."""

from __future__ import annotations

from torchlens_perf.analysis.statistics.quantities import format_percent
from torchlens_perf.page.contents import PageContents
from torchlens_perf.page.sections.bars import build_bar_figure
from torchlens_perf.page.sections.section import (
    RANK_TABLES,
    build_tables,
    ranks_by_prominence,
    ranks_in_verdicts,
)
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.words.report import Rank, Report
from torchlens_perf.view.html import build_section
from torchlens_perf.view.markup import Element, tag
from torchlens_perf.view.rank_tables import covered_steps, mean_parts, part_name, step_parts
from torchlens_perf.view.specs import Bar
from torchlens_perf.view.theme import PARTS as NAMES

_MAX_BARS, _MIN_OTHERS = 8, 2
_HIDDEN = "The devices wait for other ranks, so device times cannot show which host is slow."


def build_phases_section(contents: PageContents) -> Element | None:
    """Return the section on phases; None if no rank has a typical step."""
    report = contents["report"]
    rows = [rank for rank in ranks_by_prominence(report) if rank["typical"] is not None]
    if not rows:
        return None
    named = ranks_in_verdicts(report)
    # Slow ranks are compared with others.
    others = [rank for rank in rows if rank["rank"] not in named]
    slow = [rank for rank in rows if rank["rank"] in named][: _MAX_BARS - len(others[:_MIN_OTHERS])]
    shown = [*slow, *others][:_MAX_BARS]
    own = report["steps"]["own_time"]
    hidden = own is not None and own["is_hidden"]
    made = [
        _build_phase_figure(report, shown, by_device=False, hidden=False),
        _build_phase_figure(report, shown, by_device=True, hidden=hidden),
    ]
    if report["steps"]["by"] == DEVICE:
        made.reverse()
    rest = f"{len(shown)} of {len(rows)} ranks, slow ranks first." if len(shown) < len(rows) else ""
    tables = build_tables(contents, *RANK_TABLES) if report["run"]["world_size"] == 1 else None
    return build_section(
        "phases", "Phases", made, tag("p", rest, class_="note") if rest else None, tables
    )


def _build_phase_figure(
    report: Report, ranks: list[Rank], *, by_device: bool, hidden: bool
) -> Element | None:
    named = ranks_in_verdicts(report)
    several = report["run"]["world_size"] > 1
    found = {rank["rank"]: step_parts(rank, by_device=by_device) for rank in ranks}
    rows = [
        Bar(
            f"rank {rank}" * several,
            {part: parts[part] for part in NAMES if parts.get(part)},
            rank,
            rank in named,
        )
        for rank, parts in found.items()
        if parts
    ]
    if not rows:
        return None
    clock = "device" if by_device else "host"
    return build_bar_figure(
        f"phases-{clock}",
        f"Typical step by part{covered_steps(report)} ({clock} clock)",
        rows,
        _phase_caption(rows, report, hidden=hidden),
    )


def _phase_caption(rows: list[Bar], report: Report, *, hidden: bool) -> str:
    """Return a caption about the largest part.

    hidden: True if devices wait for other ranks, so their times cannot show which host is slow.
    """
    if hidden:
        return _HIDDEN
    means = mean_parts(row.seconds for row in rows)
    if not any(means.values()):
        return "No part was measured."
    largest = max(means, key=lambda part: means[part])
    share = format_percent(means[largest] / sum(means.values()))
    return f"Largest part: {part_name(report, largest, means[largest])}, {share}."
