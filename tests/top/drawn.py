"""Run the application on a terminal of the tests, and read the text on its screen."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textual", reason="Textual is not installed: pip install 'torchlens-perf[top]'")

from textual.pilot import Pilot

from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.top.app import Top
from torchlens_perf.top.text import Terminal

LOOK_S = 0.02


class Drawn:
    """A context manager in which the application runs."""

    def __init__(
        self,
        run: Path | None,
        folder: Path,
        size: tuple[int, int] = (80, 24),
        terminal: Terminal | None = None,
    ) -> None:
        run_directory = RunDirectory(run) if run is not None else None
        self.app = Top(run_directory, folder, terminal or Terminal(), look_s=LOOK_S)
        self._test: AbstractAsyncContextManager[Pilot[None]] = self.app.run_test(size=size)
        self._pilot: Pilot[None] | None = None

    async def __aenter__(self) -> Drawn:
        self._pilot = await self._test.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._test.__aexit__(*error)

    @property
    def pilot(self) -> Pilot[None]:
        assert self._pilot is not None
        return self._pilot

    def lines(self) -> list[str]:
        """Return the lines on the screen."""
        return text_of(self.app.export_screenshot())

    async def press(self, *keys: str) -> None:
        # Each key is pressed after the screen of the previous key is drawn.
        for key in keys:
            await self.pilot.press(key)
            await self.pilot.pause()

    async def sees(
        self, what: str | Callable[[list[str]], object], timeout_s: float = 20
    ) -> list[str]:
        """Wait until the text is on the screen, with single spaces.

        Raises AssertionError with the screen's text after a timeout.
        """
        for _ in range(round(timeout_s / LOOK_S)):
            lines = self.lines()
            # A sentence may be wrapped over several lines.
            if what in " ".join(" ".join(lines).split()) if isinstance(what, str) else what(lines):
                return lines
            await self.pilot.pause(LOOK_S)
        raise AssertionError("\n".join(self.lines()))


def text_of(svg: str) -> list[str]:
    """Return the lines of a screenshot, each with as many columns as were drawn."""
    found: dict[float, list[tuple[float, str]]] = {}
    for kind, x, y, text in re.findall(
        r'<text class="([^"]*)" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>', svg
    ):
        if kind.endswith("-title"):
            continue
        found.setdefault(float(y), []).append((float(x), html.unescape(text).replace("\xa0", " ")))
    lines = []
    for y in sorted(found):
        line = ""
        for x, text in sorted(found[y]):
            line = line.ljust(round(x / 12.2)) + text
        lines.append(line.rstrip())
    return lines


def runs(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario with a time limit of a minute."""
    asyncio.run(asyncio.wait_for(scenario(), 60))
