"""Modules and the user's sections: where the time of forward and backward goes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import duration
from torchlens_perf.page.sections.bars import bars
from torchlens_perf.page.sections.section import named_ranks, tables_of
from torchlens_perf.view.html import section
from torchlens_perf.view.markup import Element, tag
from torchlens_perf.view.specs import Bar, inert

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents
    from torchlens_perf.verdicts.words.report import Module

_MAX_BARS, _FEW_RANKS = 6, 4
_VISIBLE_GAP = 0.1  # Share of the largest gap from which a module of the slow rank is marked.
_VISIBLE = 0.01  # Share of the longest bar. Shorter ones are in the table only.


def modules(contents: Contents) -> Element | None:
    """Return the section; None where neither modules nor sections were timed."""
    report = contents["report"]
    found = tables_of(contents, "modules", "sections", "device_sections")
    if not found:
        return None
    on_device = any(row["device_own_by_rank"] for row in report["modules"])
    rows = [row for row in report["modules"] if row["device_own_by_rank"] or not on_device][:_MAX_BARS]
    shown = _bars(rows, named_ranks(report), on_device=on_device) if rows else None
    note = tag("p", "Modules inside of these are not timed.", class_="note")
    return section("modules", "Modules and sections", shown, found, note if report["run"]["deeper_modules"] else None)


def _bars(rows: Sequence[Module], named: Sequence[int], *, on_device: bool) -> Element:
    """Draw each module: a bar per rank where they are few, else its slowest rank and the median of the others."""
    longest = max(_slowest_s(row, on_device=on_device) for row in rows)
    rows = [row for row in rows if _slowest_s(row, on_device=on_device) >= _VISIBLE * longest]
    least = _VISIBLE_GAP * max(_gap(row, on_device=on_device) for row in rows)
    made: list[Bar] = []
    gaps: list[tuple[float, str]] = []
    for row in rows:
        known = {int(rank): value for rank, value in _by_rank(row, on_device=on_device).items()}
        heading = inert(row["name"])
        if len(known) < 2:
            made.append(
                Bar(
                    "all ranks" if len(known) != 1 else f"rank {min(known)}",
                    _of(_a_step(row, on_device=on_device), slow=False),
                    heading=heading,
                )
            )
            continue
        slowest = max(known, key=lambda rank: known[rank])
        middle = statistics.median([value for rank, value in known.items() if rank != slowest])
        others = "the others" if len(known) > 2 else "the other"
        said = f"{heading} takes {duration(known[slowest])} on rank {slowest}, {duration(middle)} on {others}"
        gaps.append((known[slowest] - middle, said))
        if len(known) <= _FEW_RANKS:
            shown: list[tuple[str, float, int | None]] = [
                (f"rank {rank}", value, rank) for rank, value in sorted(known.items())
            ]
        else:
            shown = [(f"rank {slowest} (slowest)", known[slowest], slowest), ("median of the others", middle, None)]
        for at, (label, value, rank) in enumerate(shown):
            slow = rank in named and rank == slowest and gaps[-1][0] >= least
            made.append(Bar(label, _of(value, slow=slow), rank, slow, heading=heading if at == 0 else ""))
    words = max(gaps, default=(0.0, ""))[1]
    caption = f"Largest gap: {words}." if words else "Self time: without the modules inside."
    where = "device" if on_device else "forward"
    names = {"slower": "slow rank", "module": "other ranks"}
    return bars("modules-bars", f"Self time of modules per step ({where})", made, caption, names=names)


def _by_rank(row: Module, *, on_device: bool) -> Mapping[str, float]:
    return row["device_own_by_rank"] if on_device else row["by_rank"]


def _slowest_s(row: Module, *, on_device: bool) -> float:
    return max(_by_rank(row, on_device=on_device).values(), default=_a_step(row, on_device=on_device))


def _gap(row: Module, *, on_device: bool) -> float:
    values = sorted(_by_rank(row, on_device=on_device).values())
    return values[-1] - statistics.median(values[:-1]) if len(values) > 1 else 0.0


def _of(value: float, *, slow: bool) -> dict[str, float]:
    return {"slower" if slow else "module": value}


def _a_step(row: Module, *, on_device: bool) -> float:
    return (row["device_own_s_per_step"] or 0.0) if on_device else row["own_s_per_step"]
