"""document(): a run's page as one file that needs nothing else: no network, and no scripts to be read."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING, NamedTuple

from torchlens_perf.page.document.scripts import chart_library, page_script, static
from torchlens_perf.page.sections.every import SECTIONS
from torchlens_perf.page.sections.overview import header, key_figures
from torchlens_perf.view.headline import overall
from torchlens_perf.view.markup import Element, html, raw, tag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchlens_perf.page.contents import Contents
    from torchlens_perf.page.document.scripts import Library
    from torchlens_perf.view.markup import Child

STYLES = ("theme.css", "page.css", "charts.css")
# Of a page that asks its own server, and nobody else. The charts' library makes style elements of its own.
LIVE_POLICY = "; ".join(
    [
        "default-src 'none'", "img-src data:", "style-src 'self' 'unsafe-inline'", "script-src 'self'",
        "connect-src 'self'", "base-uri 'none'", "form-action 'self'",
    ]
)  # fmt: skip


class LivePart(NamedTuple):
    """What the live page has besides a file, and what it has by its address on its own server instead of in itself."""

    version: str
    """Of the run, as the server tells it; another one is newer."""
    elements: Sequence[Child]
    """Shown above the verdicts."""
    styles: Sequence[str]
    scripts: Sequence[str]


def document(contents: Contents, live: LivePart | None = None) -> str:
    """Return the page. live: what a server adds; None for a file."""
    report = contents["report"]
    run, status = report["run"], overall(contents["headlines"])
    sections = [(key, label, section(contents)) for key, label, section in SECTIONS]
    links = [tag("li", tag("a", label, href=f"#{key}")) for key, label, made in sections if made is not None]
    rules, styles, scripts = _in_file() if live is None else _by_address(live)
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
        tag("footer", tag("p", f"Written {contents['written']} by torchlens_perf {contents['version']}.")),
        raw("script", inert(as_json(contents)), type="application/json", id="contents"),
        scripts,
    )
    state = None if live is None else "running" if run["live"] else "ended"
    version = live.version if live is not None else None
    title = f"{run['program'] or 'run'} · {run['id']} · torchlens_perf"
    whole = tag("html", head(title, rules, styles), body, lang="en", data_live=state, data_version=version)
    return f"<!DOCTYPE html>\n{html(whole)}\n"


def head(title: str, rules: str, styles: Child) -> Element:
    """Of each page of ours. rules: its content security policy."""
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


def _in_file() -> tuple[str, Child, Child]:
    """Policy, styles and scripts of a page that has all in itself."""
    style, scripts, library = "\n".join(map(static, STYLES)), [page_script()], chart_library()
    packed = raw("script", library.packed, type="text/plain", id="chart-library") if library is not None else None
    rules = policy([style], scripts, library)
    return rules, raw("style", style), [packed, *(raw("script", each) for each in scripts)]


def _by_address(live: LivePart) -> tuple[str, Child, Child]:
    """The same of one that has them from its server."""
    return LIVE_POLICY, by_address(live.styles), [tag("script", src=each) for each in live.scripts]


def by_address(styles: Sequence[str]) -> list[Element]:
    """Links to styles, and to no icon: a browser would ask the server for one."""
    return [tag("link", rel="icon", href="data:,"), *(tag("link", rel="stylesheet", href=each) for each in styles)]


def as_json(contents: Contents) -> str:
    """Return what scripts need of the contents. ASCII: U+2028 and its like are escaped."""
    data = {key: value for key, value in contents.items() if key not in ("headlines", "tables")}
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def inert(text: str) -> str:
    """Return JSON that no HTML parser and no script sees as anything else."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(styles: list[str], scripts: list[str], library: Library | None) -> str:
    """The content security policy: scripts that are in the page, by their hashes, and nothing else; no network at all.

    The charts' library makes style elements of its own, whose hashes nobody knows before. A style can reach nothing.
    """
    texts = [*scripts, *([library.text] if library is not None else [])]
    parts = {
        "default-src": ["'none'"],
        "img-src": ["data:"],
        "style-src": ["'unsafe-inline'"] if library is not None else [f"'{_digest(text)}'" for text in styles],
        "script-src": [f"'{_digest(text)}'" for text in texts] or ["'none'"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    return "; ".join(" ".join([source, *allowed]) for source, allowed in parts.items())


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
