"""The page's scripts and styles: the vendored chart library, and the page's own files."""

from __future__ import annotations

import functools
import json
from importlib import resources

from torchlens_perf.view import theme

_STATIC = "static"
# A script may use the scripts listed before it. The chart library is uPlot, see
# static/vendor/NOTICE.md.
_SCRIPTS = (
    "vendor/uPlot-1.6.32.iife.min.js", "words.js", "contents.js", "view.js", "chart.js", "lines.js", "heat.js",
    "one_step.js", "timeline.js", "bars.js", "tables.js", "selection.js", "renewal.js", "page.js",
)  # fmt: skip
_STYLES = ("vendor/uPlot-1.6.32.min.css", "page.css", "charts.css")


@functools.cache
def build_page_script() -> str:
    """Return the theme's names and thresholds and all scripts as one text."""
    return "\n".join(
        [
            f"const TORCHLENS_THEME = {json.dumps(theme.theme_for_scripts())};",
            *map(read_static_file, _SCRIPTS),
        ]
    )


@functools.cache
def build_page_style() -> str:
    """Return the theme's colours and all styles as one text."""
    return "\n".join([theme.css_variables(), *map(read_static_file, _STYLES)])


@functools.cache
def read_static_file(name: str) -> str:
    """Return the text of a static file."""
    return (resources.files("torchlens_perf.page") / _STATIC / name).read_text("utf-8")
