"""The pictures of the page in the docs: made with SHOTS=1, light, dark and on a phone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.page.browser.conftest import Tab
from tests.support.processes import ROOT

IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 400_000


@pytest.mark.skipif("SHOTS" not in os.environ, reason="SHOTS=1 writes the pictures into docs/images")
@pytest.mark.parametrize("name", ["light", "dark", "phone"])
def test_shots(name: str, tab_of: Callable[..., Tab], slow_rank_page: Path) -> None:
    tab = tab_of(slow_rank_page, dark=name == "dark", phone=name == "phone").open("#verdicts;step=120;rank=3")
    IMAGES.mkdir(exist_ok=True)
    path = IMAGES / f"page-{name}.png"
    tab.page.set_viewport_size({"width": 390, "height": 1600} if name == "phone" else {"width": 1280, "height": 1700})
    tab.page.wait_for_timeout(1000)
    tab.settle()
    tab.page.screenshot(path=path)
    assert path.stat().st_size <= MAX_BYTES
