"""All sections in the order of the page. A section is None if it has nothing to show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import amount, rounded, steps_words
from torchlens_perf.page.sections.modules import modules
from torchlens_perf.page.sections.phases import phases
from torchlens_perf.page.sections.quality import quality
from torchlens_perf.page.sections.section import RANK_TABLES, tables_of
from torchlens_perf.page.sections.verdicts import verdicts
from torchlens_perf.view.html import figure, section
from torchlens_perf.view.markup import Element, tag
from torchlens_perf.view.step_words import step_words, steps_made

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents, Series, SlowTime
    from torchlens_perf.verdicts.words.report import Report

_MIN_HEAT_RANKS = 5
"""Fewest ranks for a heat map. Fewer ranks are compared in a line chart."""
_MAX_TIMES, _MAX_CHARTS = 3, 16
_UNITS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "By": ("bytes", lambda value: amount(value, "B")),
    "By/s": ("bytes per second", lambda value: amount(value, "B/s")),
    "Cel": ("°C", lambda value: f"{value:.0f} °C"),
    "Hz": ("MHz", lambda value: f"{value / 1e6:.0f} MHz"),
    "1": ("count", rounded),
}
"""The axis label of each UCUM unit, and a function that formats its values."""


def _heat(contents: Contents) -> Element | None:
    matrices = contents["steps"]
    if matrices is None or not matrices["is_compared"]:
        return None
    few = len(matrices["places"]) < _MIN_HEAT_RANKS
    chart, title = (
        ("compute", "Compute time per step")
        if few
        else ("heat", "Compute time compared with the other ranks")
    )
    return section("heat", "Ranks by step", figure(chart, title, _slow_words(matrices["slow"])))


def _slow_words(slow: Sequence[SlowTime]) -> str:
    if not slow:
        return "No slow rank."
    named = [
        f"rank {each['rank']} {steps_words(each['since_step'], each['until_step'])}"
        for each in slow[:_MAX_TIMES]
    ]
    rest = f" and {len(slow) - _MAX_TIMES} more times" if len(slow) > _MAX_TIMES else ""
    return f"Slow: {'; '.join(named)}{rest}."


def _steps(contents: Contents) -> Element | None:
    if contents["steps"] is None:
        return None
    words = f"{steps_made(contents['report'])}: {', '.join(step_words(contents['report']))}."
    return section("steps", "Step time", figure("steps", "Step time over the run", words))


def _ranks(contents: Contents) -> Element | None:
    """Return the section; None for a single process, whose tables are in the section on phases."""
    if contents["report"]["run"]["world_size"] == 1:
        return None
    return _of_tables(contents, "ranks", "Ranks", *RANK_TABLES)


def _of_tables(contents: Contents, key: str, title: str, *tables: str) -> Element | None:
    found = tables_of(contents, *tables)
    return section(key, title, found) if found else None


def _step(contents: Contents) -> Element | None:
    if not contents["traces"]["steps"]:
        return None
    return section(
        "step",
        "One step",
        figure("step", "Timeline of one step", None),
        tables_of(contents, "captures"),
    )


def _memory(contents: Contents) -> Element | None:
    report, matrices = contents["report"], contents["steps"]
    if all(rank["memory"]["max_bytes"] is None for rank in report["ranks"]):
        return None
    words = _memory_words(report)
    sources = sorted(
        {rank["memory"]["source"] for rank in report["ranks"] if rank["memory"]["source"]}
    )
    title = f"Memory over the run ({', '.join(sources)})" if sources else "Memory over the run"
    drawn = matrices is not None and matrices["memory_bytes"] is not None
    shown = figure("memory", title, words) if drawn else tag("p", words)
    return section("memory", "Memory", shown, tables_of(contents, "memory", "out_of_memory"))


def _memory_words(report: Report) -> str:
    known = {
        rank["rank"]: rank["memory"]["max_bytes"]
        for rank in report["ranks"]
        if rank["memory"]["max_bytes"]
    }
    most, least = (
        max(known, key=lambda rank: known[rank] or 0),
        min(known, key=lambda rank: known[rank] or 0),
    )
    text = f"Peak {amount(known[most] or 0, 'B')} on rank {most}"
    if len(known) > 1:
        text += f"; the lowest peak is {amount(known[least] or 0, 'B')} on rank {least}"
    growing = [rank["rank"] for rank in report["ranks"] if rank["memory"]["growth"] is not None]
    if growing:
        text += f"; memory grows from step to step on rank {', '.join(map(str, growing[:8]))}"
    return f"{text}."


def _telemetry(contents: Contents) -> Element | None:
    by_title: dict[str, list[Series]] = defaultdict(list)
    for each in contents["telemetry"]:
        by_title[each["title"]].append(each)
    found = tables_of(contents, "gpus", "ports")
    if not by_title and not found:
        return None
    charts = list(by_title.items())[:_MAX_CHARTS]
    shown = [_series_chart(title, of) for title, of in charts]
    return section("telemetry", "Hardware", shown, found)


def _series_chart(title: str, of: Sequence[Series]) -> Element:
    """Return the figure in which scripts draw the line chart of one quantity."""
    unit = of[0]["unit"]
    label, show = _UNITS.get(unit, (unit, lambda value: f"{rounded(value)} {unit}"))
    return figure("telemetry", title, _mean_words(of, show), data_title=title, data_unit=label)


def _mean_words(of: Sequence[Series], show: Callable[[float], str]) -> str:
    means = {}
    for each in of:
        known = [value for value in each["value"] if value is not None]
        if known:
            means[each["where"]] = sum(known) / len(known)
    if not means:
        return "Not measured."
    low, high = (
        min(means, key=lambda where: means[where]),
        max(means, key=lambda where: means[where]),
    )
    least, most = show(means[low]), show(means[high])
    if len(means) == 1:
        return f"Mean: {least} on {low}."
    return (
        f"Mean: from {least} on {low} to {most} on {high}."
        if least != most
        else f"Mean: {least} on each."
    )


SECTIONS: tuple[tuple[str, str, Callable[[Contents], Element | None]], ...] = (
    ("verdicts", "Verdict", verdicts),
    ("heat", "Heat map", _heat),
    ("steps", "Step time", _steps),
    ("ranks", "Ranks", _ranks),
    ("phases", "Phases", phases),
    ("modules", "Modules", modules),
    ("step", "One step", _step),
    (
        "outliers",
        "Outlier steps",
        lambda of: _of_tables(of, "outliers", "Outlier steps", "outlier_steps"),
    ),
    (
        "collectives",
        "Collectives",
        lambda of: _of_tables(of, "collectives", "Collectives", "collectives", "slow_links"),
    ),
    ("memory", "Memory", _memory),
    ("telemetry", "Hardware", _telemetry),
    ("quality", "Data quality", quality),
)
"""Fragment, label, and function of each section."""
