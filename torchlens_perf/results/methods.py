"""The methods of a watch and of a loaded run that show results. They import what they need when they are called."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchlens_perf.errors import ConfigError, RunStoreError, guard
from torchlens_perf.results import last_report

if TYPE_CHECKING:
    from torchlens_perf.results.alerts import Callback as OnVerdict
    from torchlens_perf.results.ask import RunHandle
    from torchlens_perf.results.live_views import LiveViews
    from torchlens_perf.results.notebook import Cell
    from torchlens_perf.results.summary import Summary

Backend = Literal["pandas", "polars", "pyarrow"]
_PAGE_TIMEOUT_S = 120.0


class HasResults(abc.ABC):
    """Results of a run, live or finished. Each call reads them anew."""

    run_dir: Path | None = None

    @abc.abstractmethod
    def _recorded(self) -> RunHandle:
        """What there is to show."""

    def summary(self) -> Summary:
        """Return the verdicts, step times and what recording costs, as they are now (run/verdicts.py).

        It takes a fraction of a second, and some seconds where the sidecar is busy; in a watch, the step in progress
        has that as the tool's time. Raises nothing of ours: what is missing is None, and `missing` says why.
        """
        from torchlens_perf.results.summary import summary

        return summary(self._recorded())

    def step_table(self, backend: Backend | None = None) -> Any:
        """Return a frame with a row per step and rank; docs/reference/run-directory.md describes the columns.

        backend: without it, pandas or polars, the one that is imported or else installed, or else pyarrow. Where there
        are no steps it is empty, and the log says why. Takes as long as summary(). Raises ConfigError for a backend
        that is not installed.
        """
        from torchlens_perf.results.tables import table

        return table(self._recorded(), "steps", backend)

    def report_html(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the run as one HTML file, as `torchlens-perf report RUN --html FILE` does, and return where it is.

        path: the file; without it, report.html in the run directory. A live run has what the sidecar has saved, which
        is some seconds old. Blocks the calling thread until another process has written it: a second or two, up to 120
        s. Raises RunStoreError, with what to do, where nothing is recorded, nothing is saved yet, or the file cannot be
        written.
        """
        from torchlens_perf.results import child

        if self.run_dir is None:
            raise RunStoreError(
                "there is no run to show: enter the watch first; where it is switched off, the log says why"
            )
        page = Path(path).absolute() if path is not None else self.run_dir / "report.html"
        child.output("report", str(self.run_dir.absolute()), "--html", str(page), timeout_s=_PAGE_TIMEOUT_S)
        return page

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        from torchlens_perf.results import ask, notebook

        return notebook.bundle(ask.results(self._recorded()))

    def _repr_html_(self) -> str:
        return self._repr_mimebundle_()["text/html"]


class ShowsResults(HasResults):
    """What Watch has of this package. On the training thread, between two steps, or after the end."""

    _live_views: LiveViews | None = None

    @abc.abstractmethod
    def _recording(self) -> ShowsResults:
        """The watch that records it: this one, or the one that this has joined."""

    def on_verdict(self, callback: OnVerdict) -> OnVerdict:
        """Calls callback(alert) for each verdict that begins, changes or ends (run/verdicts.py has Alert).

        At the end of a step, on the training thread, which waits for it; on rank 0 and the other ranks of its node. An
        exception is logged, and ends nothing. Raises ConfigError for what cannot be called.
        """
        if not callable(callback):
            raise ConfigError(f"callback={callback!r}: must be a function of one argument, the alert")
        self._views().on_verdict(self._recorded(), callback)
        return callback

    def log_to(self, logger: object, *, every_s: float = 10.0, step: Callable[[], int] | None = None) -> None:
        """Writes a few figures into the user's own logger as the run goes on, and what is found as text.

        logger: a SummaryWriter, a run of W&B, mlflow, a Hugging Face Trainer, an Accelerator, Lightning's Trainer,
        Fabric or one of its loggers, or a function of (figures: dict[str, float], step: int); several of
        them as a list. every_s: at most once in so long, at the end of a step, on the training thread. step: the step
        number that the logger gets; without it, how many steps this watch has counted. Names are listed in
        docs/guides/frameworks.md.
        On rank 0 alone; on the others this does nothing. What a logger raises is logged, and ends nothing. Raises
        ConfigError for what is no logger.
        """
        from torchlens_perf.results.figures import checked

        self._views().log_to(self._recorded(), checked(logger, every_s, step))

    def _ipython_display_(self) -> None:
        """Shows the run in a notebook's cell; live while it records, at an update a second at most, at a step's end."""
        self._views().display(self._recorded())

    def _views(self) -> LiveViews:
        from torchlens_perf.results.live_views import LiveViews

        watch = self._recording()
        watch._live_views = watch._live_views or LiveViews()
        return watch._live_views

    def _end_live(self) -> tuple[Cell | None, bool]:
        """The run ends. Returns the cell for its report, in a notebook, and whether it has been shown live there."""
        was_live = self._live_views is not None and self._live_views.cell.is_live
        if self._live_views is not None:
            self._live_views.end()
        with guard("looking for a notebook"):
            if last_report.in_notebook():
                return self._views().cell, was_live
        return None, False
