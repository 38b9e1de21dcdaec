"""Keep the newest page of a run for all viewers, who ask once a second for a newer one.

Each poll opens one folder, at most once a second. The run is read only if a node has written its
state since the last poll. Reading takes at most a quarter of the time. Runs without a viewer are
not polled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from torchlens_perf.serve.live_page import RenderedPage, render_page
from torchlens_perf.serve.readers import ReaderCall, ReaderPool
from torchlens_perf.serve.run_names import ReadError
from torchlens_perf.store.run_folders import last_change_ns
from torchlens_perf.verdicts.words.run_state import SILENT_S, format_age

LOOK_INTERVAL_S = 1.0
# An ended run can be restarted, so the server continues to poll it.
_ENDED_LOOK_INTERVAL_S = 5.0
_MIN_IDLE_RATIO, _MIN_IDLE_RATIO_ON_ERROR = 3, 1
# A viewer waits at most this long for a newer page, and then receives the previous page.
_TIMEOUT_S = 1.0
_LOOK_WITHIN_S, _READ_WITHIN_S = 5.0, 300.0
_GONE = 404
_WATCHED_S = 10.0


def poll_version(path: str) -> tuple[str, float]:
    """Return a version that changes whenever a node writes its state, and the state's age.

    Runs in a reader process.
    """
    changed = last_change_ns(path)
    return f"{changed:x}", max(0.0, time.time() - changed / 1e9)


class RunFollower:
    """One run and its newest page. Used only on the event loop's thread. Readers access files."""

    def __init__(
        self,
        path: str,
        quick: ReaderPool,
        slow: ReaderPool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """quick: readers for polls. slow: readers for whole runs."""
        self.rendered: RenderedPage | None = None
        """The newest page."""
        self.problem: ReadError | None = None
        """The reason why the last look failed."""
        self.looks = self.readings = 0
        self._path, self._quick, self._slow, self._clock = path, quick, slow, clock
        self._looking: asyncio.Task[None] | None = None
        self._call: ReaderCall[Any] | None = None
        self._next_s = self._changed_s = self._asked_s = -float("inf")

    @property
    def is_needed(self) -> bool:
        """True if a viewer has the run open or waits for it."""
        return self._looking is not None or self._clock() - self._asked_s < _WATCHED_S

    async def wait_for_page(self, patience_s: float = _READ_WITHIN_S) -> RenderedPage | None:
        """Return a recent page of the run, or None if the first page is not ready after patience_s.

        Raise ReadError if the run was removed, or has never been readable.
        """
        looking = self._start_poll_if_due()
        if looking is not None:
            await asyncio.wait(
                {looking}, timeout=patience_s if self.rendered is None else _TIMEOUT_S
            )
        if self.problem is not None and (self.rendered is None or self.problem.status == _GONE):
            raise self.problem
        return self.rendered

    def describe_reading(self) -> str:
        """Return what an unfinished poll waits for."""
        return self._call.describe() if self._call is not None else "reading has not started"

    def poll_state(self) -> dict[str, object]:
        """Return the result of the last poll, and start another poll if it is due.

        `version` is the version of the newest page, "" before the first one. `problem` is the
        reason why the run cannot be read, or a note that it has no new data.
        """
        self._start_poll_if_due()
        is_live = self.rendered is None or self.rendered.is_live
        silent_s = self._clock() - self._changed_s
        problem = ""
        if self.problem is not None:
            problem = str(self.problem)
        elif self.rendered is not None and is_live and silent_s > SILENT_S:
            problem = (
                f"no new data for {format_age(silent_s)}. No rank has ended, but no sidecar is writing the"
                " run's state"
            )
        version = self.rendered.version if self.rendered is not None else ""
        return {"version": version, "is_live": is_live, "problem": problem}

    def _start_poll_if_due(self) -> asyncio.Task[None] | None:
        """Start a poll if it is due. Return the running poll, or None."""
        self._asked_s = self._clock()
        if self._looking is None and self._asked_s >= self._next_s:
            self._looking = asyncio.create_task(self._poll())
        return self._looking

    async def _poll(self) -> None:
        began_s = self._clock()
        self.looks += 1
        try:
            self._call = self._quick.start(poll_version, self._path, within_s=_LOOK_WITHIN_S)
            version, age_s = await self._call.wait()
            if self.rendered is None or version != self.rendered.version:
                self.readings += 1
                self._call = self._slow.start(
                    render_page, self._path, version, within_s=_READ_WITHIN_S
                )
                self.rendered = await self._call.wait()
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
