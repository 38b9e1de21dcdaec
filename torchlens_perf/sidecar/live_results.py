"""Deliver results of a live run to its own processes: notebooks, w.summary() and verdict callbacks.

A process requests results through a mailbox in the folder of its ring (run/mailbox.py). The sidecar
answers within a round. The sidecar computes results only on request.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.run import mailbox
from torchlens_perf.run.file_checks import CLOCK_TICK_NS

if TYPE_CHECKING:
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.sidecar.node import Sidecar

MAX_RANKS = 256
"""Largest number of ranks for which the sidecar computes results itself.

For larger jobs, the computation would take seconds, and the sidecar would read no ring in this
time. The sidecar then only saves its state. The requester computes the results from the state.
"""
_VIEW_INTERVAL_S = 1.0
_MIN_IDLE_RATIO = 20.0


class LiveResultDelivery:
    """Responder to requests of this node's processes for live results. Not thread-safe."""

    def __init__(
        self,
        sidecar: Sidecar,
        results: Callable[[RunDirectory], str] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """results: computes a run's results as text from the saved states of its nodes.

        `results` may raise OSError and RunStoreError. Without `results`, requesters read the run
        directory themselves. clock: a clock in seconds.
        """
        self._sidecar = sidecar
        self._results = results
        self._clock = clock
        self._changes_ns: list[int] = []
        self._answers: list[Path] = []
        self._views: list[Path] = []
        self._alerts: list[Path] = []
        self._asked: dict[Path, str] = {}
        self._view_due_s = float("-inf")
        self._view_records = -1  # number of records in the last view
        self._delivered: tuple[int, list[Path]] = 0, []

    def poll_requests(self) -> frozenset[str]:
        """Return the kinds of requests without an answer: mailbox.RESULTS and mailbox.STEPS.

        The call is cheap if nothing has changed.
        """
        changes_ns = self._sidecar.run.local_change_times_ns()
        if changes_ns != self._changes_ns:
            mailboxes = self._sidecar.run.find_local_mailboxes
            self._answers, self._views = mailboxes(mailbox.ANSWER), mailboxes(mailbox.VIEW)
            self._alerts = mailboxes(mailbox.ALERTS)
            # A second mailbox in the same clock tick would not change the folder's modification
            # time.
            settled = max(changes_ns) < time.time_ns() - CLOCK_TICK_NS
            self._changes_ns = changes_ns if settled else []
        questions = {path: mailbox.read_question(path) for path in self._answers}
        self._asked = {path: text for path, text in questions.items() if text}
        return frozenset(self._asked.values())

    @property
    def is_watched(self) -> bool:
        """True if a process shows a continuous view of the run."""
        return bool(self._views)

    def deliver_due(self, now_s: float) -> None:
        """Answer requests and update views and alerts.

        Call this method after counting records. If steps are requested, write the records first.
        now_s: CLOCK_MONOTONIC. Raises OSError and RunStoreError.
        """
        if self._alerts:
            self._deliver_alerts()
        if not self._asked and not self._views:
            return
        asked = list(self._asked)
        running = {source.path for source in self._sidecar.sources.unfinished_rings()}
        views = [path for path in self._views if path.with_suffix(".ring") in running]
        counted = sum(source.state.counted for source in self._sidecar.sources)
        due = bool(views) and now_s >= self._view_due_s and counted != self._view_records
        if not asked and not due:
            return
        began_s, text = self._clock(), ""
        world_sizes = {source.state.identity.world_size for source in self._sidecar.sources}
        try:
            self._sidecar.save_state()
            if self._results is not None and max(world_sizes, default=1) <= MAX_RANKS:
                text = self._results(self._sidecar.run)
        finally:
            # Deliver an answer even after an error. Otherwise the requesters would wait.
            _deliver_to_each(asked, text)
        if views:
            _deliver_to_each(views, text)
            self._view_records = counted
            self._view_due_s = now_s + max(
                _VIEW_INTERVAL_S, _MIN_IDLE_RATIO * (self._clock() - began_s)
            )

    def _deliver_alerts(self) -> None:
        alerts = self._sidecar.monitor.alerts
        now = alerts.raised, self._alerts
        if alerts.raised and now != self._delivered:
            rows = [dataclasses.asdict(alert) for alert in alerts.newest]
            _deliver_to_each(self._alerts, json.dumps(rows))
            self._delivered = now


def _deliver_to_each(mailboxes: Iterable[Path], text: str) -> None:
    for path in mailboxes:
        mailbox.deliver_text(str(path), text)
