"""What all sections are made of: a heading with an anchor, tables with captions, figures with their words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchlens_perf.page.markup import Child, Element, tag


def section(key: str, title: str, *children: Child) -> Element:
    """A landmark with a fragment link. key: its id."""
    heading = tag("h2", title, " ", tag("a", "#", class_="here", href=f"#{key}", aria_label=f"link to {title}"))
    heading.set("id", f"{key}-title")
    return tag("section", heading, *children, id=key, aria_labelledby=f"{key}-title")


def figure(chart: str | None, title: str, caption: Child, **data: str) -> Element:
    """A figure with its title and one sentence. chart: what scripts draw between the two; None for other figures."""
    note = tag("p", "This chart needs JavaScript.", class_="note unscripted") if chart is not None else None
    return tag("figure", tag("h3", title), note, tag("figcaption", caption), data_chart=chart, **data)


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
