"""Adapters of w.log_to() for common loggers. This module imports none of these loggers.

Step figures must not change the step number of the user's own rows. If a new row in a logger would
change that number, the figures become part of the user's next row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torchlens_perf.errors import ConfigError

_TRACKERS_OF_TRANSFORMERS = "transformers.integrations"
KNOWN = (
    "a SummaryWriter, a run of W&B, mlflow, a Hugging Face Trainer, an Accelerator, Lightning's"
    " Trainer, Fabric or one of its loggers, or a function of (figures, step)"
)


class Logger(Protocol):
    """Adapter of a user's logger for figures and texts.

    Methods are called on the training thread. They pass on exceptions of the user's logger.
    """

    def write_figures(self, values: dict[str, float], step: int) -> None:
        """Write numbers by name."""

    def write_text(self, name: str, text: str, step: int) -> None:
        """Write a sentence or a report. Loggers that do not support texts ignore the call."""


class SummaryWriterAdapter:
    """Adapter of TensorBoard's SummaryWriter, from torch or tensorboardX."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write_figures(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def write_text(self, name: str, text: str, step: int) -> None:
        # Markdown shows indented text unchanged.
        self._writer.add_text(name, f"    {text}".replace("\n", "\n    "), step)
        self._writer.flush()


class WandbAdapter:
    """Adapter of a W&B run, or of the wandb module while a run is active."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write_figures(self, values: dict[str, float], step: int) -> None:
        # A separate row would change the step number of the user's next row.
        self._run.log(values, commit=False)

    def write_text(self, name: str, text: str, step: int) -> None:
        run = (
            getattr(self._run, "run", None)
            if not hasattr(self._run, "finish_artifact")
            else self._run
        )
        (run or self._run).summary[name] = text


class MlflowAdapter:
    """Adapter of the mlflow run that is active when figures are first written. It starts no run."""

    def __init__(self, mlflow: Any) -> None:
        self._mlflow = mlflow
        self._run_id = ""

    def _find_run_id(self) -> str:
        active = None if self._run_id else self._mlflow.active_run()
        if active is not None:
            self._run_id = active.info.run_id
        return self._run_id

    def write_figures(self, values: dict[str, float], step: int) -> None:
        run_id = self._find_run_id()
        if run_id:
            self._mlflow.log_metrics(values, step=step, run_id=run_id)

    def write_text(self, name: str, text: str, step: int) -> None:
        run_id = self._find_run_id()
        if run_id:  # The run may have ended.
            self._mlflow.MlflowClient().log_text(run_id, text, f"{name}.txt")


class LightningAdapter:
    """Adapter of a logger of Lightning or Fabric."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def write_figures(self, values: dict[str, float], step: int) -> None:
        self._logger.log_metrics(values, step=step)

    def write_text(self, name: str, text: str, step: int) -> None:
        experiment, run_id = self._logger.experiment, getattr(self._logger, "run_id", None)
        if hasattr(experiment, "log_text") and run_id:  # MLflow's client
            experiment.log_text(run_id, text, f"{name}.txt")
            return
        writer = adapt_plain_logger(experiment)
        if writer is not None:
            writer.write_text(name, text, step)


class LoggerGroup:
    """Adapter of several loggers, which are looked up at each write."""

    def __init__(self, loggers: Callable[[], Iterable[Logger]]) -> None:
        self._loggers = loggers

    def write_figures(self, values: dict[str, float], step: int) -> None:
        for logger in self._loggers():
            logger.write_figures(values, step)

    def write_text(self, name: str, text: str, step: int) -> None:
        for logger in self._loggers():
            logger.write_text(name, text, step)


class HuggingFaceAdapter:
    """Adapter of the loggers in a Hugging Face Trainer's `report_to`. Trainer.log() is not called.

    Trainer.log() would print the figures, and in derived trainers it averages and clears their own
    figures."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # By id of the callback. Some callbacks release their logger before the run ends.
        self._texts: dict[int, Logger] = {}

    def write_figures(self, values: dict[str, float], step: int) -> None:
        trainer = self._trainer
        for callback in self._find_trackers():
            # Each logger gets a copy, because some modify it.
            callback.on_log(
                trainer.args, trainer.state, trainer.control, logs=dict(values), model=trainer.model
            )

    def write_text(self, name: str, text: str, step: int) -> None:
        self._find_trackers()
        for logger in self._texts.values():
            logger.write_text(name, text, step)

    def _find_trackers(self) -> list[Any]:
        found = []
        for callback in self._trainer.callback_handler.callbacks:
            if type(callback).__module__.startswith(_TRACKERS_OF_TRANSFORMERS):
                found.append(callback)
                inner = (
                    getattr(callback, name, None) for name in ("tb_writer", "_wandb", "_ml_flow")
                )
                writer = next(filter(None, map(adapt_plain_logger, inner)), None)
                if writer is not None:
                    self._texts.setdefault(id(callback), writer)
        return found


class AccelerateAdapter:
    """Adapter of an Accelerator, whose trackers are looked up at each write."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def write_figures(self, values: dict[str, float], step: int) -> None:
        self._accelerator.log(values, step=step)

    def write_text(self, name: str, text: str, step: int) -> None:
        for tracker in self._accelerator.trackers:
            writer = adapt_plain_logger(getattr(tracker, "tracker", None))
            if writer is not None:
                writer.write_text(name, text, step)


class FunctionAdapter:
    """Adapter of a user's function, which receives no texts. w.on_verdict() provides texts."""

    def __init__(self, function: Callable[[dict[str, float], int], object]) -> None:
        self._function = function

    def write_figures(self, values: dict[str, float], step: int) -> None:
        self._function(values, step)

    def write_text(self, name: str, text: str, step: int) -> None:
        """Do nothing."""


def adapt_plain_logger(value: Any) -> Logger | None:
    """Return the adapter of a TensorBoard, mlflow or W&B logger; None for other objects."""
    if _has_attributes(value, "add_scalar", "add_text", "flush"):
        return SummaryWriterAdapter(value)
    if _has_attributes(value, "log_metrics", "active_run", "MlflowClient"):
        return MlflowAdapter(value)
    if _has_attributes(value, "log", "summary"):
        return WandbAdapter(value)
    return None


def adapt_logger(value: Any) -> Logger:
    """Return the adapter for an object that the user has passed.

    Raise ConfigError if it is not a logger.
    """
    writer = adapt_plain_logger(value)
    if writer is not None:
        return writer
    if isinstance(value, (list, tuple)) and value:
        inner = [adapt_logger(each) for each in value]
        return LoggerGroup(lambda: inner)
    if _has_attributes(value, "callback_handler", "state", "log"):
        return HuggingFaceAdapter(value)
    if _has_attributes(value, "trackers", "log", "prepare"):
        return AccelerateAdapter(value)
    if _has_attributes(value, "log_metrics", "experiment"):
        return LightningAdapter(value)
    if _has_attributes(value, "loggers"):
        return LoggerGroup(lambda: [LightningAdapter(each) for each in value.loggers])
    if callable(value):
        return FunctionAdapter(value)
    raise ConfigError(f"log_to: {type(value).__name__} is no logger: pass {KNOWN}")


def _has_attributes(value: Any, *names: str) -> bool:
    # Look at the class first, because reading some attributes of a logger opens its files.
    return value is not None and all(
        hasattr(type(value), name) or name in dir(value) for name in names
    )
