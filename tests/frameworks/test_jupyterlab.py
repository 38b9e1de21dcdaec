"""Tests of a watch in a real JupyterLab in Chromium: live, at its end, with each theme, and in an
untrusted notebook.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.browser.tab import ARGUMENTS, CHROMIUM
from tests.support.jupyter_lab import JupyterLab
from tests.support.processes import ROOT, runs

MISSING = [
    each
    for each in ("jupyterlab", "ipykernel", "playwright")
    if importlib.util.find_spec(each) is None
]
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        bool(MISSING), reason=f"{', '.join(MISSING)} not in this environment: make test-frameworks"
    ),
    pytest.mark.skipif(
        CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium"
    ),
]
DEADLINE_MS = 30_000
SIZE = {"width": 1280, "height": 1200}
SETUP = """import torch
import torchlens_perf as perf

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())


def train(steps):
    for _ in range(steps):
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()"""
LIVE = """import os, time

with perf.watch(model, optimizer, config=perf.Config(_exit_timeout_s=60.0)) as w:
    display(w)
    most_s = time.monotonic() + 120
    while not os.path.exists('END') and time.monotonic() < most_s:
        train(1)
        time.sleep(0.002)"""
PRINTED = """with perf.watch(model, optimizer, config=perf.Config(_exit_timeout_s=60.0)):
    train(300)
