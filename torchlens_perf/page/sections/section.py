"""What all sections are made of: a heading with an anchor, tables with captions, figures with their words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torchlens_perf.analysis.statistics.quantities import amount
from torchlens_perf.page.pictures.markup import Child, Element, tag

_T = TypeVar("_T")


def or_dash(value: _T | None, show: Callable[[_T], str]) -> str:
    """Return a cell: a dash for a missing value."""
    return "-" if value is None else show(value)


def in_bytes(count: float) -> str:
    """Return a cell such as "1.5 GB"."""
    return amount(count, "B")


def section(key: str, title: str, *children: Child) -> Element:
    """A landmark with a fragment link. key: its id."""
    heading = tag("h2", title, " ", tag("a", "#", class_="here", href=f"#{key}", aria_label=f"link to {title}"))
    heading.set("id", f"{key}-title")
    return tag("section", heading, *children, id=key, aria_labelledby=f"{key}-title")


def figure(chart: str | None, picture: Element, caption: Child) -> Element:
    """A picture that scripts may replace by a chart. caption: what it shows, and what is to be seen in it."""
    return tag("figure", picture, tag("figcaption", caption), data_chart=chart, tabindex="0")


def of_picture(*words: Child) -> Element:
    """What is said of the picture alone, and not of the chart that scripts put into its place."""
    return tag("div", *words, class_="of-picture")


def table(
    caption: Child,
    headers: Sequence[Child],
    rows: Iterable[Sequence[Child]],
    *,
    texts: Iterable[int] = (0,),
    marked: Iterable[int] = (),
) -> Element:
    """A table that scrolls by itself. texts: the columns that are not numbers. marked: rows that stand out."""
    left, strong = set(texts), set(marked)
    head = tag(
        "tr", [tag("th", each, scope="col", class_="text" if at in left else None) for at, each in enumerate(headers)]
    )
    body = [
        tag(
            "tr",
            [
                tag("th", cell, scope="row", class_="text" if 0 in left else None)
                if at == 0
                else tag("td", cell, class_="text" if at in left else None)
                for at, cell in enumerate(row)
            ],
            class_="marked" if index in strong else None,
        )
        for index, row in enumerate(rows)
    ]
    made = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", body))
    label = caption if isinstance(caption, str) else "table"
    return tag("div", made, class_="scrolls", tabindex="0", role="region", aria_label=label)


def details(summary: Child, *children: Child) -> Element:
    return tag("details", tag("summary", summary), *children)
