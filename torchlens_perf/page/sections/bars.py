"""Horizontal bars as static SVG, one row per bar, for pages and notebooks. Pure.

Each bar is an SVG with lengths in percent, because the page's content security policy forbids
inline styles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.view.html import build_figure, cut_middle
from torchlens_perf.view.markup import Element, tag
from torchlens_perf.view.specs import Bar, sanitize_line
from torchlens_perf.view.theme import PARTS

_LABELLED = 0.09
"""Smallest width of a segment, relative to the longest bar, that has room for a percentage."""
_NAMES = {key: part.name for key, part in PARTS.items()}


def build_bar_figure(
    key: str, title: str, rows: Sequence[Bar], caption: str, *, names: Mapping[str, str] = _NAMES
) -> Element:
    """Return a figure with bars on one scale.

    key: the id of the figure. caption: the text below the bars. names: the label of each part in
    the legend. Percentages are shown only with the default `names`, the parts of a step.
    """
    longest = max((row.total for row in rows), default=0.0) or 1.0
    seen = list(dict.fromkeys(part for row in rows for part, _, _ in row.segments(longest)))
    legend = tag(
        "ul",
        [tag("li", draw_swatch(part), names[part]) for part in seen],
        class_="legend",
        aria_label="Legend",
    )
    drawn = tag("div", [_build_bar_row(row, longest, names) for row in rows], class_="bars")
    inside = [legend if len(seen) > 1 else None, drawn]
    return build_figure(None, title, caption, *inside, id=key, class_="of-bars")


def _build_bar_row(row: Bar, longest: float, names: Mapping[str, str]) -> list[Element]:
    words = f"{row.label}: " * bool(row.label) + describe_parts(row, names)
    drawn = draw_stacked_bar(
        row, longest, names, shares=names is _NAMES, role="img", aria_label=sanitize_line(words)
    )
    made = tag(
        "div",
        tag("span", row.label, class_="label", title=row.label),
        drawn,
        tag("span", format_duration(row.total), class_="value"),
        class_="slow" if row.slow else None,
        data_label=row.label if not row.heading else f"{row.heading} {row.label}",
        data_rank=None if row.rank is None else str(row.rank),
    )
    return (
        [made] if not row.heading else [tag("p", cut_middle(row.heading, 64), class_="name"), made]
    )


def draw_stacked_bar(
    bar: Bar,
    longest: float,
    names: Mapping[str, str] = _NAMES,
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
        words = f"{names[part]}: {format_duration(bar.seconds[part])}" + (
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
            segments.append(tag("text", share, x=place, y="72%", class_=kind, aria_hidden="true"))
    return tag("svg", segments, class_=class_, **attributes)


def describe_parts(bar: Bar, names: Mapping[str, str] = _NAMES) -> str:
    """Return the parts of a bar in words: "data 1.00 ms, forward 4.00 ms"."""
    return ", ".join(
        f"{names[part]} {format_duration(seconds)}"
        for part, seconds in bar.seconds.items()
        if seconds > 0
    )


def draw_swatch(part: str) -> Element:
    """Return the colour sample of a part for a legend."""
    rect = tag("rect", width="100%", height="100%", class_=f"part-{part}")
    return tag("svg", rect, class_="swatch", aria_hidden="true")
