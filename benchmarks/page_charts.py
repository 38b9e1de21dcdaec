"""Which charting library the page has: Bokeh and Plotly with a heat map of 1024 ranks and 1000 steps, in real Chromium.

    python -m benchmarks.page_charts          # needs bokeh, plotly and playwright from PyPI, and Chromium

Each in one file without a network, under the page's content security policy. Printed: bytes of the library, raw and
packed; seconds until the chart is painted; milliseconds from zooming to a half of the steps until that is painted; and
whether the policy had to allow eval.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import statistics
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from playwright.sync_api import Error, sync_playwright

from benchmarks.measure import Table

RANKS, STEPS, REPEATS = 1024, 1000, 5
LIBRARIES = {
    "Bokeh": ("bokeh", ["server/static/js/bokeh.min.js", "server/static/js/bokeh-api.min.js"]),
    "Plotly": ("plotly", ["package_data/plotly.min.js"]),
}
DATA = f"""
const ranks = {RANKS}, steps = {STEPS};
const values = new Float32Array(ranks * steps);
let seed = 1;
for (let i = 0; i < values.length; i++) {{ seed = (seed * 16807) % 2147483647; values[i] = seed / 2147483647; }}
const frame = () => new Promise(done => requestAnimationFrame(done));
const painted = async () => {{ await frame(); await frame(); return performance.now(); }};
"""
DRAW = {
    "Bokeh": """
window.draw = async () => {
  const {ndarray} = Bokeh.require("core/util/ndarray");
  const image = ndarray(values.buffer, {dtype: "float32", shape: [ranks, steps]});
  const plot = Bokeh.Plotting.figure({width: 1000, height: 500, x_range: new Bokeh.Range1d({start: 0, end: steps}),
                                      y_range: new Bokeh.Range1d({start: 0, end: ranks}), output_backend: "canvas"});
  const mapper = new Bokeh.LinearColorMapper({palette: Bokeh.Palettes.Viridis256, low: 0, high: 1});
  plot.image({image: [image], x: 0, y: 0, dw: steps, dh: ranks, color_mapper: mapper});
  window.plot = plot;
  await Bokeh.Plotting.show(plot, document.getElementById("chart"));
  return painted();
};
window.zoom = async () => {
  const began = performance.now();
  plot.x_range.start = plot.x_range.start ? 0 : steps / 2;
  return await painted() - began;
};
""",
    "Plotly": """
window.draw = async () => {
  const rows = Array.from({length: ranks}, (_, rank) => values.subarray(rank * steps, (rank + 1) * steps));
  await Plotly.newPlot("chart", [{type: "heatmap", z: rows, colorscale: "Viridis"}], {width: 1000, height: 500});
  return painted();
};
let half = false;
window.zoom = async () => {
  const began = performance.now();
  half = !half;
  await Plotly.relayout("chart", {"xaxis.range": half ? [steps / 2, steps] : [0, steps]});
  return await painted() - began;
};
""",
}


def main() -> int:
    table = Table(f"heat map of {RANKS} ranks and {STEPS} steps", *LIBRARIES)
    rows: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as player:
        browser = player.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        for name, (package, files) in LIBRARIES.items():
            found = importlib.util.find_spec(package)
            assert found is not None
            assert found.origin is not None
            library = "\n".join((Path(found.origin).parent / file).read_text() for file in files)
            packed = base64.b64encode(zlib.compress(library.encode(), 9))
            path = Path(folder) / f"{name}.html"
            evaluates, first_s = False, 0.0
            for evaluates in (False, True):
                path.write_text(page(library, DATA + DRAW[name], evaluates=evaluates))
                tab = browser.new_page()
                problems: list[str] = []
                listen(tab, problems)
                tab.goto(path.as_uri())
                try:
                    first_s = tab.evaluate("draw()") / 1e3
                except Error as error:
                    problems.append(str(error))
                if not problems:
                    break
                print(name, problems[:2], file=sys.stderr)
            zooms = sorted(tab.evaluate("zoom()") for _ in range(REPEATS))
            rows.setdefault("library, bytes", []).append(f"{len(library.encode()):,}")
            rows.setdefault("deflated and in base64, bytes", []).append(f"{len(packed):,}")
            rows.setdefault("chart painted after", []).append(f"{first_s:.2f} s")
            rows.setdefault("zoom painted after, median", []).append(f"{statistics.median(zooms):.0f} ms")
            rows.setdefault("needs 'unsafe-eval'", []).append("yes" if evaluates else "no")
        browser.close()
    for what, values in rows.items():
        table.row(what, *values)
    return 0


def listen(tab: Any, problems: list[str]) -> None:
    """Into problems goes what the console reports as an error."""
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: problems.append(str(error)))


def page(library: str, script: str, *, evaluates: bool) -> str:
    """A file under the page's policy. evaluates: which also lets eval be called."""
    digests = (hashlib.sha256(each.encode()).digest() for each in (library, script))
    scripts = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    scripts += ["'unsafe-eval'"] if evaluates else []
    policy = f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {' '.join(scripts)}"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
    body = f'<div id="chart"></div><script>{library}</script><script>{script}</script>'
    return f"<!DOCTYPE html><html><head>{head}</head><body>{body}</body></html>"


if __name__ == "__main__":
    sys.exit(main())
