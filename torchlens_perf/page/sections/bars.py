"""Horizontal bars as static SVG, one row per bar, for pages and notebooks. Pure.

Each bar is an SVG with lengths in percent, because the page's content security policy forbids
inline styles.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.view.html import build_figure
from torchlens_perf.view.markup import Element, tag
from torchlens_perf.view.specs import Bar, sanitize_line
from torchlens_perf.view.theme import PARTS

_LABELLED = 0.09
"""Smallest width of a segment, relative to the longest bar, that has room for a percentage."""


def build_bar_figure(key: str, title: str, rows: Sequence[Bar], caption: str) -> Element:
    """Return a figure with bars on one scale.

    key: the id of the figure. caption: the text below the bars.
    """
    longest = max((row.total for row in rows), default=0.0) or 1.0
    seen = list(dict.fromkeys(part for row in rows for part, _, _ in row.segments(longest)))
    legend = tag(
        "ul",
        [tag("li", draw_swatch(part), f"{PARTS[part].glyph} {PARTS[part].name}") for part in seen],
        class_="legend",
        aria_label="Legend",
    )
    drawn = tag("div", [_build_bar_row(row, longest) for row in rows], class_="bars")
    inside = [legend if len(seen) > 1 else None, drawn]
    return build_figure(None, title, caption, *inside, id=key, class_="of-bars")


def _build_bar_row(row: Bar, longest: float) -> Element:
    words = f"{row.label}: " * bool(row.label) + describe_parts(row)
    drawn = draw_stacked_bar(row, longest, role="img", aria_label=sanitize_line(words))
    return tag(
        "div",
        tag("span", row.label, class_="label", title=row.label),
        drawn,
        tag("span", format_duration(row.total), class_="value"),
        class_="slow" if row.slow else None,
        data_label=row.label,
        data_rank=None if row.rank is None else str(row.rank),
    )


def draw_stacked_bar(
    bar: Bar,
    longest: float,
    *,
    shares: bool = True,
    class_: str = "bar",
    **attributes: str,
) -> Element:
    """Return one stacked bar as SVG with these attributes.

    longest: the length of a bar that fills the width, in seconds.
    """
    segments = []
    for part, begin, width in bar.segments(longest):
        share = format_percent(bar.seconds[part] / bar.total)
        words = f"{PARTS[part].name}: {format_duration(bar.seconds[part])}" + (
            f" ({share})" if shares else ""
        )
        segments.append(
            tag(
                "rect", tag("title", words), x=f"{begin:.2%}", width=f"{width:.2%}", height="100%",
                class_=f"part-{part}", data_part=part, data_value=f"{bar.seconds[part]:.6g}",
            )
        )  # fmt: skip
        if shares and width >= _LABELLED:
            place, kind = f"{begin + width / 2:.2%}", f"share on-{part}"
            segments.append(
                tag(
                    "text",
                    f"{PARTS[part].glyph} {share}",
                    x=place,
                    y="72%",
                    class_=kind,
                    aria_hidden="true",
                )
            )
    return tag("svg", segments, class_=class_, **attributes)


def describe_parts(bar: Bar) -> str:
    """Return the parts of a bar in words: "data 1.00 ms, forward 4.00 ms"."""
    return ", ".join(
        f"{PARTS[part].name} {format_duration(seconds)}"
        for part, seconds in bar.seconds.items()
        if seconds > 0
    )


def draw_swatch(part: str) -> Element:
    """Return the colour sample of a part for a legend."""
    rect = tag("rect", width="100%", height="100%", class_=f"part-{part}")
    return tag("svg", rect, class_="swatch", aria_hidden="true")
