"""The page that lists the runs."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from urllib.parse import quote

from torchlens_perf.page.document.html import STYLES, policy
from torchlens_perf.page.document.scripts import static
from torchlens_perf.page.pictures.markup import html, name, raw, tag
from torchlens_perf.page.sections.section import table
from torchlens_perf.serve.runs import RunLine


def list_page(folder: str, lines: Sequence[RunLine], page: int, pages: int, total: int) -> str:
    """lines: of this page. page: from 0."""
    style = "\n".join(map(static, STYLES))
    rows = [
        [
            tag("a", name(line.name), href=f"runs/{quote(line.name, safe='')}/"),
            _time(line.changed_s),
            "running" if line.is_live else "",
            str(line.nodes),
            line.said or "no report yet",
        ]
        for line in lines
    ]
    found = table(f"{total} runs in {folder}", ["run", "changed", "", "nodes", "report"], rows, texts=(0, 1, 2, 4))
    links = [
        tag("a", "newer", href=f"?page={page - 1}") if page > 0 else None,
        f" page {page + 1} of {pages} ",
        tag("a", "older", href=f"?page={page + 1}") if page + 1 < pages else None,
    ]
    nothing = tag("p", f"There is no run in {folder} yet. A run's folder comes when its first rank begins to record.")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy([style], [])),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", "runs · torchlens_perf"),
        raw("style", style),
    )
    body = tag("body", tag("header", tag("h1", "Runs")), tag("main", found if total else nothing, tag("p", links)))
    return f"<!DOCTYPE html>\n{html(tag('html', head, body, lang='en'))}\n"


def _time(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s).isoformat(sep=" ", timespec="seconds")
