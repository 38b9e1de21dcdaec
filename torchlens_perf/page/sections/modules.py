"""Modules and the user's sections: where the time of forward and backward goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import duration, duration_or_dash, of_typical_step, printable
from torchlens_perf.page.markup import Child, Element, name, safe, tag
from torchlens_perf.page.sections.bars import Bar, bars
from torchlens_perf.page.sections.ranks import named_ranks
from torchlens_perf.page.sections.section import section, table

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents
    from torchlens_perf.verdicts.words.report import Distribution, Module, Report

_MAX_ROWS, _MAX_BARS, _FEW_RANKS = 40, 12, 4
_VISIBLE_GAP = 0.1  # Share of the largest gap from which a module of the slow rank is marked.
_VISIBLE = 0.01  # Share of the longest bar. Shorter ones are in the table only.


def modules(contents: Contents) -> Element | None:
    report = contents["report"]
    parts = [_modules(report), _sections(report), _device_sections(report)]
    if not any(part is not None for part in parts):
        return None
    note = None
    if not report["modules"]:
        note = tag("p", "No module was timed.", class_="note")
    elif report["run"]["deeper_modules"]:
        note = tag("p", "There are modules below those that are timed.", class_="note")
    return section("modules", "Modules and sections", parts, note)


def _modules(report: Report) -> Element | None:
    rows = report["modules"][:_MAX_ROWS]
    if not rows:
        return None
    named = next((rank for rank in named_ranks(report) if any(str(rank) in row["by_rank"] for row in rows)), None)
    several = len(report["ranks"]) > 1
    on_device = any(row["device_s"] is not None for row in rows)
    headers: list[Child] = ["module", "calls", "own p50", "own a step"]
    headers += ["slowest rank"] if several else []
    headers += [f"rank {named}", "its others"] if several and named is not None else []
    headers += ["backward p50", *(["device p50", "device own a step"] if on_device else [])]
    body: list[list[Child]] = []
    for row in rows:
        cells: list[Child] = [
            name(row["name"]),
            str(row["calls"]),
            duration_or_dash(row["own_s"]["p50_s"]),
            duration(row["own_s_per_step"]),
        ]
        if several:
            cells.append(_slowest(row["by_rank"]))
        if several and named is not None:
            mine = row["by_rank"].get(str(named))
            others = [value for rank, value in row["by_rank"].items() if rank != str(named)]
            cells += [duration_or_dash(mine), duration(_middle(others)) if others else "-"]
        cells.append(_median(row["backward_s"]))
        if on_device:
            cells += [_median(row["device_s"]), duration_or_dash(row["device_own_s_per_step"])]
        body.append(cells)
    which = (
        f"the {len(rows)} of {len(report['modules'])} that take most" if len(rows) < len(report["modules"]) else "all"
    )
    by = "device time without modules inside" if on_device else "own forward time"
    caption = f"Modules by {by}, {which}; own: without modules inside"
    if several and named is not None:
        caption += f"; its others: the median of the ranks beside rank {named}"
    return tag("div", _bars(rows[:_MAX_BARS], named_ranks(report), on_device=on_device), table(caption, headers, body))


def _bars(rows: Sequence[Module], named: Sequence[int], *, on_device: bool) -> Element:
    """Draw each module: a bar per rank where they are few, else its slowest rank and the median of the others."""
    longest = max(_slowest_s(row, on_device=on_device) for row in rows)
    rows = [row for row in rows if _slowest_s(row, on_device=on_device) >= _VISIBLE * longest]
    least = _VISIBLE_GAP * max(_gap(row, on_device=on_device) for row in rows)
    made: list[Bar] = []
    gaps: list[tuple[float, str]] = []
    for row in rows:
        known = {int(rank): value for rank, value in _by_rank(row, on_device=on_device).items()}
        heading = safe(printable(row["name"]))
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
        middle = _middle([value for rank, value in known.items() if rank != slowest])
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
    return row["device_own_by_rank"] if on_device and row["device_own_by_rank"] else row["by_rank"]


def _slowest_s(row: Module, *, on_device: bool) -> float:
    return max(_by_rank(row, on_device=on_device).values(), default=_a_step(row, on_device=on_device))


def _gap(row: Module, *, on_device: bool) -> float:
    values = sorted(_by_rank(row, on_device=on_device).values())
    return values[-1] - _middle(values[:-1]) if len(values) > 1 else 0.0


def _of(value: float, *, slow: bool) -> dict[str, float]:
    return {"slower" if slow else "module": value}


def _a_step(row: Module, *, on_device: bool) -> float:
    return (row["device_own_s_per_step"] or 0.0) if on_device else row["own_s_per_step"]


def _slowest(by_rank: Mapping[str, float]) -> str:
    if len(by_rank) < 2:
        return "-"
    rank = max(by_rank, key=lambda each: by_rank[each])
    return f"{rank} ({duration(by_rank[rank])})"


def _middle(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _median(found: Distribution | None) -> str:
    return "-" if found is None else duration_or_dash(found["p50_s"])


def _sections(report: Report) -> Element | None:
    rows = report["sections"][:_MAX_ROWS]
    if not rows:
        return None
    body: list[list[Child]] = [
        [
            name(row["name"]), str(row["calls"]), duration_or_dash(row["total_s"]["p50_s"]),
            of_typical_step(row["s_per_step"]), duration_or_dash(row["host_s_per_typical_step"]),
            _slowest(row["by_rank"]), _median(row["device_s"]),
        ]
        for row in rows
    ]  # fmt: skip
    headers = ["section", "calls", "p50", "typical step", "host code, typical step", "slowest rank", "device p50"]
    return table("Sections of the program's own", headers, body)


def _device_sections(report: Report) -> Element | None:
    rows = report["device_sections"][:_MAX_ROWS]
    if not rows:
        return None
    body: list[list[Child]] = [
        [
            name(row["name"]), str(row["calls"]), duration_or_dash(row["device_s"]["p50_s"]),
            duration_or_dash(row["device_s"]["p99_s"]), duration_or_dash(row["device_s"]["max_s"]),
            _slowest(row["by_rank"]),
        ]
        for row in rows
    ]  # fmt: skip
    headers = ["device section", "count", "p50", "p99", "longest", "slowest rank (mean)"]
    return table("Device sections, by stamps of the device's clock", headers, body)
