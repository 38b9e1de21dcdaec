"""Follows a run for all who look at it: one look a second at its directory, one reading of what is new for everybody.

A look opens one folder. Only where a node has written its state since, the run is read; that takes one part of the time
in _SHARE at the most. Viewers hear that there is something newer, in some bytes, and fetch it when they can: a slow one
fetches the newest, and nothing is kept for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from torchlens_perf.serve.live_page import Rendered, rendered
from torchlens_perf.serve.readers import ReadError
from torchlens_perf.serve.runs import changed_ns
from torchlens_perf.verdicts.words.run_state import SILENT_S, ago

if TYPE_CHECKING:
    from torchlens_perf.serve.readers import Readers
    from torchlens_perf.serve.static_files import Addresses

LOOK_S = 1.0
HEARTBEAT_S = 15.0  # between two lines to a viewer at most: whoever is gone is noticed then
_ENDED_LOOK_S = 5.0  # at a run that has ended: it may begin again
_SHARE = 4
_PATIENCE_S = 1.0  # of a viewer, where there is a page that may be old
_LOOK_WITHIN_S, _READ_WITHIN_S = 5.0, 300.0
_GONE = 404


@dataclasses.dataclass(frozen=True)
class News:
    """What viewers are sent: all of it each time, so that whoever has missed some has missed nothing."""

    version: str
    """Of the newest page; "" where there is none yet."""
    is_live: bool
    problem: str
    """Why the run cannot be read just now, or that it is silent; "" where all is well."""


def look(path: str) -> tuple[str, float]:
    """What changes with each state that a node writes, and how many seconds ago that was. In a reader."""
    changed = changed_ns(path)
    return f"{changed:x}", max(0.0, time.time() - changed / 1e9)


class Follower:
    """One run. On the event loop's thread; what touches the disk is done by readers."""

    def __init__(
        self, path: str, quick: Readers, slow: Readers, addresses: Addresses,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """quick, slow: for looks, and for reading a whole run."""
        self.rendered: Rendered | None = None
        """The newest page."""
        self.problem: ReadError | None = None
        """Why the last look has failed."""
        self.looks = self.readings = self.viewers = 0
        self._path, self._addresses = path, addresses
        self._quick, self._slow, self._clock = quick, slow, clock
        self._news, self._told = News("", True, ""), asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._next_s = self._changed_s = -float("inf")
        self._closed = False

    @property
    def is_needed(self) -> bool:
        """Whether somebody waits for it."""
        return self.viewers > 0 or self._looking is not None

    async def page(self, patience_s: float = _READ_WITHIN_S) -> Rendered | None:
        """The run as it is now, or was a moment ago; None where it is still being read after patience_s.

        Raises ReadError where it is gone, or could never be read.
        """
        if self._looking is not None or self._clock() >= self._next_s:
            await asyncio.wait({self._look()}, timeout=patience_s if self.rendered is None else _PATIENCE_S)
        if self.problem is not None and (self.rendered is None or self.problem.status == _GONE):
            raise self.problem
        return self.rendered

    async def news(self) -> AsyncGenerator[News | None, None]:
        """What there is, at once and whenever it changes; None where nothing did for a while. Ends with close()."""
        self.viewers += 1
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
        sent: News | None = None
        try:
            while not self._closed:
                told, now = self._told, self._news
                if now != sent and (now.version or now.problem):
                    sent = now
                    yield now
                    continue
                try:
                    await asyncio.wait_for(told.wait(), HEARTBEAT_S)
                except asyncio.TimeoutError:
                    yield None
        finally:
            self.viewers -= 1

    def close(self) -> None:
        """Lets all viewers go."""
        self._closed = True
        self._told.set()
        for task in (self._following, self._looking):
            if task is not None:
                task.cancel()

    async def _follow(self) -> None:
        """While somebody looks."""
        try:
            while self.viewers:
                await asyncio.shield(self._look())
                await asyncio.sleep(max(0.0, self._next_s - self._clock()))
        finally:
            self._following = None

    def _look(self) -> asyncio.Task[None]:
        """The look that is under way, or a new one."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_and_read())
            self._looking.add_done_callback(self._looked)
        return self._looking

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looking = None

    async def _look_and_read(self) -> None:
        began_s = self._clock()
        self.looks += 1
        try:
            version, age_s = await self._quick.call(look, self._path, within_s=_LOOK_WITHIN_S)
            if self.rendered is None or version != self.rendered.version:
                self.readings += 1
                self.rendered = await self._slow.call(
                    rendered, self._path, version, self._addresses, within_s=_READ_WITHIN_S, late="it was not read"
                )
                self._changed_s = began_s - age_s
            self.problem = None
        except ReadError as error:
            self.problem = error
        is_over = self.rendered is not None and not self.rendered.is_live
        now_s = self._clock()
        share = _SHARE if self.problem is None else 2  # whoever waits for a disk wants to know when it is back
        self._next_s = now_s + max(_ENDED_LOOK_S if is_over else LOOK_S, (share - 1) * (now_s - began_s))
        self._tell(now_s)

    def _tell(self, now_s: float) -> None:
        is_live = self.rendered is None or self.rendered.is_live
        silent_s = now_s - self._changed_s
        problem = ""
        if self.problem is not None:
            problem = str(self.problem)
        elif is_live and silent_s > SILENT_S:
            problem = f"nothing new for {ago(silent_s)}: no rank has ended, and the run's sidecars write nothing"
        news = News(self.rendered.version if self.rendered is not None else "", is_live, problem)
        if news != self._news:
            told, self._news, self._told = self._told, news, asyncio.Event()
            told.set()
