"""The page's scripts: its own, and the charts' library where that is installed."""

from __future__ import annotations

import base64
import functools
import importlib.util
import zlib
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from torchlens_perf.view.theme import style_sheet

_STATIC = "static"
# The library's package, and the files in it. It is not imported.
_LIBRARY = ("bokeh", ("server/static/js/bokeh.min.js", "server/static/js/bokeh-api.min.js"))
# In the order in which each needs those before it.
_SCRIPTS = (
    "words.js", "contents.js", "view.js", "plot.js", "heat_image.js", "heat_keys.js", "heat.js", "step_times.js",
    "phases.js", "one_step.js", "timeline_layout.js", "timeline.js", "tables.js", "lines.js", "totals.js",
    "selection.js", "renewal.js", "page.js",
)  # fmt: skip


class Library(NamedTuple):
    """The charts' library as text, and as the page holds it: deflated, in base64, a third as large."""

    text: str
    packed: str


def page_script() -> str:
    """The page's own scripts as one: they need no library, with which they draw charts besides."""
    return "\n".join(map(static, _SCRIPTS))


@functools.cache
def static(name: str) -> str:
    """Return a file of the page. theme.css is made from the theme."""
    if name == "theme.css":
        return style_sheet()
    return (resources.files("torchlens_perf.page") / _STATIC / name).read_text("utf-8")


@functools.cache
def chart_library() -> Library | None:
    """None where it is not installed: the page then has its pictures and tables only."""
    package, files = _LIBRARY
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return None
    paths = [Path(found.origin).parent / file for file in files]
    if not all(path.is_file() for path in paths):
        return None
    text = "\n".join(path.read_text("utf-8") for path in paths)
    return Library(text, base64.b64encode(zlib.compress(text.encode(), 9)).decode())
