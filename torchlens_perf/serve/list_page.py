"""The page that lists the runs, and pages with a single message."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
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
from torchlens_perf.view.headline import Headline
from torchlens_perf.view.html import build_table
from torchlens_perf.view.markup import Child, Element, tag
from torchlens_perf.view.specs import Table

ROOT = "../../"
"""The list's address relative to a run's page."""
_COLUMNS = (
    ("program", "Run"), ("status", "Status"), ("rank", "Rank"), ("cost", "Cost"), ("since", "Since"),
    ("step", "Step p50"), ("steps", "Steps"), ("ranks", "Ranks"), ("state", "State"), ("started", "Started"),
    ("verdict", "Finding"),
)  # fmt: skip
"""CSS class and heading of each column. The class is also the key in SORTS."""


def build_list_page(
    folder: str, listed: RunListPage, search: str, sort: str, pinned: Sequence[str]
) -> str:
    """Return the list as HTML. search, sort, pinned: the arguments of RunList.load_page()."""
    body = tag(
        "body",
        tag(
            "header",
            tag("h1", "Runs ", tag("small", printable(folder))),
            tag("a", "Nodes", href="offenders"),
            _build_filter_form(search, sort),
            tag(
                "form",
                tag("button", "Compare the two ticked runs", type="submit"),
                id="compare",
                action="compare",
                method="get",
            ),
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
            _build_table(listed, search, sort, pinned)
            if listed.lines
            else _build_empty(folder, search),
            _build_page_links(listed, search, sort),
            data_reading=str(listed.unread) if listed.unread else None,
        ),
        tag("script", src=static_address(LIST_SCRIPT, "")),
        class_="list",
    )
    return build_page("Runs", body, "")


def build_message_page(title: str, words: str, root: str, *, renews: bool = False) -> str:
    """Return a page with a message and a link to the list.

    root: the list's address relative to this page. renews: True for a page that asks again.
    """
    link = tag("p", tag("a", "All runs", href=root or "./"))
    again = " This page renews itself." if renews else ""
    body = tag(
        "body",
        tag("header", tag("h1", title)),
        tag(
            "main",
            tag("p", f"{words}{again}", role="status"),
            link,
            data_reading="" if renews else None,
        ),
        tag("script", src=static_address(LIST_SCRIPT, root)) if renews else None,
    )
    return build_page(title, body, root)


def build_tables_page(title: str, tables: Iterable[Table]) -> str:
    """Return a page of tables, such as that on repeat offenders, as HTML."""
    return build_page(
        title,
        tag(
            "body",
            tag("header", tag("h1", title), tag("a", "All runs", href="./")),
            tag("main", map(build_table, tables)),
        ),
        "",
    )


def build_page(title: str, body: Element, root: str) -> str:
    """Return a page as HTML."""
    return build_html(title, LIVE_POLICY, build_style_links([static_address(STYLE, root)]), body)


def _build_empty(folder: str, search: str) -> Element:
    missing = f"There is no run in {printable(folder)} yet. A run appears when its first rank starts recording."
    return tag("p", f"No run matches \u201c{search[:100]}\u201d." if search else missing)


def _build_table(listed: RunListPage, search: str, sort: str, pinned: Sequence[str]) -> Element:
    """Return the table. Pinned runs come first; without a sort order, runs are grouped by program."""
    now_s = time.time()
    looked = time.strftime("%H:%M:%S", time.localtime(listed.looked_unix_s))
    total = format_count(listed.total, "run")
    which = f"{listed.matching} of {total} match" if search else total
    usual: Child = (
        [" \u00b7 ", tag("a", "group by program", href=_query_string(search, ""))] if sort else None
    )
    groups: dict[str, list[RunLine]] = {}
    for line in listed.lines:
        program = "All programs" if sort else line.program or "Program not known yet"
        groups.setdefault("Pinned" if line.name in pinned else program, []).append(line)
    head_row = tag(
        "tr",
        tag("th", class_="run-tick", scope="col", aria_label="Compare or pin"),
        [_build_heading(key, title, search, sort) for key, title in _COLUMNS],
    )
    runs = tag(
        "table",
        tag("caption", f"{which}, updated {looked}", usual),
        tag("thead", head_row),
        [
            tag(
                "tbody",
                _build_group_row(title, lines),
                [
                    tag("tr", _build_tick_cell(line), _build_cells(line, title, now_s))
                    for line in lines
                ],
            )
            for title, lines in groups.items()
        ],
        class_="runs",
    )
    return tag("div", runs, class_="scrolls", tabindex="0", role="region", aria_label="Runs")


def _build_group_row(title: str, lines: Sequence[RunLine]) -> Element:
    parts = tag("span", title, title=title), " ", tag("small", format_count(len(lines), "run"))
    return tag("tr", tag("th", parts, scope="rowgroup", colspan=len(_COLUMNS) + 1), class_="group")


def _build_tick_cell(line: RunLine) -> Element:
    """Return a cell with a checkbox that selects the run for a comparison."""
    box = tag(
        "input",
        type="checkbox",
        name="run",
        value=quote_name(line.name),
        form="compare",
        aria_label=f"Compare {line.name}",
    )
    return tag("td", box, class_="run-tick")


def _build_cells(line: RunLine, group: str, now_s: float) -> list[Element]:
    """Return the cells of a row, one for each of _COLUMNS. Some have a line for each problem."""
    seen = f"{line.seen:,} of " if line.ranks and line.seen < line.ranks else ""
    words = f"{line.started.replace('T', ' ')[:16]} UTC"

    def stack(text: Callable[[Headline], str]) -> list[Element]:
        return [tag("div", text(each), title=text(each) or None) for each in line.headlines]

    texts: list[Child] = [
        [
            tag("a", line.name, href=f"runs/{quote_name(line.name)}/", title=line.name),
            tag("small", line.program) if group != line.program else None,
        ],
        [
            tag("div", tag("span", each.status, class_=f"chip {each.severity}"))
            for each in line.headlines
        ],
        stack(lambda each: each.ranks),
        [
            tag("div", format_percent(each.cost_share) if each.cost_share else "", title=each.cost)
            for each in line.headlines
        ],
        stack(lambda each: each.since),
        format_duration(line.step_s) if line.step_s else None,
        f"{line.steps:,}" if line.steps is not None else None,
        f"{seen}{line.ranks:,}" if line.ranks is not None else None,
        _build_state_cell(line, now_s),
        # A script shows it in the viewer's time zone.
        tag("time", words, datetime=line.started, title=words) if line.started else None,
        stack(lambda each: each.sentence),
    ]
    return [
        tag("td", text, class_=f"run-{key}") for (key, _), text in zip(_COLUMNS, texts, strict=True)
    ]


def _build_state_cell(line: RunLine, now_s: float) -> Child:
    silent_s = now_s - line.changed_ns / 1e9
    if line.is_live and silent_s > SILENT_S:
        return tag(
            "span",
            f"silent for {format_age(silent_s)}",
            title="No rank has ended, but no sidecar is writing the run's state.",
        )
    kind = {"live": "live", "ended": None}.get(line.state, "problem")
    return tag("span", line.state, class_=kind, title=line.state)


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
    links: list[Child] = [
        [tag("a", text, href=_query_string(search, sort, page)), " "]
        for page, text in ((listed.page - 1, "Previous"), (listed.page + 1, "Next"))
        if 0 <= page < listed.pages
    ]
    at = f"page {listed.page + 1} of {listed.pages} "
    return tag("nav", tag("p", at, links), aria_label="Pages", class_="pages")


def _build_filter_form(search: str, sort: str) -> Element:
    field = tag("input", name="search", value=search or None, type="search", maxlength="100")
    kept = tag("input", name="sort", value=sort, type="hidden") if sort else None
    words = "Search for a program, run, status or state"
    return tag(
        "form", tag("label", "Search ", field, title=words), kept, method="get", role="search"
    )
