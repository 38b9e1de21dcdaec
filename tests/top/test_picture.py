"""The screenshot of top in docs/guides/top.md.

PICTURE=1 draws it again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.live_simulation import LiveSimulation
from tests.support.processes import ROOT
from tests.top.drawn import Drawn, runs, text_of

PICTURE = ROOT / "docs" / "images" / "top.svg"
SIZE = (112, 32)


def test_documented_screenshot_has_the_current_titles_and_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture loads no font from the network."""
    faults = (
        "constant:rank=11,share=0.12,phase=data,since=32,until=160",
        "constant:rank=3,share=0.25,phase=forward,since=224",
    )

    # The command to copy contains a path relative to this folder.
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        with LiveSimulation(
            tmp_path / "20261123-140512-3fa9c1d2",
            16,
            *faults,
            node_size=8,
            total_steps=2000,
            seconds_ago=75,
        ) as live:
            live.add_blocks(2)
            async with Drawn(live.run.path, tmp_path, SIZE) as drawn:
                await drawn.sees("64 of 2,000 steps")
                for blocks in (2, 3, 3):
                    live.add_blocks(blocks)
                    await drawn.sees(f"{live.steps} of 2,000 steps")
                await drawn.sees("earlier no action needed: SLOW RANK rank 11")
                picture = _without_fonts(drawn.app.export_screenshot(title="torchlens-perf top"))
                if os.environ.get("PICTURE"):
                    PICTURE.write_text(picture)
                assert _fixed(text_of(PICTURE.read_text())) == _fixed(text_of(picture))

    runs(scenario)
    assert "http" not in PICTURE.read_text().replace("http://www.w3.org", "").replace(
        "https://www.textualize.io", ""
    )


def _without_fonts(picture: str) -> str:
    return re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)


def _fixed(lines: list[str]) -> list[str]:
    """Return titles and keys.

    Only these are returned, because other text depends on verdicts and numbers.
    """
    titles = [
        line for line in lines if re.match(r"  (Typical|Modules|Collectives|rank +step)", line)
    ]
    return [re.sub(r"\d+", "", line) for line in (*titles, lines[-1])]
