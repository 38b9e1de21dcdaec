"""The page that lists the runs, and pages with a single message."""

from __future__ import annotations

import time
from urllib.parse import urlencode

from torchlens_perf.analysis.statistics.quantities import (
    format_count,
    format_duration,
    format_percent,
)
from torchlens_perf.errors import printable
from torchlens_perf.page.document.html import LIVE_POLICY, build_html, build_style_links
from torchlens_perf.serve.run_list import LARGEST_FIRST, SORTS, RunLine, RunListPage
from torchlens_perf.serve.run_names import quote_name
from torchlens_perf.serve.static_files import LIST_SCRIPT, STYLE, static_address
from torchlens_perf.verdicts.words.run_state import SILENT_S, format_age
from torchlens_perf.view.markup import Child, Element, tag

ROOT = "../../"
"""The list's address relative to a run's page."""
_COLUMNS = (
    ("status", "Status"), ("program", "Program"), ("cost", "Cost"), ("verdict", "Verdict"), ("step", "Step p50"),
    ("ranks", "Ranks"), ("hosts", "Hosts"), ("steps", "Steps"), ("state", "State"), ("started", "Started (UTC)"),
)  # fmt: skip
"""CSS class and heading of each column. The class is also the key in SORTS."""


def build_list_page(folder: str, listed: RunListPage, search: str, sort: str) -> str:
    """Return the list as HTML. search, sort: the arguments of RunList.load_page()."""
    now_s = time.time()
    looked = time.strftime("%H:%M:%S", time.localtime(listed.looked_unix_s))
    total = format_count(listed.total, "run")
    which = f"{listed.matching} of {total} match" if search else total
    newest: Child = (
        [" \u00b7 ", tag("a", "sort by last change", href=_query_string(search, ""))]
        if sort
        else None
    )
    rows = [
        tag("tr", _build_compare_cell(line), _build_cells(line, now_s)) for line in listed.lines
    ]
    ticks = tag("th", class_="run-tick", scope="col", aria_label="Compare")
    head_row = tag(
        "tr", ticks, [_build_heading(key, title, search, sort) for key, title in _COLUMNS]
    )
    runs = tag(
        "table",
        tag("caption", f"{which}, updated {looked}", newest),
        tag("thead", head_row),
        tag("tbody", rows),
        class_="runs",
    )
    empty = f"No run matches \u201c{search[:100]}\u201d."
    if not search:
        empty = (
            f"There is no run in {printable(folder)} yet. A run appears when its first rank starts"
            " recording."
        )
    body = tag(
        "body",
        tag(
            "header",
            tag("h1", "Runs ", tag("small", printable(folder))),
            _build_filter_form(search, sort),
            tag("p", id="compared", role="status"),
        ),
        tag(
            "main",
            (
                tag("p", f"This list may be old: {listed.problem}", class_="problem", role="status")
                if listed.problem
                else None
            ),
            (
                tag(
                    "p",
                    f"Still reading {format_count(listed.unread, 'run')}.",
                    class_="note",
                    role="status",
                )
                if listed.unread
                else None
            ),
            (
                tag("div", runs, class_="scrolls", tabindex="0", role="region", aria_label="Runs")
                if rows
                else tag("p", empty)
            ),
            _build_page_links(listed, search, sort),
            data_reading=str(listed.unread) if listed.unread else None,
        ),
        tag("script", src=static_address(LIST_SCRIPT, "")),
        class_="list",
    )
    return build_page("Runs", body, "")


def build_message_page(title: str, words: str, root: str, *, reloads: bool = False) -> str:
    """Return a page with a message and a link to the list.

    root: the list's address relative to this page.
    """
    link = tag("p", tag("a", "All runs", href=root or "./"))
    body = tag(
        "body", tag("header", tag("h1", title)), tag("main", tag("p", words, role="status"), link)
    )
    again = tag("meta", http_equiv="refresh", content="2") if reloads else None
    return build_page(title, body, root, again)


