"""Adapters of w.log_to() for common loggers. This module imports none of these loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torchlens_perf.errors import ConfigError

_TRACKERS_OF_TRANSFORMERS = "transformers.integrations"
KNOWN = (
    "a SummaryWriter, a run of W&B, mlflow, a Hugging Face Trainer, an Accelerator, Lightning's"
    " Trainer, or Fabric or one of its loggers. A function belongs into w.on_verdict()"
)


class Logger(Protocol):
    """Adapter of a user's logger.

    Its method is called on the training thread. It passes on exceptions of the user's logger.
    """

    def write_text(self, name: str, text: str, step: int) -> None:
        """Write a sentence or a report. Loggers that do not support texts ignore the call."""


class SummaryWriterAdapter:
    """Adapter of TensorBoard's SummaryWriter, from torch or tensorboardX."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write_text(self, name: str, text: str, step: int) -> None:
        # Markdown shows indented text unchanged.
        self._writer.add_text(name, f"    {text}".replace("\n", "\n    "), step)
        self._writer.flush()


class WandbAdapter:
    """Adapter of a W&B run, or of the wandb module while a run is active.

    Texts are in the run's summary, because a row would change the step of the user's next row.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def write_text(self, name: str, text: str, step: int) -> None:
        run = (
            getattr(self._run, "run", None)
            if not hasattr(self._run, "finish_artifact")
            else self._run
        )
        (run or self._run).summary[name] = text


class MlflowAdapter:
    """Adapter of the mlflow run that is active now or at a later write. It starts no run."""

    def __init__(self, mlflow: Any) -> None:
        self._mlflow = mlflow
        self._run_id = ""
        self._find_run_id()

    def _find_run_id(self) -> str:
        active = None if self._run_id else self._mlflow.active_run()
        if active is not None:
            self._run_id = active.info.run_id
        return self._run_id

    def write_text(self, name: str, text: str, step: int) -> None:
        run_id = self._find_run_id()
        if run_id:  # The run may have ended.
            self._mlflow.MlflowClient().log_text(run_id, text, f"{name}.txt")


class LightningAdapter:
    """Adapter of a logger of Lightning or Fabric."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

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

    def write_text(self, name: str, text: str, step: int) -> None:
        for logger in self._loggers():
            logger.write_text(name, text, step)


class HuggingFaceAdapter:
    """Adapter of the loggers in a Hugging Face Trainer's `report_to`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # By id of the callback. Some callbacks release their logger before the run ends.
        self._loggers: dict[int, Logger] = {}
        self._find_loggers()

    def write_text(self, name: str, text: str, step: int) -> None:
        self._find_loggers()
        for logger in self._loggers.values():
            logger.write_text(name, text, step)

    def _find_loggers(self) -> None:
        for callback in self._trainer.callback_handler.callbacks:
            if type(callback).__module__.startswith(_TRACKERS_OF_TRANSFORMERS):
                inner = (
                    getattr(callback, name, None) for name in ("tb_writer", "_wandb", "_ml_flow")
                )
                found = next(filter(None, map(adapt_plain_logger, inner)), None)
                if found is not None:
                    self._loggers.setdefault(id(callback), found)


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
        return LoggerGroup(lambda: _adapt_trackers(value))
    if _has_attributes(value, "log_metrics", "experiment"):
        return LightningAdapter(value)
    if _has_attributes(value, "loggers"):
        return LoggerGroup(lambda: [LightningAdapter(each) for each in value.loggers])
    raise ConfigError(f"log_to: {type(value).__name__} is no logger: pass {KNOWN}")


def _adapt_trackers(accelerator: Any) -> Iterable[Logger]:
    """Return the adapters of an Accelerator's trackers."""
    trackers = (getattr(each, "tracker", None) for each in accelerator.trackers)
    return filter(None, map(adapt_plain_logger, trackers))


def _has_attributes(value: Any, *names: str) -> bool:
    # Look at the class first, because reading some attributes of a logger opens its files.
    return value is not None and all(
        hasattr(type(value), name) or name in dir(value) for name in names
    )
