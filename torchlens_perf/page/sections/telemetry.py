"""Telemetry: GPUs and network ports over time, beside what else was measured of the node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import amount, percent
from torchlens_perf.page.markup import Child, Element, name
from torchlens_perf.page.sections.ranks import named_ranks
from torchlens_perf.page.sections.section import details, figure, section, table
from torchlens_perf.report.tables import in_bytes, or_dash
from torchlens_perf.run.rank_ranges import ranges

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents, Series
    from torchlens_perf.verdicts.words.report import Report

_MAX_CHARTS, _MAX_ROWS, _MAX_GPUS = 16, 16, 32
_UNITS = {"By": "bytes", "By/s": "bytes per second", "Cel": "°C", "Hz": "MHz", "1": "count"}


def telemetry(contents: Contents) -> Element | None:
    by_title: dict[str, list[Series]] = defaultdict(list)
    for each in contents["telemetry"]:
        by_title[each["title"]].append(each)
    gpus = _gpus(contents["report"])
    if not by_title and gpus is None:
        return None
    named = named_ranks(contents["report"])
    charts = list(by_title.items())[:_MAX_CHARTS]
    shown = [series_chart(title, of) for title, of in charts]
    tables = [series_table(title, of, named) for title, of in charts]
    return section("telemetry", "Hardware over time", gpus, shown, details("As tables", tables) if tables else None)


def series_chart(title: str, of: Sequence[Series]) -> Element:
    """Return the place of a line chart of one quantity."""
    unit = of[0]["unit"]
    label = _UNITS.get(unit, unit)
    return figure("telemetry", title, _words(of, shown_as(unit)), data_title=title, data_unit=label)


def series_table(title: str, of: Sequence[Series], named: Sequence[int]) -> Element:
    """Return the least, mean and largest value of each rank, GPU or port. named: ranks that come first."""
    show = shown_as(of[0]["unit"])
    rows: list[list[Child]] = []
    for each in sorted(of, key=lambda each: each["rank"] not in named)[:_MAX_ROWS]:
        known = [value for value in each["value"] if value is not None]
        cells = [show(min(known)), show(sum(known) / len(known)), show(max(known))] if known else ["-"] * 3
        rows.append([name(each["where"], 40), *cells])
    return table(title, ["source", "min", "mean", "max"], rows)


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
        return in_bytes
    if unit == "By/s":
        return lambda value: amount(value, "B/s")
    if unit == "Hz":
        return lambda value: f"{value / 1e6:.0f} MHz"
    if unit == "Cel":
        return lambda value: f"{value:.0f} °C"
    if unit in ("1", "%"):
        return lambda value: f"{value:.3g}{' %' if unit == '%' else ''}"
    return lambda value: f"{value:.3g} {unit}"


def _gpus(report: Report) -> Element | None:
    rows = sorted(report["gpus"], key=lambda gpu: gpu["signals"].get("sm_clock_share", 1.0))[:_MAX_GPUS]
    if not rows:
        return None
    body: list[list[Child]] = [
        [
            ranges(gpu["ranks"]) or "-",
            name(gpu["host"], 32),
            name(gpu["name"] or "-", 32),
            or_dash(gpu["sm_clock_hz"], lambda hz: f"{hz / 1e6:.0f} MHz"),
            or_dash(gpu["signals"].get("sm_clock_share"), percent),
            ", ".join(f"{reason.replace('_', ' ')} {percent(share)}" for reason, share in gpu["throttled"].items())
            or "-",
            or_dash(gpu["power_w"], lambda watts: f"{watts:.0f} W"),
            or_dash(gpu["temperature_max_c"], lambda degrees: f"{degrees:.0f} °C"),
            or_dash(gpu["xids"], lambda count: f"{count:.0f}"),
            or_dash(gpu["ecc_uncorrected"], lambda count: f"{count:.0f}"),
        ]
        for gpu in rows
    ]
    headers: list[Child] = [
        "rank",
        "node",
        "GPU",
        "SM clock",
        "of its highest",
        "throttled",
        "power",
        "hottest",
        "XID",
        "ECC",
    ]
    which = f", {len(body)} of {len(report['gpus'])}" if len(body) < len(report["gpus"]) else ""
    caption = (
        f"GPUs, those with the lowest clocks first{which}; means over the run, throttled: share of the time by reason"
    )
    return table(caption, headers, body, texts=(1, 2, 5))
