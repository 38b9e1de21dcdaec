"""A run's page as one HTML file. It needs no network, and its text and tables need no scripts."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from torchlens_perf.page.document.scripts import page_script, page_style
from torchlens_perf.page.sections.every import SECTIONS
from torchlens_perf.page.sections.overview import header, key_figures, minute
from torchlens_perf.page.sections.section import by_prominence, named_ranks
from torchlens_perf.view.headline import overall
from torchlens_perf.view.markup import Element, html, raw, tag
from torchlens_perf.view.theme import FASTER, SLOWER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchlens_perf.page.contents import Contents
    from torchlens_perf.view.markup import Child

_MAX_LINES = 16


def _policy(style: str, script: str, form: str, *more: str) -> str:
    """Return a content security policy. style, script, form: the allowed sources of each kind."""
    own = (f"style-src {style}", f"script-src {script}", f"form-action {form}")
    return "; ".join(["default-src 'none'", "img-src data:", "base-uri 'none'", *own, *more])


LIVE_POLICY = _policy("'self'", "'self'", "'self'", "connect-src 'self'")
"""Content security policy of pages that a server sends: they may fetch from that server only."""
_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path d="M2 4h7M2 8h12M2 12h7"'
    f' stroke-width="3" stroke="{FASTER.light}"/><path d="M9 8h5" stroke-width="3"'
    f' stroke="{SLOWER.light}"/></svg>'
)


class LivePart(NamedTuple):
    """Additions of a server to the page, and the addresses of styles and scripts that a file has
    inline.
    """

    version: str
    """The version of the run data. The server reports another version when it has newer data."""
    elements: Sequence[Child]
    """Elements to show above the verdicts."""
    styles: Sequence[str]
    scripts: Sequence[str]


def document(contents: Contents, live: LivePart | None = None) -> str:
    """Return the page. live: additions of a server; None for a file."""
    report = contents["report"]
    run, status = report["run"], overall(contents["headlines"])
    sections = [(key, label, section(contents)) for key, label, section in SECTIONS]
    links = [
        tag("li", tag("a", label, href=f"#{key}"))
        for key, label, made in sections
        if made is not None
    ]
    rules, styles, scripts = _inline_parts() if live is None else _linked_parts(live)
    body = tag(
        "body",
        tag("a", "Skip to the verdict", class_="skip", href="#verdicts"),
        header(report, status),
        tag("nav", tag("ul", links), aria_label="Sections"),
        tag(
            "main",
            live.elements if live is not None else None,
            key_figures(report, status),
            [made for _, _, made in sections],
        ),
        tag(
            "footer",
            tag(
                "p",
                f"Written {minute(contents['written'])} by torchlens_perf {contents['version']}.",
            ),
        ),
        raw("script", inert(as_json(contents)), type="application/json", id="contents"),
        scripts,
    )
    state = None if live is None else "running" if run["live"] else "ended"
    version = live.version if live is not None else None
    title = f"{run['program'] or 'run'} · {run['id']} · torchlens_perf"
    whole = tag(
        "html", head(title, rules, styles), body, lang="en", data_live=state, data_version=version
    )
    return f"<!DOCTYPE html>\n{html(whole)}\n"


def head(title: str, rules: str, styles: Child) -> Element:
    """Return the head of a page. rules: its content security policy."""
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=rules),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        styles,
    )


def icon() -> Element:
    """Return the page's icon: three bars, one of which is longer."""
    return tag("link", rel="icon", href=f"data:image/svg+xml,{quote(_ICON)}")


def _inline_parts() -> tuple[str, Child, Child]:
    """Return policy, styles and scripts of a page that has styles and scripts inline."""
    style, script = page_style(), page_script()
    return (
        _policy(_digest(style), _digest(script), "'none'"),
        [icon(), raw("style", style)],
        raw("script", script),
    )


def _linked_parts(live: LivePart) -> tuple[str, Child, Child]:
    """Return policy, styles and scripts of a page that loads them from a server."""
    return LIVE_POLICY, by_address(live.styles), [tag("script", src=each) for each in live.scripts]


def by_address(styles: Sequence[str]) -> list[Element]:
    """Return links to styles, and the icon."""
    return [icon(), *(tag("link", rel="stylesheet", href=each) for each in styles)]


def as_json(contents: Contents) -> str:
    """Return the parts of the contents that scripts need, as ASCII, so line separators such as
    U+2028 are escaped.

    `named_ranks` are the ranks that verdicts are about. `prominent_ranks` are the ranks with lines
    in charts.
    """
    data = {
        key: value
        for key, value in contents.items()
        if key not in ("headlines", "tables", "thinned_report")
    }
    data["report"] = contents["thinned_report"]
    data["named_ranks"] = named_ranks(contents["report"])
    data["prominent_ranks"] = [
        rank["rank"] for rank in by_prominence(contents["report"])[:_MAX_LINES]
    ]
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def inert(text: str) -> str:
    """Return JSON with escaped angle brackets and ampersands, which cannot end a script element."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
