"""The page's scripts and styles: the vendored chart library, and the page's own files."""

from __future__ import annotations

import functools
import json
from importlib import resources

from torchlens_perf.view import theme

_STATIC = "static"
# Each script needs those before it. The library is uPlot, see static/vendor/NOTICE.md.
_SCRIPTS = (
    "vendor/uPlot-1.6.32.iife.min.js", "words.js", "contents.js", "view.js", "chart.js", "lines.js", "heat.js",
    "one_step.js", "timeline.js", "bars.js", "tables.js", "selection.js", "renewal.js", "page.js",
)  # fmt: skip
_STYLES = ("vendor/uPlot-1.6.32.min.css", "page.css", "charts.css")


@functools.cache
def page_script() -> str:
    """Return all scripts as one text. The theme's names and thresholds come first."""
    return "\n".join(
        [f"const TORCHLENS_THEME = {json.dumps(theme.for_scripts())};", *map(static, _SCRIPTS)]
    )


@functools.cache
def page_style() -> str:
    """Return all styles as one text. The theme's colours come first."""
    return "\n".join([theme.style_sheet(), *map(static, _STYLES)])


@functools.cache
def static(name: str) -> str:
    """Return a static file of the page. theme.css is generated from the theme."""
    if name == "theme.css":
        return theme.style_sheet()
    return (resources.files("torchlens_perf.page") / _STATIC / name).read_text("utf-8")
