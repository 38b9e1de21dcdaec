"""How soon a page is there in a real browser, and how soon it answers: 64 and 1024 ranks of 1000 steps.

    python -m benchmarks.page_view     # in the environment of `make test-page`

First view: from the navigation until the verdicts and the first pictures are painted. Charts: until all are drawn. A
brush: from selecting half of the steps until every chart shows them. Medians of five.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from benchmarks.measure import Table
from benchmarks.page_scale import write_run
from torchlens_perf.page.document.write import write_page
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.simulate.simulation import Topology

SIZES = ((64, 1000), (1024, 1000))
REPEATS = 5
FIRST_VIEW_S, BRUSH_MS, MB = 1.0, 200.0, 3.0
_PAINTED = "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1e3"
_DRAWN = "window.torchlensPage && torchlensPage.charts.length && torchlensPage.charts.every(each => each.done)"
_BRUSH = """async (steps) => {
  const began = performance.now();
  torchlensPage.view.set({steps});
  while (!torchlensPage.idle) await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  return performance.now() - began;
}"""


def main() -> int:
    """Returns how many bars were missed."""
    table = Table("in Chromium", "file", "first view", "charts drawn", "a brush", "bars")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as player:
        browser = player.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        for ranks, steps in SIZES:
            run, path = RunDirectory(Path(folder) / f"run{ranks}"), Path(folder) / f"{ranks}.html"
            write_run(run, Topology(ranks // 8, 8), steps)
            size_mb = write_page(run, path) / 1e6
            first, drawn, brushes = [], [], []
            for _ in range(REPEATS):
                tab = browser.new_page()
                tab.goto(path.as_uri())
                tab.wait_for_function(_DRAWN)
                drawn.append(tab.evaluate("performance.now() / 1e3"))
                first.append(tab.evaluate(_PAINTED))
                brushes.append(tab.evaluate(_BRUSH, [steps // 4, 3 * steps // 4]))
                tab.close()
            medians = [statistics.median(each) for each in (first, drawn, brushes)]
            met = size_mb <= MB and medians[0] <= FIRST_VIEW_S and medians[2] <= BRUSH_MS
            table.row(
                f"{ranks} ranks, {steps} steps", f"{size_mb:.2f} MB", f"{medians[0]:.2f} s", f"{medians[1]:.2f} s",
                f"{medians[2]:.0f} ms", table.bar(met),
            )  # fmt: skip
        browser.close()
    return table.missed


if __name__ == "__main__":
    sys.exit(main())
