"""Latency of the page in a real browser: first paint and reactions, for 64 and 1024 ranks.

    python -m benchmarks.page_view [RANKSxSTEPS ...]     # in the environment of `make test-page`

- words: time from the navigation to the first painted text
- heat map: time until the heat map and all other visible parts are drawn
- brush and other inputs: time from a drag's end until all visible parts show the selected steps

"as written" is a run directory with the page's size limit. "each step" is a page with one column
per step, without a limit. All values are medians of five.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from benchmarks.measure import Table
from benchmarks.page_scale import write_run
from tests.support.page_contents import enlarged
from torchlens_perf.page.document.html import build_document
from torchlens_perf.page.document.write import write_page
from torchlens_perf.page.gather.run_contents import gather_contents
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.simulate.simulation import Topology

SIZES = ("64x1000", "1024x1000")
REPEATS = 5
FIRST_VIEW_MS, BRUSH_MS, ANSWER_MS, MB = 800.0, 200.0, 100.0, 2.5
ARGUMENTS = ["--no-sandbox", "--disable-gpu"]
PAINTED = """
window.painted = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() =>
  done(performance.now()))));
"""
# Time from the end of a drag to the frame in which all visible parts show the selection.
ANSWER = """
window.answered = [];
addEventListener("pointerup", async () => {
  const began = performance.now();
  await new Promise(done => setTimeout(done));
  await torchlensPage.draw();
  answered.push(await painted() - began);
}, true);
"""
_HEAT = "torchlensPage.charts.find(({figure}) => figure.dataset.chart === 'heat')"
_SETTLED = (
    "Boolean(window.torchlensPage && torchlensPage.isDrawn && torchlensPage.charts.some(({plot}) =>"
    " plot))"
)


def main() -> int:
    """Print the table. Return the number of missed bars."""
    table = Table(
        "ranks x steps",
        "",
        "file",
        "words",
        "heat map",
        "brush",
        "zoom",
        "hover",
        "by rank",
        "group",
        "theme",
        "bars",
    )
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as player:
        browser = player.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        few = RunDirectory(Path(folder) / "few")
        write_run(few, Topology(2, 4), 200)
        for size in sys.argv[1:] or SIZES:
            ranks, steps = map(int, size.split("x"))
            written, whole = Path(folder) / f"{size}.html", Path(folder) / f"{size}-each.html"
            run = RunDirectory(Path(folder) / size)
            write_run(run, Topology(ranks // 8, 8), steps)
            write_page(run, written)
            whole.write_text(
                build_document(enlarged(gather_contents(few), ranks, steps, 11, 2 * steps // 5)),
                "utf-8",
            )
            for kind, path in (("as written", written), ("each step", whole)):
                found = [measured(browser, path) for _ in range(REPEATS)]
                median = {
                    name: statistics.median(each[name] for each in found) for name in found[0]
                }
                file_mb = path.stat().st_size / 1e6
                met = median["brush"] <= BRUSH_MS and median["words"] <= FIRST_VIEW_MS
                met &= max(median["zoom"], median["hover"]) <= ANSWER_MS
                met &= kind == "each step" or (
                    file_mb <= MB and median["heat map"] <= FIRST_VIEW_MS
                )
                times = [f"{each:.0f} ms" for each in median.values()]
                table.row(
                    size.replace("x", " x "), kind, f"{file_mb:.2f} MB", *times, table.bar(met)
                )
        browser.close()
    return table.missed


def measured(browser: Browser, path: Path) -> dict[str, float]:
    """Return the latencies in milliseconds."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    tab.add_init_script(PAINTED)
    tab.goto(f"{path.as_uri()}#heat;rows=all")
    # Poll from Python, because the page's content security policy forbids eval inside the page.
    while not tab.evaluate(_SETTLED):
        tab.wait_for_timeout(5)
    shown_ms = tab.evaluate("painted()")
    words_ms = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    tab.evaluate(ANSWER)
    box = tab.locator("figure[data-chart=heat] .u-over").bounding_box()
    assert box is not None
    for share in (0.3, 0.4, 0.5):
        tab.mouse.move(box["x"] + share * box["width"], box["y"] + 20)
        tab.mouse.down()
        tab.mouse.move(box["x"] + (share + 0.2) * box["width"], box["y"] + 26, steps=4)
        tab.mouse.up()
        tab.wait_for_timeout(500)
    brush = tab.evaluate("answered")
    assert len(brush) == 3

    def timed(change: str) -> float:
        code = (
            f"(async () => {{ const began = performance.now(); {change}; await"
            " torchlensPage.draw(); "
        )
        return float(tab.evaluate(f"{code} return await painted() - began; }})()"))

    middle = "torchlensPage.steps.begin + (torchlensPage.steps.end - torchlensPage.steps.begin)"
    found = {
        "words": words_ms,
        "heat map": shown_ms,
        "brush": statistics.median(brush),
        "zoom": timed(f"torchlensPage.zoom({middle} / 4, {middle} / 2)"),
        "hover": timed(f"{_HEAT}.hover({middle} / 3, 5); {_HEAT}.plot.redraw(false)"),
        "by rank": timed("torchlensPage.view.set({order: 'rank'})"),
        "group": timed("torchlensPage.view.set({group: 'node'})"),
        "theme": timed("torchlensPage.view.set({theme: 'dark'})"),
    }
    context.close()
    return found


if __name__ == "__main__":
    sys.exit(main())
