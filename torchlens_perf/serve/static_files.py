"""Styles and scripts of the live page, which the server has in memory: of the page's file, and what follows the run."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
from importlib import resources

from torchlens_perf.page.document.html import STYLES
from torchlens_perf.page.document.scripts import chart_library, page_script, static
from torchlens_perf.view.theme import style_sheet

_STYLE, _LIBRARY, _PAGE, _LIVE, _LIST, _OPENING = "page.css", "charts.js", "page.js", "live.js", "list.js", "open.js"
_TYPES = {"css": "text/css", "js": "text/javascript"}


@dataclasses.dataclass(frozen=True)
class StaticFile:
    """One file. It never changes at its address, which has its digest."""

    name: str
    media_type: str
    packed: bytes
    """By gzip."""
    digest: str


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Where pages find them: addresses relative to the server's root, "static/page.js?v=..."."""

    style: str
    of_page: tuple[str, ...]
    of_list: tuple[str, ...]
    of_opening: str
    """Of the page that is given out without the token."""

    def styles(self, root: str) -> list[str]:
        return [root + self.style]

    def scripts(self, root: str) -> list[str]:
        """Of a run's page."""
        return [root + each for each in self.of_page]


@functools.cache
def static_files() -> dict[str, StaticFile]:
    """By name. Reads the package's files, once."""
    library = chart_library()
    texts = {
        _STYLE: "\n".join([*map(static, STYLES), style_sheet(), _own("live.css")]),
        _PAGE: page_script(),
        _LIVE: _own(_LIVE),
        _LIST: _own(_LIST),
        _OPENING: _own(_OPENING),
        **({_LIBRARY: library.text} if library is not None else {}),
    }
    return {name: _file(name, text.encode()) for name, text in texts.items()}


@functools.cache
def addresses() -> Addresses:
    files = static_files()

    def at(name: str) -> str:
        return f"static/{name}?v={files[name].digest}"

    scripts = [name for name in (_LIBRARY, _PAGE, _LIVE) if name in files]  # each needs those before it
    return Addresses(at(_STYLE), tuple(map(at, scripts)), (at(_LIST),), at(_OPENING))


def _own(name: str) -> str:
    return (resources.files("torchlens_perf.serve") / "static" / name).read_text("utf-8")


def _file(name: str, text: bytes) -> StaticFile:
    media_type = _TYPES[name.rpartition(".")[2]]
    return StaticFile(name, media_type, gzip.compress(text, 9, mtime=0), hashlib.sha256(text).hexdigest()[:16])
