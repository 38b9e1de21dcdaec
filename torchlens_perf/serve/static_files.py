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


def static_address(name: str, root: str) -> str:
    """Return the address of a static file. root: the list's address relative to the page."""
    return f"{root}static/{name}?v={content_digest(name)}"


@functools.cache
def content_digest(name: str) -> str:
    return hashlib.sha256(read_texts()[name].encode()).hexdigest()[:16]


@functools.cache
def compressed_file(name: str) -> bytes:
    return gzip.compress(read_texts()[name].encode(), 9, mtime=0)


@functools.cache
def read_texts() -> dict[str, str]:
    """Return the text of each file by its name."""
    folder = resources.files("torchlens_perf.serve") / "static"
    scripts = (LIVE_SCRIPT, LIST_SCRIPT, OPENING_SCRIPT)
    return {
        STYLE: f"{build_page_style()}\n{(folder / 'live.css').read_text('utf-8')}",
        PAGE_SCRIPT: build_page_script(),
        **{name: (folder / name).read_text("utf-8") for name in scripts},
    }
