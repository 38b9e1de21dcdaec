"""document(): a run's page as one file that needs nothing else: no network, and no scripts to be read."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens_perf.analysis.statistics.quantities import duration_or_dash
from torchlens_perf.page.document.scripts import page_script, page_style
from torchlens_perf.page.markup import Element, html, raw, tag
from torchlens_perf.page.sections.every import SECTIONS
from torchlens_perf.page.sections.quality import overhead_words
from torchlens_perf.verdicts.words.run_state import ranks_words, state_words
from torchlens_perf.verdicts.words.startup import startup_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchlens_perf.page.contents import Contents
    from torchlens_perf.page.markup import Child

# Of a page that asks its own server, and nobody else.
LIVE_POLICY = "; ".join(
    [
        "default-src 'none'", "img-src data:", "style-src 'self'", "script-src 'self'",
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
    """The page. contents: see contents.py. live: where a server shows it; None for a file."""
    run = contents["report"]["run"]
    sections = [section(contents) for _, _, section in SECTIONS]
    shown = [(key, label) for (key, label, _), each in zip(SECTIONS, sections, strict=True) if each is not None]
    title = f"{run['program'] or 'run'} · {run['id']} · torchlens_perf"
    rules, styles, scripts = _in_file() if live is None else _by_address(live)
    body = tag(
        "body",
        tag("a", "Skip to the verdicts", class_="skip", href="#verdicts"),
        _header(contents),
        tag(
            "nav",
            tag("ul", [tag("li", tag("a", label, href=f"#{key}")) for key, label in shown]),
            aria_label="Sections",
        ),
        tag("main", live.elements if live is not None else None, sections),
        tag("footer", tag("p", f"Written {contents['written']} by torchlens_perf {contents['version']}.")),
        raw("script", inert(contents), type="application/json", id="contents"),
        scripts,
    )
    state = None if live is None else "running" if run["live"] else "ended"
    version = live.version if live is not None else None
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
    style, script = page_style(), page_script()
    return policy([style], [script]), raw("style", style), raw("script", script)


def _by_address(live: LivePart) -> tuple[str, Child, Child]:
    """The same of one that has them from its server."""
    return LIVE_POLICY, by_address(live.styles), [tag("script", src=each) for each in live.scripts]


def by_address(styles: Sequence[str]) -> list[Element]:
    """Links to styles, and to no icon: a browser would ask the server for one."""
    return [tag("link", rel="icon", href="data:,"), *(tag("link", rel="stylesheet", href=each) for each in styles)]


def _header(contents: Contents) -> Element:
    run = contents["report"]["run"]
    steps = contents["report"]["steps"]
    facts = [
        ("", ranks_words(run)),
        ("steps", str(steps["count"])),
        ("median step", duration_or_dash(steps["p50_s"])),
        ("device", run["device"] or "CPU"),
        ("started", (run["started"] or "not yet").replace("T", " ")),
        (state_words(run), (run["ended"] or run["last_step_at"] or "-").replace("T", " ")),
        *([("", words)] if (words := startup_words(run)) else []),
        *([("attempt", str(run["attempt"]))] if run["attempt"] else []),
        ("cost of recording", overhead_words(contents["report"])),
    ]
    return tag(
        "header",
        tag("h1", run["program"] or "run", " ", tag("small", run["id"])),
        tag("ul", [tag("li", f"{label} " if label else "", tag("b", value)) for label, value in facts], class_="facts"),
    )


def inert(value: Any) -> str:
    """JSON that no HTML parser and no script sees as anything else."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII: U+2028 and its like are escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(styles: list[str], scripts: list[str]) -> str:
    """Return the content security policy: scripts and styles of the page, by their hashes, and no network."""
    parts = {
        "default-src": ["'none'"],
        "img-src": ["data:"],
        "style-src": [f"'{_digest(text)}'" for text in styles],
        "script-src": [f"'{_digest(text)}'" for text in scripts],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    return "; ".join(" ".join([source, *allowed]) for source, allowed in parts.items())


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
