"""Styles and scripts of the server's pages. Each address has the content's digest, so browsers keep a file forever."""

from __future__ import annotations

import functools
import gzip
import hashlib
from importlib import resources

from torchlens_perf.page.document.html import STYLES
from torchlens_perf.page.document.scripts import chart_library, page_script, static
from torchlens_perf.view.theme import style_sheet

STYLE, LIST_SCRIPT, OPENING_SCRIPT = "page.css", "list.js", "open.js"
_LIBRARY, _PAGE, _LIVE = "charts.js", "page.js", "live.js"
NAMES = (STYLE, _LIBRARY, _PAGE, _LIVE, LIST_SCRIPT, OPENING_SCRIPT)


def run_scripts() -> list[str]:
    """Return the names of the scripts of a run's page, in the order in which they must be loaded."""
    return [_PAGE, _LIVE] if chart_library() is None else [_LIBRARY, _PAGE, _LIVE]


def static_address(name: str, root: str) -> str:
    """Return the address of a file. root: the list's address as seen from the page."""
    return f"{root}static/{name}?v={digest(name)}"


@functools.cache
def digest(name: str) -> str:
    """Return a text that changes with the file's content."""
    return hashlib.sha256(_text(name).encode()).hexdigest()[:16]


@functools.cache
def packed(name: str) -> bytes:
    """Return a file's content, compressed by gzip."""
    return gzip.compress(_text(name).encode(), 9, mtime=0)


def media_type(name: str) -> str:
    """Return the media type of a file."""
    return "text/css" if name == STYLE else "text/javascript"


def _text(name: str) -> str:
    if name == STYLE:
        return "\n".join([*map(static, STYLES), style_sheet(), _own("live.css")])
    if name == _PAGE:
        return page_script()
    if name == _LIBRARY:
        library = chart_library()
        return "" if library is None else library.text
    return _own(name)


def _own(name: str) -> str:
    return (resources.files("torchlens_perf.serve") / "static" / name).read_text("utf-8")
