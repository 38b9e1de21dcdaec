"""Telemetry: GPUs and network ports over time, beside what else was measured of the node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import amount
from torchlens_perf.page.sections.section import tables_of
from torchlens_perf.view.html import figure, section
from torchlens_perf.view.markup import Element

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents, Series

_MAX_CHARTS, _MAX_ROWS, _MAX_GPUS = 16, 16, 32
_UNITS = {"By": "bytes", "By/s": "bytes per second", "Cel": "°C", "Hz": "MHz", "1": "count"}


def telemetry(contents: Contents) -> Element | None:
    by_title: dict[str, list[Series]] = defaultdict(list)
    for each in contents["telemetry"]:
        by_title[each["title"]].append(each)
    found = tables_of(contents, "gpus", "ports")
    if not by_title and not found:
        return None
    charts = list(by_title.items())[:_MAX_CHARTS]
    shown = [series_chart(title, of) for title, of in charts]
    return section("telemetry", "Hardware", shown, found)


def series_chart(title: str, of: Sequence[Series]) -> Element:
    """Return the place of a line chart of one quantity."""
    unit = of[0]["unit"]
    label = _UNITS.get(unit, unit)
    return figure("telemetry", title, _words(of, shown_as(unit)), data_title=title, data_unit=label)


def _words(of: Sequence[Series], show: Callable[[float], str]) -> str:
    means = {}
    for each in of:
        known = [value for value in each["value"] if value is not None]
        if known:
            means[each["where"]] = sum(known) / len(known)
    if not means:
        return "Not measured."
    low, high = min(means, key=lambda where: means[where]), max(means, key=lambda where: means[where])
    if len(means) == 1:
        return f"Mean: {show(means[low])} on {low}."
    return f"Mean: from {show(means[low])} on {low} to {show(means[high])} on {high}."


def shown_as(unit: str) -> Callable[[float], str]:
    """A value with its unit, which is UCUM's, in words."""
    if unit == "By":
        return lambda value: amount(value, "B")
    if unit == "By/s":
        return lambda value: amount(value, "B/s")
    if unit == "Hz":
        return lambda value: f"{value / 1e6:.0f} MHz"
    if unit == "Cel":
        return lambda value: f"{value:.0f} °C"
    if unit in ("1", "%"):
        return lambda value: f"{value:.3g}{' %' if unit == '%' else ''}"
    return lambda value: f"{value:.3g} {unit}"
