"""Follows a run for all who look at it: its directory is looked at once a second at most, and read once for
everybody."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

from torchlens_perf.errors import TorchlensPerfError
from torchlens_perf.serve.worker import Rendered, Worker, rendered

LOOK_S = 1.0
_SHARE = 4  # a run that takes long to read is read so that it takes one part of the time in so many


def signature(run: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes whenever something was written there. One listing of each of two folders. Raises OSError."""
    found = []
    for folder in (run / "nodes", run / "steps"):
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.endswith((".json", ".parquet")):
                        of = entry.stat()
                        found.append((entry.name, of.st_mtime_ns, of.st_size))
        except FileNotFoundError:
            continue
    return tuple(sorted(found))


class Follower:
    """One run. On the server's thread; what touches the disk is done elsewhere."""

    def __init__(self, run: Path, worker: Worker) -> None:
        self.run = run
        self.version = 0
        """Counts up with each new content."""
        self.problem = ""
        """Why the newest look has failed; the content before it stays."""
        self.reads = 0
        self._worker = worker
        self._seen: tuple[tuple[str, int, int], ...] | None = None
        self._now: Rendered | None = None
        self._lock = asyncio.Lock()
        self._news = asyncio.Condition()
        self._viewers = 0
        self._following: asyncio.Task[None] | None = None
        self._rest_s = LOOK_S

    @property
    def is_watched(self) -> bool:
        """Whether somebody waits for changes."""
        return self._viewers > 0

    async def current(self) -> Rendered:
        """As it is now. Raises TorchlensPerfError where nothing could ever be read."""
        await self._look()
        if self._now is None:
            raise TorchlensPerfError(self.problem or f"{self.run.name} cannot be read")
        return self._now

    async def changes(self, since: int) -> AsyncGenerator[tuple[int, bool], None]:
        """The version whenever there is a newer one than was seen, and whether the run goes on; ends with the run."""
        since = max(since, 0)  # before the first look there is nothing to say
        self._viewers += 1
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
        try:
            while True:
                async with self._news:
                    while self.version <= since:
                        await self._news.wait()
                since = self.version
                is_live = self._now is None or self._now.is_live
                yield since, is_live
                if not is_live:
                    return
        finally:
            self._viewers -= 1
            if not self._viewers and self._following is not None:
                self._following.cancel()
                self._following = None

    async def _follow(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(self._rest_s)

    async def _look(self) -> None:
        async with self._lock:
            try:
                self.reads += 1
                seen = await asyncio.wait_for(asyncio.to_thread(signature, self.run), 10.0)
                if seen == self._seen:
                    return
                self._now = await self._worker.call(rendered, self.run)
                self._rest_s = max(LOOK_S, _SHARE * self._now.took_s)
                self._seen, self.problem = seen, ""
            except (OSError, TorchlensPerfError, asyncio.TimeoutError) as error:
                self.problem = str(error) or "the run directory does not answer"
                return
        async with self._news:
            self.version += 1
            self._news.notify_all()