def build_page(title: str, body: Element, root: str, more: Child = None) -> str:
    """Return a page as HTML. more: additional elements of its head."""
    styles = [more, build_style_links([static_address(STYLE, root)])]
    return build_html(title, LIVE_POLICY, styles, body)


def _build_compare_cell(line: RunLine) -> Element:
    """Return a cell with a checkbox that selects the run for a comparison of step times."""
    box = tag(
        "input",
        type="checkbox",
        value=line.name,
        aria_label=f"Compare {line.program} {line.name}",
    )
    return tag("td", box, class_="run-tick")


def _build_cells(line: RunLine, now_s: float) -> list[Element]:
    """Return the cells of a row, one for each of _COLUMNS."""
    run = tag("small", line.name) if line.program else line.name
    ranks = (
        f"{line.seen} of {line.ranks}"
        if line.ranks and line.seen < line.ranks
        else _number_text(line.ranks)
    )
    also = f" Also: {line.also}" if line.also else ""
    head, tooltip = line.headline, line.headline.sentence + also
    texts: list[Child] = [
        tag("span", head.status, class_=f"chip {head.severity}"),
        tag(
            "a",
            f"{line.program} ".lstrip(),
            run,
            href=f"runs/{quote_name(line.name)}/",
            title=line.name,
        ),
        tag("span", format_percent(head.cost_share), title=head.cost) if head.cost_share else None,
        tag("span", head.sentence, tag("small", also) if also else "", title=tooltip),
        format_duration(line.step_s) if line.step_s else None,
        ranks,
        _number_text(line.hosts),
        _number_text(line.steps),
        _build_state_cell(line, now_s),
        line.started.replace("T", " ")[:16],
    ]
    return [
        tag("td", text, class_=f"run-{key}") for (key, _), text in zip(_COLUMNS, texts, strict=True)
    ]


def _number_text(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _build_state_cell(line: RunLine, now_s: float) -> Child:
    silent_s = now_s - line.changed_ns / 1e9
    if line.is_live and silent_s > SILENT_S:
        return tag(
            "span",
            f"silent for {format_age(silent_s)}",
            title="No rank has ended, but no sidecar is writing the run's state.",
        )
    return tag("b", line.state, class_="live") if line.is_live else line.state


def _build_heading(key: str, title: str, search: str, sort: str) -> Element:
    if key not in SORTS:
        return tag("th", title, class_=f"run-{key}", scope="col")
    address_ = _query_string(search, f"-{key}" if sort == key else key)
    order = None
    if sort.removeprefix("-") == key:
        order = "descending" if (key in LARGEST_FIRST) != sort.startswith("-") else "ascending"
    return tag(
        "th", tag("a", title, href=address_), class_=f"run-{key}", scope="col", aria_sort=order
    )


def _query_string(search: str, sort: str, page: int = 0) -> str:
    fields = {"search": search, "sort": sort, "page": page or ""}
    return "?" + urlencode({key: value for key, value in fields.items() if value}, errors="replace")


def _build_page_links(listed: RunListPage, search: str, sort: str) -> Element | None:
    if listed.pages == 1:
        return None

    def build_link(page: int, text: str) -> Child:
        if not 0 <= page < listed.pages or page == listed.page:
            return None
        return [tag("a", text, href=_query_string(search, sort, page)), " "]

    at = f"page {listed.page + 1} of {listed.pages} "
    links = [
        build_link(0, "First"),
        build_link(listed.page - 1, "Previous"),
        at,
        build_link(listed.page + 1, "Next"),
    ]
    return tag(
        "nav",
        tag("p", links, build_link(listed.pages - 1, "Last")),
        aria_label="Pages",
        class_="pages",
    )


def _build_filter_form(search: str, sort: str) -> Element:
    field = tag("input", name="search", value=search or None, type="search", maxlength="100")
    kept = tag("input", name="sort", value=sort, type="hidden") if sort else None
    words = "Filter by program, run, status or state"
    return tag(
        "form", tag("label", "Filter runs ", field, title=words), kept, method="get", role="search"
    )
