"""Headlines, tables, sections and figures as HTML that works without scripts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchlens_perf.analysis.statistics.quantities import (
    format_count,
    format_duration,
    format_percent,
)
from torchlens_perf.view.headline import Headline, fact_text
from torchlens_perf.view.markup import Child, Element, tag
from torchlens_perf.view.specs import Column, Table, sanitize_line

_LONGEST_CELL = 48
_MAX_ROWS = 512


def build_status_chip(headline: Headline) -> Element:
    """Return the status word in the colour of its severity."""
    return tag("b", headline.status, class_=f"chip {headline.severity}")


def build_verdict_card(headline: Headline, key: str, *more: Child) -> Element:
    """Return a full verdict: the cost as a number, facts as chips, the sentence, and the action.

    key: the id of the element. more: elements to append.
    """
    cost, share = headline.paid_once_s or headline.cost_s_per_step, headline.cost_share
    number = None
    if cost and share is not None:
        first, second = tag("b", format_duration(cost)), tag("b", format_percent(share))
        whole = f" of {headline.whole}"
        number = tag("p", first, f" {headline.cost_unit} ", second, whole, class_="cost")
    return tag(
        "article",
        number,
        tag(
            "div",
            tag(
                "ul",
                tag("li", build_status_chip(headline)),
                [tag("li", fact_text(name, ""), tag("b", text)) for name, text in headline.facts],
                class_="facts",
            ),
            _build_advice(headline),
            *more,
        ),
        class_=f"verdict {headline.severity}",
        id=key,
        data_kind=headline.kind,
    )


def build_verdict_line(headline: Headline, key: str, *more: Child) -> Element:
    """Return a verdict as one line with status, facts and cost.

    It expands to the content of build_verdict_card().
    """
    facts = ", ".join(fact_text(*fact) for fact in headline.facts)
    summary = tag(
        "summary",
        build_status_chip(headline),
        " ",
        tag("span", facts or headline.sentence),
        " ",
        tag("b", headline.cost),
    )
    return tag(
        "details",
        summary,
        # Without facts, the line has the sentence.
        _build_advice(headline)[not facts :],
        *more,
        class_=f"verdict {headline.severity}",
        id=key,
        data_kind=headline.kind,
    )


def _build_advice(headline: Headline) -> list[Element | None]:
    return [
        tag("p", headline.sentence, class_="finding"),
        tag("p", tag("b", "Where:"), [[tag("br"), each] for each in headline.places])
        if headline.places
        else None,
        tag("p", tag("b", "Lost:"), f" {headline.loss}") if headline.loss else None,
        tag("p", tag("b", "Cause:"), f" {headline.cause}") if headline.cause else None,
        tag("p", tag("b", "Next:"), f" {headline.action}", class_="action")
        if headline.action
        else None,
        tag("p", tag("code", headline.command), class_="command") if headline.command else None,
    ]


def build_table(spec: Table, cells: Mapping[str, Sequence[Child]] | None = None) -> Element:
    """Return a table that scrolls horizontally. A checkbox shows the hidden rows.

    cells: elements that replace the text of cells, by column title.
    """
    of, spec = spec.rows, spec.first_rows(_MAX_ROWS)
    texts: list[Sequence[Child]] = [
        (cells or {}).get(column.title)
        or [text if column.wraps else cut_middle(text, _LONGEST_CELL) for text in column.texts()]
        for column in spec.columns
    ]
    first = spec.rows if spec.first is None or spec.first >= spec.rows else spec.first
    body = [
        tag(
            "tr",
            [
                tag(
                    "td" if at else "th",
                    text[row],
                    scope=None if at else "row",
                    class_=_cell_class(column),
                )
                for at, (column, text) in enumerate(zip(spec.columns, texts, strict=True))
            ],
            class_=" ".join(filter(None, ("slow" * (row in spec.slow), "rest" * (row >= first))))
            or None,
        )
        for row in range(spec.rows)
    ]
    head = tag("tr", [_build_heading(column) for column in spec.columns])
    shown = tag("table", tag("caption", spec.title), tag("thead", head), tag("tbody", body))
    checkbox, label = None, None
    if first < spec.rows:
        key = f"{spec.key}-all"
        checkbox = tag("input", type="checkbox", id=key, class_="all")
        more = (
            f"all {format_count(of, spec.noun)}"
            if of == spec.rows
            else f"{spec.rows} of {format_count(of, spec.noun)}"
        )
        words = [
            tag("span", f"Show {more}", class_="more"),
            tag("span", f"Show {first}", class_="less"),
        ]
        label = tag("label", *words, for_=key, class_="button")
    return tag(
        "div",
        checkbox,
        tag("div", shown, class_="scrolls", tabindex="0", role="region", aria_label=spec.title),
        tag("p", label, class_="tools"),
        tag("p", spec.note, class_="note") if spec.note else None,
        class_="table",
        data_key=spec.key,
        data_first=first,
    )


def _build_heading(column: Column) -> Element:
    title: Child = tag("abbr", column.title, title=column.help) if column.help else column.title
    unit: Child = [" ", tag("small", column.unit)] if column.unit else None
    return tag("th", title, unit, scope="col", class_=_cell_class(column))


def _cell_class(column: Column) -> str | None:
    return "text wraps" if column.wraps else "text" if column.is_text else None


def cut_middle(text: str, longest: int) -> Child:
    """Return text whose middle is cut out if it is long. A tooltip shows the full text."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return tag("span", f"{text[:half]}…{text[-half:]}", title=sanitize_line(text))


def build_section(key: str, title: str, *children: Child) -> Element:
    """Return a section element. Its heading is a link to the section. key: the id."""
    heading = tag(
        "h2",
        title,
        " ",
        tag("a", "#", class_="here", href=f"#{key}", aria_label=f"link to {title}"),
    )
    heading.set("id", f"{key}-title")
    return tag("section", heading, *children, id=key, aria_labelledby=f"{key}-title")


def build_figure(
    chart: str | None, title: str, caption: Child, *inside: Child, **data: str
) -> Element:
    """Return a figure with its title and a caption.

    chart: the kind of chart that scripts draw in the figure; None for static charts.
    """
    note = (
        tag("p", "This chart needs JavaScript.", class_="note unscripted")
        if chart is not None
        else None
    )
    return tag(
        "figure",
        tag("h3", title),
        note,
        *inside,
        tag("figcaption", caption),
        data_chart=chart,
        **data,
    )


def build_details(summary: Child, *children: Child) -> Element:
    """Return a collapsed element that shows its children after a click on `summary`."""
    return tag("details", tag("summary", summary), *children)
