"""Telemetry: GPUs and network ports over time, beside what else was measured of the node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torchlens_perf.analysis.statistics.quantities import amount, percent
from torchlens_perf.page.pictures.lines import Line, lines_picture
from torchlens_perf.page.pictures.markup import Child, Element, name, tag
from torchlens_perf.page.sections.ranks import named_ranks
from torchlens_perf.page.sections.section import details, in_bytes, or_dash, section, table
from torchlens_perf.run.rank_ranges import ranges

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents, Series
    from torchlens_perf.verdicts.words.report import Report

_MAX_PICTURES, _MAX_LINES, _MAX_GPUS = 16, 16, 32


class OverTime(NamedTuple):
    """One quantity of several ranks, GPUs or ports."""

    picture: Element
    caption: Child
    table: Element


def telemetry(contents: Contents) -> Element | None:
    by_title: dict[str, list[Series]] = defaultdict(list)
    for each in contents["telemetry"]:
        by_title[each["title"]].append(each)
    gpus = _gpus(contents["report"])
    if not by_title and gpus is None:
        return None
    named = named_ranks(contents["report"])
    titles = list(by_title.items())[:_MAX_PICTURES]
    shown = [over_time(f"telemetry-{at}", title, of, named) for at, (title, of) in enumerate(titles)]
    parts: list[Child] = []
    if shown:
        # One figure, which scripts replace by one chart: titles, pictures, then their words.
        inside = [[tag("h3", title), each.picture] for (title, _), each in zip(titles, shown, strict=True)]
        captions = tag("figcaption", [tag("p", each.caption) for each in shown])
        parts = [
            tag("figure", inside, captions, data_chart="telemetry", tabindex="0"),
            details("As tables", [each.table for each in shown]),
        ]
    return section("telemetry", "Hardware over time", gpus, parts)


def over_time(key: str, title: str, of: Sequence[Series], named: Sequence[int]) -> OverTime:
    """key: unique in the page. named: ranks to mark."""
    show = shown_as(of[0]["unit"])
    marked = {each["where"] for each in of if each["rank"] in named}
    words = _words(title, of, show)
    order = sorted(of, key=lambda each: each["where"] not in marked)[:_MAX_LINES]
    lines = [
        Line(each["where"], list(zip(each["time_s"], each["value"], strict=True)), each["where"] in marked)
        for each in order
    ]
    picture = lines_picture(key, title, lines, show, "seconds since the first step", words)
    rows: list[list[Child]] = []
    for each in order:
        known = [value for value in each["value"] if value is not None]
        cells = [show(min(known)), show(sum(known) / len(known)), show(max(known))] if known else ["-"] * 3
        rows.append([name(each["where"], 40), *cells])
    caption: Child = [tag("strong", f"{title[:1].upper()}{title[1:]}. "), words]
    return OverTime(picture, caption, table(title, ["of", "least", "mean", "most"], rows))


def _words(title: str, of: Sequence[Series], show: Callable[[float], str]) -> str:
    means = {}
    for each in of:
        known = [value for value in each["value"] if value is not None]
        if known:
            means[each["where"]] = sum(known) / len(known)
    if not means:
        return "Not measured."
    low, high = min(means, key=lambda where: means[where]), max(means, key=lambda where: means[where])
    if len(means) == 1:
        return f"In the mean {show(means[low])} on {low}."
    return f"In the mean from {show(means[low])} on {low} to {show(means[high])} on {high}."


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
