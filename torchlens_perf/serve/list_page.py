"""The page that lists the runs, and what is shown while one takes long to read."""

from __future__ import annotations

import time
from urllib.parse import urlencode

from torchlens_perf.errors import printable
from torchlens_perf.page.document.html import LIVE_POLICY, by_address, head
from torchlens_perf.serve.run_list import Listed
from torchlens_perf.serve.run_names import address
from torchlens_perf.serve.runs import BEGINS, UNREADABLE, Found, RunLine
from torchlens_perf.serve.static_files import Addresses
from torchlens_perf.verdicts.words.run_state import RUNNING, SILENT_S, ago
from torchlens_perf.view.html import table
from torchlens_perf.view.markup import Child, Element, html, name, tag
from torchlens_perf.view.specs import Column, Quantity, Table

ROOT = "../../"  # the list, seen from a run's page
_HEADERS = ("run", "state", "program", "ranks", "started", "verdict")


def list_page(folder: str, listed: Listed, search: str, addresses: Addresses) -> str:
    """folder: as it is shown. search: what names must have; "" for all."""
    left = sum(isinstance(line, Found) for line in listed.lines)
    looked = time.strftime("%H:%M:%S", time.localtime(listed.looked_unix_s))
    count = f"{listed.total} run{'s' if listed.total != 1 else ''}"
    which = f" whose names have \u201c{printable(search)[:100]}\u201d" if search else ""
    caption = f"{count}{which} in {printable(folder)}, as of {looked}, what changed last first"
    now_s = time.time()
    rows = [_row(line, now_s) for line in listed.lines]
    body = tag(
        "body",
        tag("header", tag("h1", "Runs")),
        tag(
            "main",
            tag("p", f"This list may be old: {listed.problem}", class_="problem", role="status")
            if listed.problem
            else None,
            tag("p", f"{left} of these runs are being read.", class_="note", role="status") if left else None,
            _table(caption, rows) if rows else _nothing(folder, search),
            _pages(listed, search),
            data_reading=str(left) if left else None,
        ),
        tag("footer", _search(search)),
        [tag("script", src=each) for each in addresses.of_list],
    )
    styles = by_address(addresses.styles(""))
    whole = tag("html", head("runs \u00b7 torchlens_perf", LIVE_POLICY, styles), body, lang="en")
    return f"<!DOCTYPE html>\n{html(whole)}\n"


def waiting_page(addresses: Addresses) -> str:
    """In a run's place while it is read for the first time; asks again by itself."""
    again = tag("meta", http_equiv="refresh", content="2")
    words = "This run is being read. It is a large one, or its disk is slow; it is shown as soon as that is done."
    body = tag("body", tag("header", tag("h1", "One moment")), tag("main", tag("p", words, role="status"), all_runs()))
    title = "reading \u00b7 torchlens_perf"
    whole = tag("html", head(title, LIVE_POLICY, [again, by_address(addresses.styles(ROOT))]), body, lang="en")
    return f"<!DOCTYPE html>\n{html(whole)}\n"


def all_runs() -> Element:
    return tag("p", tag("a", "all runs", href=ROOT))


def _table(caption: str, rows: list[list[Child]]) -> Element:
    columns = [Column(head, [""] * len(rows), Quantity.TEXT) for head in _HEADERS]
    return table(Table("runs", caption, columns), {head: [row[at] for row in rows] for at, head in enumerate(_HEADERS)})


def _row(line: RunLine | Found, now_s: float) -> list[Child]:
    link = tag("a", name(line.name), href=f"runs/{address(line.name)}/")
    if isinstance(line, Found):
        return [link, "being read", "", "", "", ""]
    if line.state == UNREADABLE:
        return [link, tag("span", "cannot be read", class_="unreadable"), "", "", "", _words(line.problem)]
    if line.state == BEGINS:
        return [link, "begins", "", "", "", "no step is known yet"]
    nodes = f" on {line.nodes} nodes" if line.nodes > 1 else ""
    seen = f"only {line.seen} of " if line.seen < line.ranks else ""
    started = _time(line.started)
    return [link, _state(line, now_s), name(line.program), f"{seen}{line.ranks}{nodes}", started, _words(line.verdict)]


def _words(text: str) -> Element:
    return tag("span", text, class_="verdict-words")


def _state(line: RunLine, now_s: float) -> Child:
    silent_s = now_s - line.changed_ns / 1e9
    if line.state == RUNNING and silent_s > SILENT_S:
        return tag("span", f"silent for {ago(silent_s)}", title="no rank has ended, and its sidecars write nothing")
    if line.state == RUNNING:
        return tag("b", line.words)
    return f"{line.words} {_time(line.ended)}".rstrip()


def _time(text: str) -> str:
    return text.partition(".")[0].replace("T", " ") + (" UTC" if text else "")


def _nothing(folder: str, search: str) -> Element:
    if search:
        return tag("p", "No run has such a name.")
    return tag("p", f"There is no run in {printable(folder)} yet. One appears when its first rank begins to record.")


def _pages(listed: Listed, search: str) -> Element | None:
    if listed.pages == 1:
        return None

    def link(page: int, text: str) -> Child:
        query = urlencode({"page": page, **({"search": search} if search else {})}, errors="replace")
        return [tag("a", text, href=f"?{query}"), " "] if 0 <= page < listed.pages and page != listed.page else None

    at = f"page {listed.page + 1} of {listed.pages} "
    links = [link(0, "first"), link(listed.page - 1, "before"), at, link(listed.page + 1, "after")]
    return tag("nav", tag("p", links, link(listed.pages - 1, "last")), aria_label="Pages", class_="pages")


def _search(search: str) -> Element:
    field = tag("input", name="search", value=search or None, type="search", maxlength="100")
    return tag("form", tag("label", "names with ", field), " ", tag("button", "search", type="submit"), method="get")
