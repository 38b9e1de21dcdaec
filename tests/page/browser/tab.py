"""A page in a real Chromium that can access only the file that it shows."""

from __future__ import annotations

import importlib.util
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--host-resolver-rules=MAP * 127.0.0.1:1, EXCLUDE 127.0.0.1",
]
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
PACKAGES = ("playwright", "axe_playwright_python")
DEADLINE_S = 60.0
# A page loads within a second on an idle machine.
LOADS_WITHIN_MS = 120_000


def need_browser() -> None:
    """Skip the module if there is no browser."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    reason = "there is no Chromium here" if CHROMIUM is None else ""
    if missing:
        reason = f"{', '.join(missing)} not installed"
    if reason:
        pytest.skip(
            f"{reason}: `make test-page` looks at pages in a browser", allow_module_level=True
        )


class Tab:
    """A browser tab, with its errors and requests."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page, self.path = page, path
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on(
            "console",
            lambda message: self.problems.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, fragment: str = "") -> Tab:
        """Load the page with the given view, and wait until the visible part is drawn."""
        self.page.goto("about:blank")
        self.page.goto(self.path.as_uri() + fragment)
        return self.settle()

    def value(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def until(self, expression: str) -> Any:
        """Wait until a JavaScript expression is true and return its value.

        The test polls, because the page's policy forbids eval().
        """
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            found = self.value(expression)
            if found:
                return found
            self.page.wait_for_timeout(10)
        raise AssertionError(f"never: {expression}; {self.problems}")

    def settle(self) -> Tab:
        """Wait until the visible part has been drawn for two frames."""
        self.until("Boolean(window.torchlensPage) && torchlensPage.isDrawn")
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        self.until("torchlensPage.isDrawn")
        return self

    def view(self) -> Any:
        return self.value("torchlensPage.view.now")

    def address(self) -> str:
        """Return the page's address after the view has been written to it."""
        self.page.wait_for_timeout(400)
        return str(self.page.url).partition("#")[2]

    def show(self, section: str) -> Any:
        """Scroll to a section and return it, with its chart drawn."""
        self.value(f"document.getElementById('{section}').scrollIntoView()")
        self.settle()
        return self.page.locator(f"#{section}")

    def show_all(self) -> None:
        """Scroll down the page, because charts are drawn when they become visible."""
        for section in self.value(
            "[...document.querySelectorAll('main > section')].map(each => each.id)"
        ):
            self.show(section)

    def chart(self, name: str) -> Any:
        """Return the element of a chart, scrolled into view."""
        found = self.page.locator(f"figure[data-chart={name}] .chart").first
        found.scroll_into_view_if_needed()
        self.settle()
        return found

    def named(self, name: str) -> str:
        """Return a JavaScript expression for the chart with the given name."""
        return f"torchlensPage.charts.find(({{figure}}) => figure.dataset.chart === '{name}')"

    def at(self, name: str, x: float, y: float) -> tuple[float, float]:
        """Return the window position of a point in the chart's coordinates."""
        self.chart(name)
        inside = self.value(
            f"""(() => {{ const {{ plot }} = {self.named(name)}, box = plot.over.getBoundingClientRect();
            return [box.x + plot.valToPos({x}, "x"), box.y + plot.valToPos({y}, "y")]; }})()"""
        )
        return inside[0], inside[1]

    def tip(self) -> str:
        """Return the text of the tooltip, or "" if it is hidden."""
        return "\n".join(self.page.locator(".tip:not([hidden])").all_inner_texts())

    def foreign(self) -> list[str]:
        """Return requests to other addresses than the page's own."""
        return [
            each
            for each in self.requests
            if not each.startswith((self.path.as_uri(), "data:", "about:"))
        ]
