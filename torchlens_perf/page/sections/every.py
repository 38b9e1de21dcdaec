"""All sections in page order. The function of a section returns None if there is no data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from torchlens_perf.analysis.statistics.quantities import (
    format_bytes,
    format_rounded,
)
from torchlens_perf.page.contents import PageContents, TimeSeries
from torchlens_perf.page.sections.modules import build_modules_section
from torchlens_perf.page.sections.phases import build_phases_section
from torchlens_perf.page.sections.quality import build_quality_section
from torchlens_perf.page.sections.section import RANK_TABLES, build_tables
from torchlens_perf.page.sections.verdicts import build_verdicts_section
from torchlens_perf.roles.facts import find_iterations
from torchlens_perf.roles.lanes import draw_lanes
from torchlens_perf.run.grouping import group_values
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.view.html import build_figure, build_section
from torchlens_perf.view.markup import Element, tag
from torchlens_perf.view.step_words import describe_steps

_MIN_HEAT_RANKS = 5
"""Fewest ranks for a heat map. Fewer ranks are compared in a line chart."""
_MAX_CHARTS = 16
_UNITS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "By": ("bytes", lambda value: format_bytes(value, "B")),
    "By/s": ("bytes per second", lambda value: format_bytes(value, "B/s")),
    "Cel": ("°C", lambda value: f"{value:.0f} °C"),
    "Hz": ("MHz", lambda value: f"{value / 1e6:.0f} MHz"),
    "1": ("count", format_rounded),
}
"""The axis label of each UCUM unit, and a function that formats its values."""


def _build_heat_section(contents: PageContents) -> Element | None:
    matrices = contents["steps"]
    if matrices is None or not matrices["is_compared"]:
        return None
    few = len(matrices["places"]) < _MIN_HEAT_RANKS
    chart, title = (
        ("compute", "Compute time per step")
        if few
        else ("heat", "Compute time compared with the other ranks")
    )
    return build_section("heat", "Ranks by step", build_figure(chart, title, None))


def _build_step_time_section(contents: PageContents) -> Element | None:
    if contents["steps"] is None:
        return None
    figure = build_figure(
        "steps", "Step time over the run", f"{describe_steps(contents['report'])}."
    )
    return build_section("steps", "Step time", figure, build_tables(contents, "trainings"))


def _build_tables_section(
    contents: PageContents, key: str, title: str, *tables: str
) -> Element | None:
    found = build_tables(contents, *tables)
    return build_section(key, title, found) if found else None


def _build_one_step_section(contents: PageContents) -> Element | None:
    if not contents["traces"]["steps"]:
        return None
    return build_section(
        "step",
        "One step",
        build_figure("step", "Timeline of one step", None),
        build_tables(contents, "captures"),
    )


def _build_memory_section(contents: PageContents) -> Element | None:
    report, matrices = contents["report"], contents["steps"]
    if all(rank["memory"]["max_bytes"] is None for rank in report["ranks"]):
        return None
    words = _memory_caption(report)
    sources = sorted(
        {rank["memory"]["source"] for rank in report["ranks"] if rank["memory"]["source"]}
    )
    title = f"Memory over the run ({', '.join(sources)})" if sources else "Memory over the run"
    drawn = matrices is not None and matrices["memory_bytes"] is not None
    shown = build_figure("memory", title, words) if drawn else tag("p", words)
    return build_section(
        "memory", "Memory", shown, build_tables(contents, "memory", "out_of_memory")
    )


def _memory_caption(report: Report) -> str:
    known = {
        rank["rank"]: rank["memory"]["max_bytes"]
        for rank in report["ranks"]
        if rank["memory"]["max_bytes"]
    }
    most = max(known, key=lambda rank: known[rank] or 0)
    return f"The highest peak is {format_bytes(known[most] or 0, 'B')} on rank {most}."


def _build_hardware_section(contents: PageContents) -> Element | None:
    by_title = group_values((each["title"], each) for each in contents["telemetry"])
    found = build_tables(contents, "gpus", "ports")
    if not by_title and not found:
        return None
    charts = list(by_title.items())[:_MAX_CHARTS]
    shown = [_build_series_figure(title, of) for title, of in charts]
    return build_section("telemetry", "Hardware", shown, found)


def _build_series_figure(title: str, of: Sequence[TimeSeries]) -> Element:
    """Return an empty figure, in which the page's scripts draw one quantity over time."""
    unit = of[0]["unit"]
    label, show = _UNITS.get(unit, (unit, lambda value: f"{format_rounded(value)} {unit}"))
    return build_figure(
        "telemetry", title, _means_caption(of, show), data_title=title, data_unit=label
    )


def _means_caption(of: Sequence[TimeSeries], show: Callable[[float], str]) -> str:
    values = (
        (each["where"], [value for value in each["value"] if value is not None]) for each in of
    )
    means = {where: fmean(known) for where, known in values if known}
    if not means:
        return "Not measured."
    low = min(means, key=lambda where: means[where])
    high = max(means, key=lambda where: means[where])
    least, most = show(means[low]), show(means[high])
    if len(means) == 1:
        return f"Mean: {least} on {low}."
    return (
        f"The means range from {least} on {low} to {most} on {high}."
        if least != most
        else f"The mean is {least} on each of them."
    )


SECTIONS: tuple[tuple[str, str, Callable[[PageContents], Element | None]], ...] = (
    ("verdicts", "Verdict", build_verdicts_section),
    ("heat", "Heat map", _build_heat_section),
    ("steps", "Step time", _build_step_time_section),
    (
        "ranks",
        "Ranks",
        # The phases section shows the tables of one process.
        lambda of: (
            _build_tables_section(of, "ranks", "Ranks", *RANK_TABLES)
            if of["report"]["run"]["world_size"] > 1
            else None
        ),
    ),
    ("phases", "Phases", build_phases_section),
    (
        "lost_time",
        "Lost time",
        lambda of: _build_tables_section(of, "lost_time", "Lost time", "critical_path", "changes"),
    ),
    (
        "iterations",
        "Iterations",
        lambda of: (
            None
            if (found := find_iterations(of["report"])) is None
            else build_section(
                "iterations",
                "Iterations",
                build_tables(of, "iterations"),
                [build_figure(None, *drawn) for drawn in map(draw_lanes, found.lanes)],
                build_tables(of, "iteration_changes"),
            )
        ),
    ),
    ("modules", "Modules", build_modules_section),
    ("step", "One step", _build_one_step_section),
    (
        "utilization",
        "Utilization",
        lambda of: _build_tables_section(
            of, "utilization", "Utilization", "utilization", "roofline"
        ),
    ),
    (
        "outliers",
        "Outlier steps",
        lambda of: _build_tables_section(of, "outliers", "Outlier steps", "outlier_steps"),
    ),
    (
        "collectives",
        "Collectives",
        lambda of: _build_tables_section(
            of, "collectives", "Collectives", "collectives", "slow_links"
        ),
    ),
    ("memory", "Memory", _build_memory_section),
    ("telemetry", "Hardware", _build_hardware_section),
    (
        "goodput",
        "Goodput",
        lambda of: _build_tables_section(of, "goodput", "Goodput", "goodput"),
    ),
    ("quality", "Data quality", build_quality_section),
)
"""URL fragment, label, and function of each section."""
