"""Which charting library the page has: Bokeh and Plotly with a heat map of 1024 ranks and 1000 steps, in real Chromium.

    python -m benchmarks.page_charts          # in the environment of `make test-page`, with plotly added

Each in one file without a network, under the page's content security policy. Printed: bytes of the library, raw and
packed; seconds until the chart is painted; milliseconds from zooming to a half of the steps until that is painted;
whether the policy had to allow eval; and what is installed.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import shutil
import statistics
import sys
import tempfile
import zlib
from importlib import metadata
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Error, Page, sync_playwright

from benchmarks.measure import Table

RANKS, STEPS, REPEATS = 1024, 1000, 5
ARGUMENTS = ["--no-sandbox", "--disable-gpu"]
LIBRARIES = {
    "Bokeh": ("bokeh", ["server/static/js/bokeh.min.js", "server/static/js/bokeh-api.min.js"]),
    "Plotly": ("plotly", ["package_data/plotly.min.js"]),
}
PAINTED = """
window.painted = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() =>
  done(performance.now()))));
"""
DATA = f"""{PAINTED}
const ranks = {RANKS}, steps = {STEPS};
const values = new Float32Array(ranks * steps);
let seed = 1;
for (let i = 0; i < values.length; i++) {{ seed = (seed * 16807) % 2147483647; values[i] = seed / 2147483647; }}
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
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as player:
        browser = player.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        print(f"Chromium {browser.version}")
        libraries(browser, Path(folder))
        browser.close()
    return 0


def libraries(browser: Browser, folder: Path) -> None:
    names = [f"{name} {metadata.version(package)}" for name, (package, _) in LIBRARIES.items()]
    table = Table(f"heat map of {RANKS} ranks and {STEPS} steps", *names)
    rows: dict[str, list[str]] = {}
    for name, (package, files) in LIBRARIES.items():
        found = importlib.util.find_spec(package)
        assert found is not None
        assert found.origin is not None
        library = "\n".join((Path(found.origin).parent / file).read_text() for file in files)
        path = folder / f"{name}.html"
        evaluates, first_s = False, 0.0
        for evaluates in (False, True):
            path.write_text(plain_page(library, DATA + DRAW[name], evaluates=evaluates))
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
        packed = base64.b64encode(zlib.compress(library.encode(), 9))
        rows.setdefault("deflated and in base64, bytes", []).append(f"{len(packed):,}")
        rows.setdefault("chart painted after", []).append(f"{first_s:.2f} s")
        rows.setdefault("zoom painted after, median", []).append(f"{statistics.median(zooms):.0f} ms")
        rows.setdefault("needs 'unsafe-eval'", []).append("yes" if evaluates else "no")
        installed = sum(file.locate().stat().st_size for file in metadata.files(package) or [] if file.size)
        rows.setdefault("installed, without what it needs", []).append(f"{installed / 1e6:.0f} MB")
        needs = [each.partition(";")[0] for each in metadata.requires(package) or [] if "extra ==" not in each]
        rows.setdefault("needs directly", []).append(f"{len(needs)} packages")
    for what, values in rows.items():
        table.row(what, *values)
    print()


def listen(tab: Page, problems: list[str]) -> None:
    """Into problems goes what the console reports as an error."""

    def heard(message: Any) -> None:
        if message.type == "error":
            problems.append(message.text)

    tab.on("console", heard)
    tab.on("pageerror", lambda error: problems.append(str(error)))


def plain_page(library: str, script: str, *, evaluates: bool) -> str:
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
