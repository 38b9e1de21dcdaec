"""The list of runs in a folder.

Readers read runs; the server keeps the lines for all viewers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchlens_perf.errors import DAMAGED_DATA, TorchlensPerfError, printable
from torchlens_perf.report.run_report import load_report
from torchlens_perf.serve.readers import ReaderCall, ReaderPool
from torchlens_perf.serve.run_names import ReadError
from torchlens_perf.store.run_folders import FoundRun, find_runs, is_run, open_run
from torchlens_perf.verdicts.kinds import BAD, GOOD, NEUTRAL, WARNING
from torchlens_perf.verdicts.words.run_state import describe_state, join_state
from torchlens_perf.view.headline import Headline, build_headlines, list_current

ROWS = 50
_SEVERITIES = (BAD, WARNING, NEUTRAL, GOOD)
_MAX_PROBLEM = 300
_LOOK_INTERVAL_S = 3.0
# Minimum idle time after reading the folder, or after a reader failed, relative to the time that
# this took.
_MIN_IDLE_RATIO = 4
# A viewer waits at most this long, and then receives the lines known so far.
_TIMEOUT_S = 1.0
_FIND_WITHIN_S, _READ_WITHIN_S = 120.0, 60.0
# A call to a reader reads runs for about this long.
_BATCH_S = 0.5


def _message(status: str, sentence: str, severity: str = NEUTRAL) -> Headline:
    """Return the headline of a run without a verdict."""
    return Headline(
        kind="", status=status, severity=severity, facts=(), cost_s_per_step=None, cost_share=None,
        sentence=sentence, cause="", action="", command="", is_over=False,
    )  # fmt: skip


_READING = _message("READING", "")


@dataclasses.dataclass(frozen=True)
class RunLine:
    """A line of the list: a run with its verdict and key figures."""

    name: str
    changed_ns: int = -1
    """The value of Found when the run was read.

    If Found has another value, the run must be read again.
    """
    headlines: tuple[Headline, ...] = (_READING,)
    """The current problems or, without any, a single verdict or the reason why no verdict is known."""
    step_s: float | None = None
    ranks: int | None = None
    seen: int = 0
    """Number of ranks in the report."""
    steps: int | None = None
    is_live: bool = False
    state: str = ""
    started: str = ""
    program: str = ""


SORTS: Mapping[str, Callable[[RunLine], object]] = {
    "program": lambda line: (line.program.casefold(), line.name) if line.program else None,
    "status": lambda line: (
        _SEVERITIES.index(line.headlines[0].severity),
        line.headlines[0].status,
    ),
    "rank": lambda line: (len(text), text) if (text := line.headlines[0].ranks) else None,
    "cost": lambda line: line.headlines[0].cost_share,
    "since": lambda line: (len(text), text) if (text := line.headlines[0].since) else None,
    "step": lambda line: line.step_s,
    "ranks": lambda line: line.ranks,
    "steps": lambda line: line.steps,
    "state": lambda line: (not line.is_live, line.state),
    "started": lambda line: line.started or None,
}
"""Sort keys of the columns. A run whose key is None comes last."""
LARGEST_FIRST = ("cost", "step", "ranks", "steps", "started")


@dataclasses.dataclass(frozen=True)
class RunListPage:
    """One page of the list of runs."""

    lines: list[RunLine]
    page: int
    """Index of the page, from 0."""
    pages: int
    matching: int
    """Number of runs that match the filter."""
    total: int
    unread: int
    """Number of unread runs on this page or, if the list is sorted by a column, among all matching
    runs.
    """
    looked_unix_s: float
    problem: str
    """The reason why the last look at the folder failed.

    The list then shows the runs of the previous look.
    """


class RunList:
    """All runs of a folder. Used only on the event loop's thread."""

    def __init__(self, folder: str, readers: ReaderPool, found: Sequence[FoundRun]) -> None:
        """found: the result of find_runs() a moment ago."""
        self._folder, self._readers = folder, readers
        self._found, self._looked_unix_s, self._problem = list(found), time.time(), ""
        self.lines: dict[str, RunLine] = {}
        self._next_s = time.monotonic() + _LOOK_INTERVAL_S
        self._looking: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._first: tuple[str, ReaderCall[list[RunLine]]] | None = None
        """The run that is being read, and the call that reads it."""
        self._retry_s: dict[str, float] = {}
        """Times before which runs are not read again, because their disk did not answer."""

    async def load_page(
        self, page: int, search: str = "", sort: str = "", pinned: Sequence[str] = ()
    ) -> RunListPage:
        """Return one page of the matching runs: pinned ones, then the most recently changed ones.

        Runs that take long to read appear later.

        sort: a key of SORTS, with a hyphen in front for the opposite order. pinned: names.
        """
        deadline_s = time.monotonic() + _TIMEOUT_S
        if self._looking is None and time.monotonic() >= self._next_s:
            self._looking = asyncio.create_task(self._poll_folder())
        if self._looking is not None:
            await asyncio.wait({self._looking}, timeout=_TIMEOUT_S)
        is_sorted = sort.removeprefix("-") in SORTS
        while True:
            found = [each for each in self._found if self._matches(each, search.casefold())]
            if is_sorted:
                found = self._sort(found, sort)
            found.sort(key=lambda each: each.name not in pinned)
            pages = max(1, -(-len(found) // ROWS))
            page = min(max(0, page), pages - 1)
            shown = found[page * ROWS : (page + 1) * ROWS]
            unread = [each for each in (found if is_sorted else shown) if self._is_unread(each)]
            if unread and self._reading is None:
                self._reading = asyncio.create_task(self._read_lines(unread[:ROWS]))
            left_s = deadline_s - time.monotonic()
            if self._reading is None or left_s <= 0:
                break
            await asyncio.wait({self._reading}, timeout=left_s)
        lines = [self._last_known_line(each) for each in shown]
        return RunListPage(
            lines,
            page,
            pages,
            len(found),
            len(self._found),
            len(unread),
            self._looked_unix_s,
            self._problem,
        )

    def _is_unread(self, found: FoundRun) -> bool:
        retry_s = self._retry_s.get(found.name)
        if retry_s is not None:
            return time.monotonic() >= retry_s
        return self._last_known_line(found).changed_ns != found.changed_ns

    def _last_known_line(self, found: FoundRun) -> RunLine:
        """Return the last known line of a run, or a line on the reason for having none."""
        line = self.lines.get(found.name)
        if line is None and self._first is not None and self._first[0] == found.name:
            return RunLine(found.name, headlines=(_message("READING", self._first[1].describe()),))
        return line or RunLine(found.name)

    def _matches(self, found: FoundRun, words: str) -> bool:
        line = self._last_known_line(found)
        states = [each.status for each in line.headlines]
        texts = (line.name, line.program, line.state, *states)
        return any(words in text.casefold() for text in texts)

    def _sort(self, found: Sequence[FoundRun], sort: str) -> list[FoundRun]:
        key = sort.removeprefix("-")
        values: dict[str, Any] = {name: SORTS[key](line) for name, line in self.lines.items()}
        known = [each for each in found if values.get(each.name) is not None]
        known.sort(
            key=lambda each: values[each.name],
            reverse=(key in LARGEST_FIRST) != sort.startswith("-"),
        )
        return known + [each for each in found if values.get(each.name) is None]

    async def _poll_folder(self) -> None:
        began_s = time.monotonic()
        try:
            call = self._readers.start(find_runs, self._folder, within_s=_FIND_WITHIN_S)
            self._found = await call.wait()
            self._looked_unix_s, self._problem = time.time(), ""
            self.lines = {
                each.name: line for each in self._found if (line := self.lines.get(each.name))
            }
        except ReadError as error:
            self._problem = str(error)
        finally:
            took_s = time.monotonic() - began_s
            self._next_s = time.monotonic() + max(_LOOK_INTERVAL_S, _MIN_IDLE_RATIO * took_s)
            self._looking = None

    async def _read_lines(self, runs: Sequence[FoundRun]) -> None:
        """Read runs in this order.

        If a disk does not answer, only the run on it is shown as unreadable.
        """
        try:
            while runs:
                began_s = time.monotonic()
                call = self._readers.start(
                    read_lines, self._folder, tuple(runs), _BATCH_S, within_s=_READ_WITHIN_S
                )
                self._first = runs[0].name, call
                try:
                    lines = await call.wait()
                    self._retry_s.pop(runs[0].name, None)
                except ReadError as error:
                    lines = [_unreadable_line(runs[0], error)]
                    now_s = time.monotonic()
                    self._retry_s[runs[0].name] = now_s + _MIN_IDLE_RATIO * (now_s - began_s)
                self.lines |= {line.name: line for line in lines}
                runs = runs[len(lines) :]
        finally:
            self._reading = self._first = None


# -- in a reader


def read_lines(folder: str, found: Sequence[FoundRun], budget_s: float) -> list[RunLine]:
    """Return lines for the first of these runs: at least one, and as many as fit in budget_s.

    folder: the folder of find_runs().
    """
    began_s, lines = time.monotonic(), list[RunLine]()
    is_one = is_run(folder)
    for each in found:
        if lines and time.monotonic() - began_s > budget_s:
            break
        lines.append(_read_line(folder if is_one else os.path.join(folder, each.name), each))
    return lines


def _unreadable_line(found: FoundRun, error: Exception) -> RunLine:
    words = (
        str(error) if isinstance(error, TorchlensPerfError) else f"{type(error).__name__}: {error}"
    )
    return RunLine(*found, (_message("UNREADABLE", printable(words)[:_MAX_PROBLEM], BAD),))


def _read_line(path: str, found: FoundRun) -> RunLine:
    try:
        run = open_run(path)
        if not any(run.nodes.glob("*.json")):
            waiting = _message("STARTING", "No step has been recorded yet.")
            return RunLine(*found, (waiting,), is_live=True, state="starting")
        report = load_report(run, lost_time=False)
        headlines = list_current(build_headlines(report))
    # One unreadable run must not hide the other runs.
    except (TorchlensPerfError, OSError, *DAMAGED_DATA) as error:
        return _unreadable_line(found, error)
    about, steps = report["run"], report["steps"]
    state, ranks = describe_state(about)
    return RunLine(
        *found,
        tuple(headlines) or (_message("NO VERDICT", ""),),
        steps["p50_s"],
        about["world_size"],
        about["ranks_seen"],
        steps["count"],
        about["live"],
        join_state(
            state
            if not about["live"]
            else "hang"
            if any(each.kind == "hang" for each in headlines)
            else "live",
            ranks,
        ),
        about["started"] or "",
        about["program"] or "",
    )
