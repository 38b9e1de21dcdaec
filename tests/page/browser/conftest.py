"""A real browser that can reach nothing but the file that it shows, and pages for it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * 127.0.0.1:1"]
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a browser there is nothing to test, which is said."""
    reason = ""
    if CHROMIUM is None:
        reason = "there is no Chromium here: make test-page installs it"
    else:
        for package in ("playwright", "bokeh", "axe_playwright_python"):
            with contextlib.suppress(ImportError):
                __import__(package)
                continue
            reason = f"{package} is not in this environment: make test-page installs it"
    here = Path(__file__).parent
    for item in items:
        if reason and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


class Tab:
    """A page in the browser: what went wrong in it, and what it has asked for."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page, self.path = page, path
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, fragment: str = "") -> Tab:
        """Loads it anew with this view, and waits until its charts are drawn."""
        self.page.goto("about:blank")
        self.page.goto(self.path.as_uri() + fragment)
        self.page.wait_for_function("window.torchlensPage && torchlensPage.charts.every(each => each.done)")
        return self

    def value(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def settle(self) -> None:
        """Until what was asked for is drawn."""
        self.page.wait_for_function("torchlensPage.idle")

    def foreign(self) -> list[str]:
        """What it asked for besides itself."""
        return [each for each in self.requests if not each.startswith((self.path.as_uri(), "data:", "blob:", "about:"))]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        started = player.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def tab_of(browser: Any) -> Iterator[Callable[..., Tab]]:
    """Opens files in tabs of their own."""
    with contextlib.ExitStack() as leaving:

        def make(path: Path, *, dark: bool = False, phone: bool = False, scripts: bool = True) -> Tab:
            context = browser.new_context(
                viewport=PHONE if phone else DESK, color_scheme="dark" if dark else "light", java_script_enabled=scripts
            )
            leaving.callback(context.close)
            return Tab(context.new_page(), path)

        yield make
