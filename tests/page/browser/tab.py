"""A page in a real Chromium that can reach nothing but the file that it shows."""

from __future__ import annotations

import importlib.util
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * 127.0.0.1:1, EXCLUDE 127.0.0.1"]
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
PACKAGES = ("playwright", "axe_playwright_python")
DEADLINE_S = 60.0
LOADS_WITHIN_MS = 120_000  # what takes a second, on a busy machine


def need_browser() -> None:
    """Skips the module where there is no browser, and says why."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    reason = "there is no Chromium here" if CHROMIUM is None else ""
    if missing:
        reason = f"{', '.join(missing)} not installed"
    if reason:
        pytest.skip(f"{reason}: `make test-page` looks at pages in a browser", allow_module_level=True)


class Tab:
    """What went wrong in it, and what it has asked for."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page, self.path = page, path
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, fragment: str = "") -> Tab:
        """Loads it anew with this view, and waits until what can be seen is drawn."""
        self.page.goto("about:blank")
        self.page.goto(self.path.as_uri() + fragment)
        return self.settle()

    def value(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def until(self, expression: str) -> Any:
        """Its value, once that is true. Asked from here: the page's policy lets nobody evaluate text inside of it."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            found = self.value(expression)
            if found:
                return found
            self.page.wait_for_timeout(10)
        raise AssertionError(f"never: {expression}; {self.problems}")

    def settle(self) -> Tab:
        """Until what is to be seen is drawn, two frames ago."""
        self.until("Boolean(window.torchlensPage) && torchlensPage.isDrawn")
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        self.until("torchlensPage.isDrawn")
        return self

    def view(self) -> Any:
        return self.value("torchlensPage.view.now")

    def address(self) -> str:
        """Once the view has been written there."""
        self.page.wait_for_timeout(400)
        return str(self.page.url).partition("#")[2]

    def show(self, section: str) -> Any:
        """Scrolls there; the section, with its chart drawn."""
        self.value(f"document.getElementById('{section}').scrollIntoView()")
        self.settle()
        return self.page.locator(f"#{section}")

    def show_all(self) -> None:
        """Down the page, so that each chart is drawn."""
        for section in self.value("[...document.querySelectorAll('main > section')].map(each => each.id)"):
            self.show(section)

    def chart(self, name: str) -> Any:
        """The place of a chart, in sight."""
        found = self.page.locator(f"figure[data-chart={name}] .chart").first
        found.scroll_into_view_if_needed()
        self.settle()
        return found

    def named(self, name: str) -> str:
        """An expression for the chart of this name."""
        return f"torchlensPage.charts.find(({{figure}}) => figure.dataset.chart === '{name}')"

    def at(self, name: str, x: float, y: float) -> tuple[float, float]:
        """Where a place of the chart's own coordinates is in the window."""
        self.chart(name)
        inside = self.value(
            f"""(() => {{ const {{ plot }} = {self.named(name)}, box = plot.over.getBoundingClientRect();
            return [box.x + plot.valToPos({x}, "x"), box.y + plot.valToPos({y}, "y")]; }})()"""
        )
        return inside[0], inside[1]

    def tip(self) -> str:
        """What is said at the pointer; "" for nothing."""
        return "\n".join(self.page.locator(".tip:not([hidden])").all_inner_texts())

    def foreign(self) -> list[str]:
        """What it asked for besides itself."""
        return [each for each in self.requests if not each.startswith((self.path.as_uri(), "data:", "about:"))]
