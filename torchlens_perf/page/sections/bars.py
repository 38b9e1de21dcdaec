"""Horizontal bars as HTML: one row per bar, drawn once, for pages with and without scripts. Pure.

A bar is an SVG as wide as its place, whose lengths are per cent: the page's policy allows no inline styles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torchlens_perf.analysis.statistics.quantities import duration, percent
from torchlens_perf.view.html import figure, shortened
from torchlens_perf.view.markup import Element, safe, tag
from torchlens_perf.view.theme import PARTS

_FULL = 100.0
_LABELLED = 9.0  # Per cent of the width from which a segment shows its share.


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar: a label, seconds by part in the order to draw, and the rank that a click chooses."""

    label: str
    seconds: Mapping[str, float]
    rank: int | None = None
    slow: bool = False
    note: str = ""
    """Text after the value."""
    heading: str = ""
    """Text above this bar and those that follow."""


def bars(key: str, title: str, rows: Sequence[Bar], caption: str, *, names: Mapping[str, str] | None = None) -> Element:
    """Return a figure with bars on one scale.

    key: the id of the figure. caption: the sentence below. names: by part what the legend calls it; the parts of a step
    have their names in the theme.
    """
    shares = names is None  # Of a step; other totals have no parts that are compared.
    names = names if names is not None else {part: of.name for part, of in PARTS.items()}
    longest = max((sum(row.seconds.values()) for row in rows), default=0.0) or 1.0
    seen = list(dict.fromkeys(part for row in rows for part, value in row.seconds.items() if value > 0))
    legend = [
        tag(
            "li", _svg(tag("rect", width="100%", height="100%", class_=f"part-{part}"), "swatch"), names.get(part, part)
        )
        for part in seen
    ]
    made = figure(None, title, caption)
    made.set("id", key)
    made.set("class", "of-bars")
    inside = [
        tag("ul", legend, class_="legend", aria_label="Legend") if len(seen) > 1 else None,
        tag("div", [part for row in rows for part in _row(row, longest, names, shares=shares)], class_="bars"),
    ]
    for at, each in enumerate(part for part in inside if part is not None):
        made.insert(1 + at, each)
    return made


def _row(row: Bar, longest: float, names: Mapping[str, str], *, shares: bool) -> list[Element]:
    total = sum(row.seconds.values())
    segments: list[Element] = []
    at = 0.0
    for part, value in row.seconds.items():
        if value <= 0:
            continue
        left, width = _FULL * at / longest, _FULL * value / longest
        share = percent(value / total)
        words = f"{names.get(part, part)}: {duration(value)}" + (f" ({share})" if shares else "")
        segments.append(
            tag(
                "rect", tag("title", words), x=f"{left:.2f}%", width=f"{width:.2f}%", height="100%",
                class_=f"part-{part}", data_part=part, data_value=f"{value:.6g}",
            )
        )  # fmt: skip
        if shares and width >= _LABELLED:
            look = f"share on-{part}"
            segments.append(tag("text", share, x=f"{left + width / 2:.2f}%", y="72%", class_=look, aria_hidden="true"))
        at += value
    known = ", ".join(f"{names.get(part, part)} {duration(value)}" for part, value in row.seconds.items() if value > 0)
    drawn = _svg(segments, "bar")
    drawn.set("role", "img")
    drawn.set("aria-label", safe(f"{row.label}: {known}"))
    values = [duration(total), *([row.note] if row.note else [])]
    made = tag(
        "div",
        tag("span", row.label, class_="label", title=row.label),
        drawn,
        tag("span", " · ".join(values), class_="value"),
        class_="slow" if row.slow else None,
        data_label=row.label if not row.heading else f"{row.heading} {row.label}",
        data_rank=None if row.rank is None else str(row.rank),
    )
    return [made] if not row.heading else [tag("p", shortened(row.heading, 64), class_="name"), made]


def _svg(inside: Sequence[Element] | Element, look: str) -> Element:
    return tag("svg", inside, class_=look, aria_hidden="true" if look == "swatch" else None)
