"""Manage the live results of a watch: a notebook cell, callbacks and loggers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.output import logger
from torchlens_perf.results.alerts import AlertCallbacks
from torchlens_perf.results.logged_verdicts import VerdictLoggers
from torchlens_perf.results.notebook import NotebookCell

if TYPE_CHECKING:
    from torchlens_perf.results.ask import RunHandle


class LiveViews:
    """Notebook cell, callbacks and loggers of one watch. Used on the training thread only."""

    def __init__(self) -> None:
        self.cell = NotebookCell()
        self.loggers = VerdictLoggers()
        """Loggers of log_to()."""
        self.attached = ExitStack()
        """Contexts that end with the watch."""
        self.alerts = AlertCallbacks()
        """Callbacks of on_verdict()."""
        self._hears = self._writes = False

    def start_views(self, recorded: RunHandle) -> None:
        """Start the views that the user has requested since the last call, if the watch records."""
        session = recorded.session
        if session is None:
            return
        if self.loggers.requests and not self._writes and session.identity.rank == 0:
            self._writes = True
            if recorded.has_sidecar:
                self.alerts.callbacks.append(self.loggers.write_alert)
                self.attached.enter_context(self.loggers.attached_to(session))
            else:
                logger.warning("torchlens_perf: log_to() writes nothing: verdicts need the sidecar")
        if self.alerts.callbacks and not self._hears:
            self._hears = True
            if not recorded.has_sidecar:
                logger.warning(
                    "torchlens_perf: on_verdict() calls no callback: verdicts need the sidecar"
                )
                return
            with guard("listening for verdicts"):
                self.attached.enter_context(self.alerts.attached_to(session))

    def stop_views(self) -> None:
        """Stop all live views. In a forked child the parent's views stay."""
        with guard("ending what the run was shown by"):
            self.attached.close()

    def write_report(self, report: str) -> None:
        """Write the report that rank 0 has shown to the user's loggers."""
        if self._writes:
            self.loggers.write_report(report)
