"""The live page in a real browser: it follows a run that is being made, keeps what is selected, asks nobody else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.browser.tab import need_browser
from tests.serve.test_serve import eventually, run_of
from tests.support.processes import ROOT, SCRIPTS, clean_environ

need_browser()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A watched loop on the CPU until it is told to stop: the folder of runs, and the file that tells it."""
    folder, stop = tmp_path / "runs", tmp_path / "stop"
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "train_until_told.py"), str(folder), str(stop)],
        env={**clean_environ(), "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield folder, stop
    finally:
        process.kill()
        process.wait()


def asked_of(page: Any, expression: str) -> Any:
    """None while the page is just being loaded anew."""
    from playwright.sync_api import Error

    try:
        return page.evaluate(expression)
    except Error:
        return None


def test_the_page_follows_a_run(training: tuple[Path, Path], browser: Any) -> None:
    """Steps come by themselves, what is selected stays, any step is there on demand; at the end the page says so."""
    folder, stop = training
    run = eventually(lambda: run_of(folder))
    assert run is not None
    server = subprocess.Popen(
        [sys.executable, "-m", "torchlens_perf", "serve", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        problems: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        page.get_by_role("link", name=run.name).click()
        drawn = "window.torchlensPage && torchlensPage.charts.length > 3 && torchlensPage.isDrawn"
        assert eventually(lambda: asked_of(page, drawn), 120)
        page.evaluate("window.loadedOnce = true")
        steps = "window.torchlensPage ? torchlensPage.contents.report.ranks[0].steps : 0"
        before = page.evaluate(steps)
        page.evaluate("window.torchlensPage?.view.set({step: 3, rank: 0})")
        assert eventually(lambda: (asked_of(page, steps) or 0) > before, 120)
        assert eventually(lambda: "read at" in page.inner_text("#live-status"), 60)
        assert page.evaluate("location.hash").endswith("step=3;rank=0")
        page.evaluate("document.getElementById('step').scrollIntoView()")
        picked = "document.querySelector('select[name=recorded-step]')?.value === '3'"
        assert eventually(lambda: asked_of(page, picked), 120)
        assert page.evaluate("window.loadedOnce")

        stop.touch()
        assert eventually(lambda: asked_of(page, "document.documentElement?.dataset.live === 'ended'"), 120)
        assert "ended" in page.inner_text("#live-status")
        assert page.locator("#capture").count() == 0
        base = address.partition("?")[0]
        assert [each for each in asked if not each.startswith((base, "data:", "blob:"))] == []
        assert problems == []
    finally:
        server.kill()
        server.communicate(timeout=20)
