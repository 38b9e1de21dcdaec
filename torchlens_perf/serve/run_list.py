"""The list of runs as the server keeps it: looked for once for all viewers, read a page at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Sequence

from torchlens_perf.serve.readers import ReadError, Readers
from torchlens_perf.serve.runs import UNREADABLE, Found, RunLine, find_runs, lines_of

ROWS = 50
_LOOK_S = 3.0  # between two looks at the folder, at the least
_SHARE = 4  # looking takes one part of the time in so many
_PATIENCE_S = 1.0  # after it a viewer is shown what there is
_FIND_WITHIN_S, _READ_WITHIN_S = 120.0, 60.0
_READ_S = 0.5  # of one call: what was read is shown then
_MAX_LINES = 20_000  # kept


@dataclasses.dataclass(frozen=True)
class Listed:
    """One page of the list."""

    lines: list[RunLine | Found]
    """A Found is not read yet."""
    page: int
    """From 0."""
    pages: int
    total: int
    """Of runs whose names have what was searched for."""
    looked_unix_s: float
    problem: str
    """Why the folder could not be looked at just now; what was found before is shown."""


class RunList:
    """On the event loop's thread."""

    def __init__(self, folder: str, readers: Readers, found: Sequence[Found]) -> None:
        """found: by find_runs() just now."""
        self._folder, self._readers = folder, readers
        self._found, self._looked_unix_s, self._problem = list(found), time.time(), ""
        self._lines: OrderedDict[str, RunLine] = OrderedDict()
        self._next_s = time.monotonic() + _LOOK_S
        self._looking: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def page(self, page: int, search: str) -> Listed:
        """The runs of one page, the last changed first; what takes long is left for the next time."""
        deadline_s = time.monotonic() + _PATIENCE_S
        if self._looking is None and time.monotonic() >= self._next_s:
            self._looking = asyncio.create_task(self._look())
        if self._looking is not None:
            await asyncio.wait({self._looking}, timeout=_PATIENCE_S)
        found = [each for each in self._found if search.lower() in each.name.lower()] if search else self._found
        pages = max(1, -(-len(found) // ROWS))
        page = min(max(0, page), pages - 1)
        shown = found[page * ROWS : (page + 1) * ROWS]
        if any(self._line(each) is None for each in shown):
            if self._reading is None:
                self._reading = asyncio.create_task(self._read(shown))
            while self._reading is not None and (left_s := deadline_s - time.monotonic()) > 0:
                await asyncio.wait({self._reading}, timeout=left_s)
        lines = [self._line(each) or each for each in shown]
        return Listed(lines, page, pages, len(found), self._looked_unix_s, self._problem)

    def close(self) -> None:
        for task in (self._looking, self._reading):
            if task is not None:
                task.cancel()

    def _line(self, found: Found) -> RunLine | None:
        line = self._lines.get(found.name)
        return line if line is not None and line.changed_ns == found.changed_ns else None

    async def _look(self) -> None:
        began_s = time.monotonic()
        try:
            self._found = await self._readers.call(find_runs, self._folder, within_s=_FIND_WITHIN_S)
            self._looked_unix_s, self._problem = time.time(), ""
        except ReadError as error:
            self._problem = str(error)
        finally:
            took_s = time.monotonic() - began_s
            self._next_s = time.monotonic() + max(_LOOK_S, _SHARE * took_s)
            self._looking = None

    async def _read(self, shown: Sequence[Found]) -> None:
        """One after the other; a disk that does not answer for one costs that line."""
        try:
            while missing := [each for each in shown if self._line(each) is None]:
                try:
                    lines = await self._readers.call(lines_of, self._folder, missing, _READ_S, within_s=_READ_WITHIN_S)
                except ReadError as error:
                    lines = [RunLine(missing[0].name, missing[0].changed_ns, UNREADABLE, problem=str(error))]
                for line in lines:
                    self._lines[line.name] = line
                    self._lines.move_to_end(line.name)
            while len(self._lines) > _MAX_LINES:
                self._lines.popitem(last=False)
        finally:
            self._reading = None
