"""Screenshots of a step's trace in the backends' own pages, for docs/images.

Pictures are taken only with SHOTS=1.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.processes import ROOT

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--host-resolver-rules=MAP * 127.0.0.1:1, EXCLUDE 127.0.0.1",
]
_MOST_BYTES = 300_000
shots = pytest.mark.skipif(
    os.environ.get("SHOTS") != "1", reason="draws docs/images anew: SHOTS=1 make test-backends"
)


@contextlib.contextmanager
def page(width: int = 1280, height: int = 800) -> Iterator[Any]:
    """Open a page in a real browser that can reach only loopback."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        yield browser.new_page(viewport={"width": width, "height": height})
        browser.close()


def drag(shown: Any, x: float, y: float, to_x: float) -> None:
    """Drag the border between two panes with the mouse."""
    shown.mouse.move(x, y)
    shown.mouse.down()
    shown.mouse.move(to_x, y, steps=8)
    shown.mouse.up()


def save(shown: Any, name: str) -> None:
    """Save the page as docs/images/backend-NAME.png."""
    path = ROOT / "docs" / "images" / f"backend-{name}.png"
    shown.wait_for_timeout(1000)  # Animations must have ended.
    shown.screenshot(path=path)
    assert path.stat().st_size <= _MOST_BYTES, f"{path} is too large"
