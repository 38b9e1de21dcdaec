"""Screenshots of the page for the docs.

SHOTS=1 makes the screenshots, light, dark and on a phone.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.page.browser.conftest import TabOf, written
from tests.page.browser.tab import need_browser
from tests.page.conftest import recorded
from tests.support.processes import ROOT
from torchlens_perf.page.gather.run_contents import gather_contents
from torchlens_perf.simulate.simulation import Topology

need_browser()

IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 400_000
FAULT = "constant:rank=3,share=0.25,phase=forward,since=100"


@pytest.fixture(scope="module")
def slow_rank_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a simulated run of eight ranks.

    Rank 3 is slow in the forward pass from step 100 on.
    """
    folder = tmp_path_factory.mktemp("slow")
    return written(
        folder,
        "slow-rank",
        gather_contents(recorded(folder, FAULT, steps=300, topology=Topology(4, 2))),
    )


@pytest.mark.skipif(
    "SHOTS" not in os.environ, reason="SHOTS=1 writes the pictures into docs/images"
)
@pytest.mark.parametrize("name", ["light", "dark", "phone"])
def test_documentation_screenshot_is_within_its_size_limit(
    name: str, tab_of: TabOf, slow_rank_page: Path
) -> None:
    tab = tab_of(slow_rank_page, dark=name == "dark", phone=name == "phone").open()
    IMAGES.mkdir(exist_ok=True)
    path = IMAGES / f"page-{name}.png"
    tab.page.set_viewport_size(
        {"width": 390, "height": 1600} if name == "phone" else {"width": 1280, "height": 1700}
    )
    tab.page.wait_for_timeout(500)
    tab.settle()
    tab.page.screenshot(path=path)
    assert path.stat().st_size <= MAX_BYTES