print('printed')"""
CELLS = (SETUP, LIVE, "w", PRINTED)
# Script that returns a cell's visible output: the text, the drawn pictures, and whether everything
# is readable.
SEEN = """
async number => {
  const cell = document.querySelectorAll(".jp-Notebook .jp-Cell")[number];
  const outputs = [...cell.querySelectorAll(".jp-OutputArea-output")].filter(each => each.innerText.trim());
  const images = [...cell.querySelectorAll("img")];
  await Promise.all(images.map(each => each.decode()));
  const light = color => {
    const [red, green, blue] = color.match(/[\\d.]+/g).slice(0, 3).map(each => {
      const share = each / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const behind = element => {
    for (let each = element; each; each = each.parentElement) {
      const color = getComputedStyle(each).backgroundColor;
      if (!/^rgba\\(.*, 0\\)$/.test(color)) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const contrasts = outputs.flatMap(each => [...each.querySelectorAll("p, b, td, th, small, summary")]).map(each => {
    const [one, other] = [light(getComputedStyle(each).color), light(behind(each))];
    return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  });
  return {
    words: outputs.map(each => each.innerText),
    widths: images.map(each => each.naturalWidth),
    contrast: Math.min(...contrasts),
    isDark: light(behind(cell)) < 0.2,
    tooWide: outputs.filter(each => each.scrollWidth > each.clientWidth + 1).length,
  };
}
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterLab]:
    with JupyterLab(tmp_path_factory.mktemp("lab")) as started:
        yield started
    # Wait for the sidecars of the lab's kernels to end.
    runs(started.folder)


@pytest.fixture
def opened(lab: JupyterLab) -> Iterator[Callable[..., Any]]:
    """Open a notebook. Check that the page contacts only this server, and that no script fails."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        asked: list[str] = []
        problems: list[str] = []

        def open_notebook(name: str, *, prefers_dark: bool) -> Any:
            scheme = "dark" if prefers_dark else "light"
            page = browser.new_context(viewport=SIZE, color_scheme=scheme).new_page()
            page.set_default_timeout(DEADLINE_MS)
            page.on("request", lambda request: asked.append(request.url))
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.goto(lab.url(name), wait_until="domcontentloaded")
            page.wait_for_selector(".jp-Notebook .jp-Cell")
            return page

        yield open_notebook
        browser.close()
    assert problems == []
    assert [
        each
        for each in asked
        if not each.startswith((lab.origin, "data:", "blob:", "ws://127.0.0.1:"))
    ] == []


def run_all(page: Any) -> None:
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()


def wait_for_output(page: Any, number: int, matches: str) -> str:
    """Wait until the output of the cell matches. Return its text."""
    found = page.wait_for_function(
        """([number, matches]) => {
          const cell = document.querySelectorAll(".jp-Notebook .jp-Cell")[number];
          const words = cell?.querySelector(".jp-OutputArea")?.innerText ?? "";
          return new RegExp(matches, "s").test(words) && words;
        }""",
        arg=[number, matches],
    )
    return str(found.json_value())


def picture(page: Any, number: int, name: str) -> None:
    """Save a picture: for docs/guides/notebook.md with SHOTS=1, or into PAGE_SHOTS."""
    folder = ROOT / "docs" / "images" if os.environ.get("SHOTS") else os.environ.get("PAGE_SHOTS")
    if folder:
        page.locator(".jp-Notebook .jp-Cell").nth(number).screenshot(
            path=Path(folder) / f"{name}.png"
        )
        # Scrolling for the picture can put the pointer over a table row, whose colour then changes.
        page.mouse.move(0, 0)


def assert_readable(seen: dict[str, Any], *, dark: bool) -> None:
    assert seen["isDark"] == dark
    assert seen["contrast"] >= 4.5
    assert seen["tooWide"] == 0
    assert len(seen["widths"]) == 2
    assert min(seen["widths"]) > 100


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_report_is_live_and_readable_with_each_theme(
    lab: JupyterLab, opened: Callable[..., Any], theme: str
) -> None:
    """One report updates itself while the cell runs, and becomes the final report."""
    lab.set("themes", theme=f"JupyterLab {theme.capitalize()}")
    lab.write(f"{theme}.ipynb", [each.replace("END", f"end-{theme}") for each in CELLS])
    page = opened(f"{theme}.ipynb", prefers_dark=theme == "dark")
    run_all(page)

    first = wait_for_output(page, 1, r"run \S+: 1 rank, running.*steps\s+p50.*as of")
    as_of = re.search(r"as of [^;]*", first)
    assert as_of is not None
    wait_for_output(page, 1, f"running.*as of (?!{as_of[0].removeprefix('as of ')})")
    live = page.evaluate(SEEN, 1)
    picture(page, 1, f"notebook-{theme}")
    (lab.folder / f"end-{theme}").touch()
    wait_for_output(page, 3, "printed")
    ended, again, by_itself = (page.evaluate(SEEN, number) for number in (1, 2, 3))

    assert "running" in live["words"][0]
    for seen in (live, ended, again):
        assert len(seen["words"]) == 1
        assert_readable(seen, dark=theme == "dark")
    assert all(": 1 rank, ended" in seen["words"][0] for seen in (ended, again))
    assert ended["words"][0].split("steps")[0] == again["words"][0].split("steps")[0]
    # The user's own output is visible too.
    assert sorted("run 2" in each for each in by_itself["words"]) == [False, True]
    assert_readable(by_itself, dark=theme == "dark")
    page.keyboard.press("Control+s")
    page.wait_for_function("!document.querySelector('.jp-mod-dirty')")


def test_report_is_shown_in_an_untrusted_notebook(
    lab: JupyterLab, opened: Callable[..., Any]
) -> None:
    """JupyterLab removes scripts and styles from an untrusted notebook.

    Without scripts and styles, the report has the same content.
    """
    path = lab.folder / "light.ipynb"
    if not path.exists():
        pytest.skip(
            "test_report_is_live_and_readable_with_each_theme[light] has not left its notebook"
        )
    kept = json.loads(path.read_text())
    for cell in kept["cells"]:
        cell["metadata"].pop("trusted", None)
        cell["outputs"] = [each for each in cell["outputs"] if each["output_type"] != "stream"]
    lab.set("themes", theme="JupyterLab Light")
    (lab.folder / "foreign.ipynb").write_text(json.dumps(kept))
    page = opened("foreign.ipynb", prefers_dark=False)

    wait_for_output(page, 1, "1 rank, ended.*Next: ")
    seen = page.evaluate(SEEN, 1)

    assert_readable(seen, dark=False)
    assert "lost records" in seen["words"][0]
