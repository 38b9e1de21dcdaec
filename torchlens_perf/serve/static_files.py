"""Styles and scripts of the server's pages.

Addresses contain the content's digest, so browsers can cache forever.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
from importlib import resources

from torchlens_perf.page.document.scripts import build_page_script, build_page_style

STYLE, LIST_SCRIPT, OPENING_SCRIPT = "page.css", "list.js", "open.js"
PAGE_SCRIPT, LIVE_SCRIPT = "page.js", "live.js"
NAMES = (STYLE, PAGE_SCRIPT, LIVE_SCRIPT, LIST_SCRIPT, OPENING_SCRIPT)


def static_address(name: str, root: str) -> str:
    """Return the address of a static file. root: the list's address relative to the page."""
    return f"{root}static/{name}?v={content_digest(name)}"


@functools.cache
def content_digest(name: str) -> str:
    return hashlib.sha256(_read_text(name).encode()).hexdigest()[:16]


@functools.cache
def compressed_file(name: str) -> bytes:
    return gzip.compress(_read_text(name).encode(), 9, mtime=0)


def _read_text(name: str) -> str:
    if name == STYLE:
        return f"{build_page_style()}\n{_read_own_file('live.css')}"
    return build_page_script() if name == PAGE_SCRIPT else _read_own_file(name)


def _read_own_file(name: str) -> str:
    return (resources.files("torchlens_perf.serve") / "static" / name).read_text("utf-8")
