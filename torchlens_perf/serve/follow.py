"""Keeps the newest page of a run for all viewers, who ask once a second whether there is a newer one.

A look opens one folder, at most once a second. The run is read only if a node has written its state since then, for a
quarter of the time at most. While no viewer asks, nothing is looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchlens_perf.serve.live_page import Rendered, rendered
from torchlens_perf.serve.run_list import changed_ns
from torchlens_perf.serve.run_names import ReadError
from torchlens_perf.verdicts.words.run_state import SILENT_S, ago

if TYPE_CHECKING:
    from torchlens_perf.serve.readers import Readers

LOOK_INTERVAL_S = 1.0
_ENDED_LOOK_INTERVAL_S = 5.0  # a run that has ended may begin again
_MIN_IDLE_RATIO, _MIN_IDLE_RATIO_ON_ERROR = 3, 1
_TIMEOUT_S = 1.0  # then a viewer is shown the page before
_LOOK_WITHIN_S, _READ_WITHIN_S = 5.0, 300.0
_GONE = 404
_WATCHED_S = 10.0


def look(path: str) -> tuple[str, float]:
    """Return a text that changes with each state that a node writes, and the state's age in seconds. In a reader."""
    changed = changed_ns(path)
    return f"{changed:x}", max(0.0, time.time() - changed / 1e9)


class Follower:
    """One run. On the event loop's thread; readers touch the disk."""

    def __init__(self, path: str, quick: Readers, slow: Readers, clock: Callable[[], float] = time.monotonic) -> None:
        """quick, slow: for looks, and for reading a whole run."""
        self.rendered: Rendered | None = None
        """The newest page."""
        self.problem: ReadError | None = None
        """Why the last look failed."""
        self.looks = self.readings = 0
        self._path, self._quick, self._slow, self._clock = path, quick, slow, clock
        self._looking: asyncio.Task[None] | None = None
        self._next_s = self._changed_s = self._asked_s = -float("inf")

    @property
    def is_needed(self) -> bool:
        """Whether a viewer has the run open, or waits for it."""
        return self._looking is not None or self._clock() - self._asked_s < _WATCHED_S

    async def page(self, patience_s: float = _READ_WITHIN_S) -> Rendered | None:
        """Return the run as it was a moment ago, or None if it is still being read after patience_s.

        Raises ReadError if the run is gone, or could never be read.
        """
        looking = self._look_if_due()
        if looking is not None:
            await asyncio.wait({looking}, timeout=patience_s if self.rendered is None else _TIMEOUT_S)
        if self.problem is not None and (self.rendered is None or self.problem.status == _GONE):
            raise self.problem
        return self.rendered

    def news(self) -> dict[str, object]:
        """Return what is known now. What has changed since the last look follows in the next second.

        version: of the newest page, "" before there is one. problem: why the run cannot be read, or that it is silent.
        """
        self._look_if_due()
        is_live = self.rendered is None or self.rendered.is_live
        silent_s = self._clock() - self._changed_s
        problem = ""
        if self.problem is not None:
            problem = str(self.problem)
        elif self.rendered is not None and is_live and silent_s > SILENT_S:
            problem = f"no new data for {ago(silent_s)}. No rank has ended, and no sidecar writes its state"
        version = self.rendered.version if self.rendered is not None else ""
        return {"version": version, "is_live": is_live, "problem": problem}

    def _look_if_due(self) -> asyncio.Task[None] | None:
        """Return the look that is under way, if any."""
        self._asked_s = self._clock()
        if self._looking is None and self._asked_s >= self._next_s:
            self._looking = asyncio.create_task(self._look())
        return self._looking

    async def _look(self) -> None:
        began_s = self._clock()
        self.looks += 1
        try:
            version, age_s = await self._quick.call(look, self._path, within_s=_LOOK_WITHIN_S)
            if self.rendered is None or version != self.rendered.version:
                self.readings += 1
                self.rendered = await self._slow.call(
                    rendered, self._path, version, within_s=_READ_WITHIN_S, late="it was not read"
                )
                self._changed_s = began_s - age_s
            self.problem = None
        except ReadError as error:
            self.problem = error
        finally:
            is_over = self.rendered is not None and not self.rendered.is_live
            now_s = self._clock()
            ratio = _MIN_IDLE_RATIO if self.problem is None else _MIN_IDLE_RATIO_ON_ERROR
            least_s = _ENDED_LOOK_INTERVAL_S if is_over else LOOK_INTERVAL_S
            self._next_s = now_s + max(least_s, ratio * (now_s - began_s))
            self._looking = None
