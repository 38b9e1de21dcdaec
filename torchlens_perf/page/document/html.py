"""A run's page as one HTML file that needs no network. Text and tables need no scripts."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import quote

from torchlens_perf.page.contents import PageContents
from torchlens_perf.page.document.scripts import build_page_script, build_page_style
from torchlens_perf.page.sections.every import SECTIONS
from torchlens_perf.page.sections.overview import build_header, build_key_figures, format_minute
from torchlens_perf.page.sections.section import ranks_by_prominence, ranks_in_verdicts
from torchlens_perf.view.headline import choose_headline
from torchlens_perf.view.markup import Child, Element, raw_element, tag, to_html
from torchlens_perf.view.theme import FASTER, SLOWER

_MAX_LINES = 16
_KEYS = {
    "Ranks by step": {
        "← →": "choose a step",
        "↑ ↓": "choose a rank",
        "Shift ← →": "select steps",
        "Home End": "first or last step",
        "Enter": "open the step",
        "+ - 0": "zoom in, zoom out, all steps",
        "Esc": "select nothing",
    },
    "One step": {
        "← →": "go through the collectives",
        "W S": "zoom in or out",
        "A D": "move",
        "0": "whole step",
        "PgUp PgDn": "recorded step before or after",
        "Esc": "select no collective",
    },
    "Page": {"?": "this list", "Esc": "close it"},
}
"""The page's keys and what they do, by the chart that has the focus."""


def _content_security_policy(style: str, script: str, form: str, *more: str) -> str:
    """Return a content security policy with the allowed sources of styles, scripts and forms."""
    own = (f"style-src {style}", f"script-src {script}", f"form-action {form}")
    return "; ".join(["default-src 'none'", "img-src data:", "base-uri 'none'", *own, *more])


LIVE_POLICY = _content_security_policy("'self'", "'self'", "'self'", "connect-src 'self'")
"""Content security policy of pages that a server sends: they may fetch from that server only."""
_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path d="M2 4h7M2 8h12M2 12h7"'
    f' stroke-width="3" stroke="{FASTER.light}"/><path d="M9 8h5" stroke-width="3"'
    f' stroke="{SLOWER.light}"/></svg>'
)


class PageParts(NamedTuple):
    """Styles and scripts of a page, and what a server adds to it."""

    policy: str
    """The content security policy."""
    styles: Child
    scripts: Child
    elements: Sequence[Child] = ()
    """Elements to show above the verdicts."""
    version: str | None = None
    """The version of the run data. The server reports another version when it has newer data."""


def build_document(contents: PageContents, parts: PageParts | None = None) -> str:
    """Return the page as HTML. parts: None for a file, which has its styles and scripts inside."""
    parts = parts or _inline_parts()
    report = contents["report"]
    run, status = report["run"], choose_headline(contents["headlines"])
    sections = [(key, label, section(contents)) for key, label, section in SECTIONS]
    links = [
        tag("li", tag("a", label, href=f"#{key}"))
        for key, label, made in sections
        if made is not None
    ]
    body = tag(
        "body",
        tag("a", "Skip to the verdict", class_="skip", href="#verdicts"),
        build_header(report, status),
        tag("nav", tag("ul", links), aria_label="Sections"),
        tag(
            "main",
            parts.elements,
            # The verdict is the first section, above the key figures.
            sections[0][-1],
            build_key_figures(report, status),
            [made for _, _, made in sections[1:]],
        ),
        tag(
            "footer",
            tag(
                "p",
                f"Written {format_minute(contents['written'])} by torchlens_perf {contents['version']}.",
            ),
        ),
        _build_keys(),
        raw_element(
            "script",
            # JSON text must not end a script element.
            contents_as_json(contents)
            .replace("<", "\\u003c")
            .replace(">", "\\u003e")
            .replace("&", "\\u0026"),
            type="application/json",
            id="contents",
        ),
        parts.scripts,
    )
    state = None if parts.version is None else "running" if run["live"] else "ended"
    title = f"{run['program'] or 'run'} · {run['id']}"
    return build_html(
        title, parts.policy, parts.styles, body, data_live=state, data_version=parts.version
    )


def _build_keys() -> Element:
    """Return a dialog with the page's keys, which scripts open."""
    tables = [
        tag(
            "table",
            tag("caption", chart),
            [
                tag(
                    "tr",
                    tag(
                        "th",
                        [[tag("kbd", key), " "] for key in keys.split()],
                        scope="row",
                        class_="text",
                    ),
                    tag("td", words, class_="text"),
                )
                for keys, words in rows.items()
            ],
        )
        for chart, rows in _KEYS.items()
    ]
    return tag(
        "dialog",
        tag("h2", "Keys", id="keys-title"),
        tables,
        tag("p", tag("button", "Close", type="button")),
        id="keys",
        aria_labelledby="keys-title",
    )


def build_static_document(title: str, body: Element) -> str:
    """Return a page without scripts."""
    style = build_page_style()
    rules = _content_security_policy(_csp_hash(style), "'none'", "'none'")
    return build_html(title, rules, raw_element("style", style), body)


def build_html(
    title: str, rules: str, styles: Child, body: Element, **attributes: str | None
) -> str:
    """Return a page as HTML. rules: the page's content security policy."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=rules),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"{title} · torchlens_perf"),
        tag("link", rel="icon", href=f"data:image/svg+xml,{quote(_ICON)}"),
        styles,
    )
    return f"<!DOCTYPE html>\n{to_html(tag('html', head, body, lang='en', **attributes))}\n"


def _inline_parts() -> PageParts:
    style, script = build_page_style(), build_page_script()
    rules = _content_security_policy(_csp_hash(style), _csp_hash(script), "'none'")
    return PageParts(rules, raw_element("style", style), raw_element("script", script))


def build_style_links(styles: Sequence[str]) -> list[Element]:
    """Return the links to these style sheets."""
    return [tag("link", rel="stylesheet", href=each) for each in styles]


def contents_as_json(contents: PageContents) -> str:
    """Return the data that the page's scripts need as JSON in ASCII.

    `named_ranks` are the ranks in verdicts. `prominent_ranks` are the ranks with lines in charts.
    """
    data = {
        key: value
        for key, value in contents.items()
        if key not in ("headlines", "tables", "thinned_report")
    }
    data["report"] = contents["thinned_report"]
    data["named_ranks"] = ranks_in_verdicts(contents["report"])
    data["prominent_ranks"] = [
        rank["rank"] for rank in ranks_by_prominence(contents["report"])[:_MAX_LINES]
    ]
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
