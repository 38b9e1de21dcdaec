"""Results for those who look at a live run out of its own processes: a notebook, w.summary(), callbacks on verdicts.

They ask by a mailbox beside their ring (run/mailbox.py), and are answered within a round. Nothing is done for nobody.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.run import mailbox

if TYPE_CHECKING:
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.sidecar.node import Sidecar

MAX_RANKS = 256
"""Of larger jobs results are not put together here: that would take seconds, in which no ring is read. Who asks has the
state saved, and has a process of their own read it."""
FIGURE_PARTS = ("data", "communication")
"""Whose sums who logs figures gets, see results/figures.py."""
_VIEW_EVERY_S = 1.0
_MIN_REST = 20.0  # times what a view has taken
_TICK_NS = 50_000_000  # of a file system's clock: more than any kernel's


class LiveResults:
    """Belongs to the sidecar's thread."""

    def __init__(
        self,
        sidecar: Sidecar,
        results: Callable[[RunDirectory], str] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """results: a run's, as text, from what its nodes have saved; it may raise OSError and RunStoreError. None: who
        asks reads the run directory. clock: in seconds.
        """
        self._sidecar = sidecar
        self._results = results
        self._clock = clock
        self._rings = 0
        self._folders: list[str] = []  # that they lie in
        self._changes_ns: list[int] = []
        self._answers: list[Path] = []
        self._views: list[Path] = []
        self._alerts: list[Path] = []
        self._figures: list[Path] = []
        self._steps_shown: dict[Path, int] = {}
        self._asked: dict[Path, str] = {}
        self._view_due_s = float("-inf")
        self._view_of = -1  # how many records the last one was made of
        self._delivered: tuple[int, list[Path]] = 0, []

    def asked(self) -> frozenset[str]:
        """What somebody waits for just now: mailbox.RESULTS, mailbox.STEPS. Cheap where nothing has changed."""
        changes_ns = self._changes()
        if changes_ns != self._changes_ns:
            mailboxes = self._sidecar.run.local_mailboxes
            self._answers, self._views = mailboxes(mailbox.ANSWER), mailboxes(mailbox.VIEW)
            self._alerts, self._figures = mailboxes(mailbox.ALERTS), mailboxes(mailbox.FIGURES)
            # What comes in the same tick of the clock does not change the time.
            settled = max(changes_ns, default=0) < time.time_ns() - _TICK_NS
            self._changes_ns = changes_ns if settled else []
        questions = {path: mailbox.question(path) for path in self._answers}
        self._asked = {path: text for path, text in questions.items() if text}
        return frozenset(self._asked.values())

    def _changes(self) -> list[int]:
        """When something last came or went beside the rings on this node. The run directory's disk is not asked."""
        rings = [source.path for source in self._sidecar.sources]
        if len(rings) != self._rings:
            self._rings = len(rings)
            on_disk = self._sidecar.run.path
            folders = dict.fromkeys(str(path.parent) for path in rings if not path.is_relative_to(on_disk))
            self._folders = list(folders)
        return [_changed_ns(folder) for folder in self._folders]

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks at the run all the time."""
        return bool(self._views)

    def update(self, now_s: float) -> None:
        """Answers, and shows what is new; after the records were counted, and where steps were asked for, written.

        now_s: CLOCK_MONOTONIC. Raises OSError and RunStoreError.
        """
        if self._alerts:
            self._show_alerts()
        if self._figures:
            self._show_figures()
        asked, running = list(self._asked), {source.path for source in self._sidecar.sources.live()}
        views = [path for path in self._views if path.with_suffix(".ring") in running]
        counted = sum(source.state.counted for source in self._sidecar.sources)
        due = bool(views) and now_s >= self._view_due_s and counted != self._view_of
        if not asked and not due:
            return
        began_s, text = self._clock(), ""
        try:
            self._sidecar.save()
            if self._results is not None and self._ranks() <= MAX_RANKS:
                text = self._results(self._sidecar.run)
        finally:
            _deliver(asked, text)
        if views:
            _deliver(views, text)
            self._view_of = counted
            self._view_due_s = now_s + max(_VIEW_EVERY_S, _MIN_REST * (self._clock() - began_s))

    def _show_alerts(self) -> None:
        alerts = self._sidecar.monitor.alerts
        now = alerts.raised, self._alerts
        if alerts.raised and now != self._delivered:
            rows = [dataclasses.asdict(alert) for alert in alerts.newest]
            _deliver(self._alerts, json.dumps(rows))
            self._delivered = now

    def _show_figures(self) -> None:
        """Sums over a rank's steps, without its warm-up: who reads them takes differences."""
        sources = {source.path: source for source in self._sidecar.sources}
        for path in self._figures:
            source = sources.get(path.with_suffix(".ring"))
            steps = 0 if source is None else source.state.statistics.step.count
            if source is None or not steps or steps == self._steps_shown.get(path):
                continue
            of = source.state.statistics
            sums_ns = {part: of.parts[part].sum_ns for part in FIGURE_PARTS}
            _deliver([path], json.dumps({"steps": steps, "step": of.step.sum_ns, **sums_ns}))
            self._steps_shown[path] = steps

    def _ranks(self) -> int:
        return max((source.state.identity.world_size for source in self._sidecar.sources), default=1)


def _changed_ns(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:  # it went with its last ring
        return 0


def _deliver(mailboxes: Iterable[Path], text: str) -> None:
    for path in mailboxes:
        mailbox.deliver(str(path), text)
