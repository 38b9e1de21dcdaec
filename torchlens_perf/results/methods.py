"""The methods of a watch that show its run. They import what they need when they are called."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import ConfigError, guard
from torchlens_perf.results import last_report

if TYPE_CHECKING:
    from torchlens_perf.results.alerts import Callback as OnVerdict
    from torchlens_perf.results.ask import Recorded
    from torchlens_perf.results.notebook import Cell
    from torchlens_perf.results.summary import Summary
    from torchlens_perf.results.surfaces import Surfaces


class ShowsResults(abc.ABC):
    """What Watch has of this package. On the training thread, between two steps, or after the end."""

    _surfaces: Surfaces | None = None

    @abc.abstractmethod
    def _recorded(self) -> Recorded:
        """What there is to show."""

    @abc.abstractmethod
    def _recording(self) -> ShowsResults:
        """The watch that records it: this one, or the one that this has joined."""

    def summary(self) -> Summary:
        """The verdicts, step times and what recording costs, as they are now: a frozen value (results/summary.py).

        It takes a fraction of a second, and some seconds where the sidecar is busy; the step in progress has that as
        the tool's time. Raises nothing of ours: what is missing is None, and `missing` says why.
        """
        from torchlens_perf.results.summary import summary

        return summary(self._recorded())

    def steps(self, backend: str | None = None) -> Any:
        """A frame with a row for each step and rank that is in the run directory; columns: docs/run-directory.md.

        backend: "pandas" or "polars"; without it, the one that is imported, or else installed. Where there are no steps
        it is empty, and the log says why. Takes as long as summary(). Raises ConfigError where neither is installed.
        """
        from torchlens_perf.results.steps import steps

        return steps(self._recorded(), backend)

    def on_verdict(self, callback: OnVerdict) -> OnVerdict:
        """Calls callback(alert) for each verdict that begins, changes or ends (results/alerts.py has Alert).

        At the end of a step, on the training thread, which waits for it; on rank 0 and the other ranks of its node. An
        exception is logged, and ends nothing. Raises ConfigError for what cannot be called.
        """
        if not callable(callback):
            raise ConfigError(f"callback={callback!r}: must be a function of one argument, the alert")
        self._surface().on_verdict(self._recorded(), callback)
        return callback

    def log_to(self, logger: object, *, every_s: float = 10.0, step: Callable[[], int] | None = None) -> None:
        """Writes a few figures into the user's own logger as the run goes on, and what is found as text.

        logger: a SummaryWriter, a run of W&B, mlflow, a Hugging Face Trainer, an Accelerator, Lightning's Trainer,
        Fabric or one of its loggers, or a function of (figures: dict[str, float], step: int); several of
        them as a list. every_s: at most once in so long, at the end of a step, on the training thread. step: the step
        number that the logger gets; without it, how many steps this watch has counted. The names: docs/frameworks.md.
        On rank 0 alone; on the others this does nothing. What a logger raises is logged, and ends nothing. Raises
        ConfigError for what is no logger.
        """
        from torchlens_perf.results.figures import checked

        self._surface().log_to(self._recorded(), checked(logger, every_s, step))

    def _ipython_display_(self) -> None:
        """Shows the run in a notebook's cell; live while it records, at an update a second at most, at a step's end."""
        self._surface().display(self._recorded())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        from torchlens_perf.results import ask, notebook

        return notebook.bundle(ask.results(self._recorded()))

    def _repr_html_(self) -> str:
        return self._repr_mimebundle_()["text/html"]

    def _surface(self) -> Surfaces:
        from torchlens_perf.results.surfaces import Surfaces

        watch = self._recording()
        watch._surfaces = watch._surfaces or Surfaces()
        return watch._surfaces

    def _end_live(self) -> tuple[Cell | None, bool]:
        """The run ends. Returns the cell for its report, in a notebook, and whether it has been shown live there."""
        was_live = self._surfaces is not None and self._surfaces.cell.is_live
        if self._surfaces is not None:
            self._surfaces.end()
        with guard("looking for a notebook"):
            if last_report.in_notebook():
                return self._surface().cell, was_live
        return None, False
