"""Methods of Watch and Run that return results. They import most modules when they are called."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchlens_perf.errors import ConfigError, RunStoreError, guard
from torchlens_perf.results import last_report

if TYPE_CHECKING:
    from torchlens_perf.check.mlperf import MlperfLog
    from torchlens_perf.results.alerts import Callback as OnVerdict
    from torchlens_perf.results.ask import RunHandle
    from torchlens_perf.results.live_views import LiveViews
    from torchlens_perf.results.notebook import NotebookCell
    from torchlens_perf.run.verdicts import Summary

Backend = Literal["pandas", "polars", "pyarrow"]
_PAGE_TIMEOUT_S = 120.0


class ResultMethods(abc.ABC):
    """Methods that return results of a live or finished run. Each call reads the results again."""

    run_dir: Path | None = None

    @abc.abstractmethod
    def _get_run_handle(self) -> RunHandle:
        """Return a handle that gives access to the results."""

    def summary(self) -> Summary:
        """Return the verdicts, step times and what recording costs, as they are now
        (run/verdicts.py).

        The call takes a fraction of a second, or a few seconds if the sidecar is busy. In a watch,
        the call counts as this package's overhead. Missing values are None; `missing` gives the
        reason.
        """
        from torchlens_perf.results.ask import request_summary

        return request_summary(self._get_run_handle())

    def step_table(self, backend: Backend | None = None) -> Any:
        """Return a frame with a row per step and rank; docs/reference/run-directory.md describes
        the columns.

        backend: by default pandas or polars, whichever is already imported, then whichever is
        installed, then pyarrow. Without steps the frame is empty, and the reason is logged. The
        call takes as long as summary(). Raise ConfigError for a backend that is not installed.
        """
        from torchlens_perf.results.tables import read_table

        return read_table(self._get_run_handle(), "steps", backend)

    def report_html(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the run as one HTML file, as `torchlens-perf report RUN --html FILE` does. Return
        its path.

        path: by default report.html in the run directory. The page of a live run shows what the
        sidecar has saved, which is a few seconds old. The call blocks until another process has
        written the file, usually for one or two seconds and at most 120 s. Raise RunStoreError,
        with advice, if nothing is recorded or saved yet, or if the file cannot be written.
        """
        from torchlens_perf.results import child

        if self.run_dir is None:
            raise RunStoreError(
                "there is no run to show: enter the watch first; where it is switched off, the log"
                " says why"
            )
        page = Path(path).absolute() if path is not None else self.run_dir / "report.html"
        child.run_and_capture(
            "report", str(self.run_dir.absolute()), "--html", str(page), timeout_s=_PAGE_TIMEOUT_S
        )
        return page

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        from torchlens_perf.results import ask, notebook

        return notebook.to_mime_bundle(ask.request_results(self._get_run_handle()))

    def _repr_html_(self) -> str:
        return self._repr_mimebundle_()["text/html"]


class LiveResultMethods(ResultMethods):
    """Methods of Watch that return results or show them during the run.

    Call these methods on the training thread between two steps, or after the end of the watch.
    """

    _live_views: LiveViews | None = None

    @abc.abstractmethod
    def _recording_watch(self) -> LiveResultMethods:
        """Return the watch that records: this watch, or the outer watch that it has joined."""

    def on_verdict(self, callback: OnVerdict) -> OnVerdict:
        """Call callback(alert) for each verdict that begins, changes or ends (Alert is in
        run/verdicts.py).

        The training thread calls it at the end of a step, on rank 0 and the other ranks of its
        node. Exceptions are logged and training continues. Raise ConfigError for an object that is
        not callable.
        """
        if not callable(callback):
            raise ConfigError(
                f"callback={callback!r}: must be a function of one argument, the alert"
            )
        views = self._get_live_views()
        views.alerts.callbacks.append(callback)
        views.start_views(self._get_run_handle())
        return callback

    def log_to(self, logger: object, *, step: Callable[[], int] | None = None) -> None:
        """Write verdicts, when they come, and the report at the end into the user's own logger.

        logger: a SummaryWriter, a run of W&B, mlflow, a Hugging Face Trainer, an Accelerator,
        Lightning's Trainer, or Fabric or one of its loggers. Several loggers are passed as a list.
        They are called on the training thread at the ends of steps. step: function that returns the
        step number for the logger; by default, the number of steps that this watch has counted.

        docs/guides/frameworks.md says where each logger shows the texts. Only rank 0 writes. On
        other ranks the call does nothing. Exceptions of a logger are logged and training continues.
        Raise ConfigError for an object that is not a logger.
        """
        from torchlens_perf.results.logged_verdicts import check_log_arguments

        request = check_log_arguments(logger, step)
        views = self._get_live_views()
        views.loggers.requests.append(request)
        views.start_views(self._get_run_handle())

    def mlperf(
        self,
        path: str | os.PathLike[str],
        *,
        count_samples: Callable[[], int] | None = None,
        **values: Any,
    ) -> MlperfLog:
        """Write the log of an MLPerf training result, by mlperf-logging. Return its MlperfLog.

        values: what the rules of the benchmark ask for, by its key, such as submission_benchmark.
        global_batch_size is required. count_samples: function that returns the samples trained so
        far; by default, steps times global_batch_size. Only rank 0 writes. Raise ConfigError if
        mlperf-logging is not installed.
        """
        from torchlens_perf.check.mlperf import MlperfLog

        return MlperfLog(path, values, self._get_run_handle().session, count_samples)

    def _ipython_display_(self) -> None:
        """Show the run in a notebook cell, which is updated at the ends of steps, at most once a
        second.
        """
        views = self._get_live_views()
        views.cell.show_results(self._get_run_handle(), views.attached.enter_context)

    def _get_live_views(self) -> LiveViews:
        from torchlens_perf.results.live_views import LiveViews

        watch = self._recording_watch()
        watch._live_views = watch._live_views or LiveViews()
        return watch._live_views

    def _end_live_views(self) -> tuple[NotebookCell | None, bool]:
        """Stop the live views. Return the notebook cell for the report, if any.

        The second value is True if the cell has shown live results.
        """
        was_live = self._live_views is not None and self._live_views.cell.is_live
        if self._live_views is not None:
            self._live_views.stop_views()
        with guard("looking for a notebook"):
            if last_report.is_in_notebook():
                return self._get_live_views().cell, was_live
        return None, False
