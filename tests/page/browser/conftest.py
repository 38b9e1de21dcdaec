"""Fixtures: a browser for all tests, a tab for each test, and pages of simulated runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.browser.tab import ARGUMENTS, CHROMIUM, DESK, LOADS_WITHIN_MS, PHONE, Tab
from tests.support.page_contents import enlarged
from torchlens_perf.page.contents import PageContents
from torchlens_perf.page.document.html import build_document
from torchlens_perf.page.gather.run_contents import gather_contents
from torchlens_perf.report import report_json
from torchlens_perf.run.directory import RunDirectory

TabOf = Callable[..., Tab]
WIDE_RANKS, WIDE_STEPS, WIDE_SLOW, WIDE_SINCE = 64, 600, 11, 300


# An open browser runs an event loop in this thread, but other tests need their own.
@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        started = player.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def tab_of(browser: Any) -> Iterator[TabOf]:
    """Return a function that opens a file in a new tab."""
    with contextlib.ExitStack() as leaving:

        def make(
            path: Path,
            *,
            dark: bool = False,
            phone: bool = False,
            scripts: bool = True,
            bypass: bool = False,
        ) -> Tab:
            context = browser.new_context(
                viewport=PHONE if phone else DESK, color_scheme="dark" if dark else "light", has_touch=phone,
                java_script_enabled=scripts, bypass_csp=bypass,
            )  # fmt: skip
            context.set_default_timeout(LOADS_WITHIN_MS)
            leaving.callback(context.close)
            return Tab(context.new_page(), path)

        yield make


def written(folder: Path, name: str, of: PageContents) -> Path:
    """Write the page of a run.

    Scripts on the page use the report as changed by the test.
    """
    path = folder / f"{name}.html"
    thinned: Any = report_json.to_json_types({**of["report"], "heat": None})
    path.write_text(build_document({**of, "thinned_report": thinned}), "utf-8")
    return path


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory, shown: PageContents) -> Path:
    """Return a page of eight ranks. SLOW_RANK is slow from SINCE_STEP on."""
    return written(tmp_path_factory.mktemp("pages"), "small", shown)


@pytest.fixture(scope="session")
def wide(shown: PageContents) -> PageContents:
    """Return page contents of 64 ranks with devices, memory and telemetry.

    WIDE_SLOW is slow from WIDE_SINCE on.
    """
    return enlarged(shown, WIDE_RANKS, WIDE_STEPS, WIDE_SLOW, WIDE_SINCE, devices=True)


@pytest.fixture(scope="session")
def wide_file(tmp_path_factory: pytest.TempPathFactory, wide: PageContents) -> Path:
    return written(tmp_path_factory.mktemp("pages"), "wide", wide)


@pytest.fixture(scope="session")
def device_file(tmp_path_factory: pytest.TempPathFactory, on_device: RunDirectory) -> Path:
    return written(tmp_path_factory.mktemp("pages"), "device", gather_contents(on_device))


@pytest.fixture
def tab(tab_of: TabOf, file: Path) -> Tab:
    return tab_of(file).open()


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for screenshots: PAGE_SHOTS, or a temporary one."""
    folder = (
        Path(os.environ["PAGE_SHOTS"])
        if "PAGE_SHOTS" in os.environ
        else tmp_path_factory.mktemp("shots")
    )
    folder.mkdir(parents=True, exist_ok=True)
    return folder
