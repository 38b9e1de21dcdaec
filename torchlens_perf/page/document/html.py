"""document(): a run's page as one file that needs nothing else: no network, and no scripts to be read."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens_perf.analysis.statistics.quantities import duration_or_dash
from torchlens_perf.page.document.scripts import chart_library, page_script, static
from torchlens_perf.page.pictures.markup import Element, html, raw, tag
from torchlens_perf.page.sections.every import SECTIONS
from torchlens_perf.page.sections.quality import overhead_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchlens_perf.page.contents import Contents
    from torchlens_perf.page.document.scripts import Library
    from torchlens_perf.page.pictures.markup import Child

STYLES = ("page.css", "charts.css")


class LivePart(NamedTuple):
    """What the live page has besides a file. It may ask its own server, and nobody else."""

    script: str
    elements: Sequence[Child]
    """Shown above the verdicts."""


def document(contents: Contents, live: LivePart | None = None) -> str:
    """The page. contents: see contents.py. live: where a server shows it; None for a file."""
    style, scripts, library = "\n".join(map(static, STYLES)), [page_script()], chart_library()
    scripts += [live.script] if live is not None else []
    run = contents["report"]["run"]
    title = f"{run['program'] or 'run'} · {run['id']} · torchlens_perf"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content=policy([style], scripts, library, asks=live is not None),
        ),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        raw("style", style),
    )
    sections = [section(contents) for _, _, section in SECTIONS]
    shown = [(key, label) for (key, label, _), each in zip(SECTIONS, sections, strict=True) if each is not None]
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
        raw("script", library.packed, type="text/plain", id="chart-library") if library is not None else None,
        [raw("script", each) for each in scripts],
    )
    state = None if live is None else "running" if run["live"] else "ended"
    return f"<!DOCTYPE html>\n{html(tag('html', head, body, lang='en', data_live=state))}\n"


def _header(contents: Contents) -> Element:
    run = contents["report"]["run"]
    steps, nodes = contents["report"]["steps"], len(run["nodes"])
    facts = [
        ("ranks", f"{run['world_size']}" + (f" on {nodes} nodes" if nodes > 1 else "")),
        ("steps", str(steps["count"])),
        ("median step", duration_or_dash(steps["p50_s"])),
        ("device", run["device"] or "CPU"),
        ("started", (run["started"] or "not yet").replace("T", " ")),
        ("running" if run["live"] else "ended", (run["ended"] or run["last_step_at"] or "-").replace("T", " ")),
        *([("attempt", str(run["attempt"]))] if run["attempt"] else []),
        ("cost of recording", overhead_words(contents["report"])),
    ]
    return tag(
        "header",
        tag("h1", run["program"] or "run", " ", tag("small", run["id"])),
        tag("ul", [tag("li", label, " ", tag("b", value)) for label, value in facts], class_="facts"),
    )


def inert(value: Any) -> str:
    """JSON that no HTML parser and no script sees as anything else."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII: U+2028 and its like are escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(styles: list[str], scripts: list[str], library: Library | None = None, *, asks: bool = False) -> str:
    """The content security policy: scripts that are in the page, by their hashes, and nothing else; no network at all.

    asks: of the live page, which asks its own server. The charts' library makes style elements of its own, whose hashes
    nobody knows before. A style can reach nothing.
    """
    texts = [*scripts, *([library.text] if library is not None else [])]
    parts = {
        "default-src": ["'none'"],
        "img-src": ["data:"],
        "style-src": ["'unsafe-inline'"] if library is not None else [f"'{_digest(text)}'" for text in styles],
        "script-src": [f"'{_digest(text)}'" for text in texts] or ["'none'"],
        "base-uri": ["'none'"],
        "form-action": ["'self'"] if asks else ["'none'"],
    }
    if asks:
        parts["connect-src"] = ["'self'"]
    return "; ".join(" ".join([source, *allowed]) for source, allowed in parts.items())


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
