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
    from torchlens_perf.recorder.session import Session
    from torchlens_perf.results.alerts import Callback
    from torchlens_perf.results.ask import RunHandle
    from torchlens_perf.results.logged_verdicts import LogRequest


class LiveViews:
    """Notebook cell, callbacks and loggers of one watch. Used on the training thread only."""

    def __init__(self) -> None:
        self.cell = NotebookCell()
        self._alerts = AlertCallbacks()
        self._loggers = VerdictLoggers()
        self._hears = self._writes = False
        self._attached = ExitStack()

    @property
    def callbacks(self) -> list[Callback]:
        """Callbacks of on_verdict()."""
        return self._alerts.callbacks

    def add_callback(self, recorded: RunHandle, callback: Callback) -> None:
        """Add a callback, see Watch.on_verdict(). It may be added before the watch begins."""
        self.callbacks.append(callback)
        if recorded.session is not None:
            self.start_views(recorded.session, has_sidecar=recorded.has_sidecar)

    def add_logger(self, recorded: RunHandle, asked: LogRequest) -> None:
        """Add a logger, see Watch.log_to(). It may be added before the watch begins."""
        self._loggers.add_logger(asked)
        if recorded.session is not None:
            self.start_views(recorded.session, has_sidecar=recorded.has_sidecar)

    def start_views(self, session: Session, *, has_sidecar: bool) -> None:
        """Start the views that the user has requested since the last call."""
        if self._loggers.has_loggers and not self._writes and session.identity.rank == 0:
            self._writes = True
            if has_sidecar:
                self.callbacks.append(self._loggers.write_alert)
                self._attached.enter_context(self._loggers.attached_to(session))
            else:
                logger.warning("torchlens_perf: log_to() writes nothing: verdicts need the sidecar")
        if self.callbacks and not self._hears:
            self._hears = True
            if not has_sidecar:
                logger.warning(
                    "torchlens_perf: on_verdict() calls no callback: verdicts need the sidecar"
                )
                return
            with guard("listening for verdicts"):
                self._attached.enter_context(self._alerts.attached_to(session))

    def show_in_cell(self, recorded: RunHandle) -> None:
        """Show the results in the running notebook cell, see Watch._ipython_display_()."""
        self.cell.show_results(recorded, self._attached.enter_context)

    def stop_views(self) -> None:
        """Stop all live views. In a forked child the parent's views stay."""
        with guard("ending what the run was shown by"):
            self._attached.close()

    def write_report(self, report: str) -> None:
        """Write the report that rank 0 has shown to the user's loggers."""
        if self._writes:
            self._loggers.write_report(report)
