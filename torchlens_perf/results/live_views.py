"""What shows a watch while it records: a notebook's cell, callbacks, the user's logger. Made when first asked for."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.output import logger
from torchlens_perf.results.alerts import Alerts
from torchlens_perf.results.figures import Figures
from torchlens_perf.results.notebook import Cell

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session
    from torchlens_perf.results.alerts import Callback
    from torchlens_perf.results.ask import RunHandle
    from torchlens_perf.results.figures import Asked


class LiveViews:
    """Training thread."""

    def __init__(self) -> None:
        self.cell = Cell()
        self._alerts = Alerts()
        self._figures = Figures()
        self._hears = self._writes = False
        self._attached = ExitStack()

    @property
    def callbacks(self) -> list[Callback]:
        """Those of on_verdict()."""
        return self._alerts.callbacks

    def on_verdict(self, recorded: RunHandle, callback: Callback) -> None:
        """See Watch.on_verdict(). Before the watch begins, the callback waits for that."""
        self.callbacks.append(callback)
        if recorded.session is not None:
            self.begin(recorded.session, has_sidecar=recorded.has_sidecar)

    def log_to(self, recorded: RunHandle, asked: Asked) -> None:
        """See Watch.log_to(). Before the watch begins, the logger waits for that."""
        self._figures.add(asked)
        if recorded.session is not None:
            self.begin(recorded.session, has_sidecar=recorded.has_sidecar)

    def begin(self, session: Session, *, has_sidecar: bool) -> None:
        """The watch records from here on. Again, once more is asked for, begins what is missing."""
        if self._figures.is_asked and not self._writes and session.identity.rank == 0:
            self._writes = True
            if has_sidecar:
                self.callbacks.append(self._figures.heard)
                with guard("listening for figures"):
                    self._attached.enter_context(self._figures.listening(session))
            else:
                logger.warning("torchlens_perf: log_to() writes no figures: without a sidecar there are none")
        if self.callbacks and not self._hears:
            self._hears = True
            if not has_sidecar:
                logger.warning("torchlens_perf: on_verdict() calls nobody: without a sidecar no verdict is found")
                return
            with guard("listening for verdicts"):
                self._attached.enter_context(self._alerts.listening(session))

    def display(self, recorded: RunHandle) -> None:
        """See Watch._ipython_display_()."""
        self.cell.show(recorded, self._attached.enter_context)

    def end(self) -> None:
        """Nothing is shown live any more. In a forked child what the parent shows stays."""
        with guard("ending what the run was shown by"):
            self._attached.close()

    def ended(self, report: str) -> None:
        """Rank 0 has shown its report."""
        if self._writes:
            self._figures.ended(report)
