"""Adapters of w.log_to() for common loggers. This module imports none of these loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from torchlens_perf.errors import ConfigError

_TRACKERS_OF_TRANSFORMERS = "transformers.integrations"
_LOGGERS_OF_TRACKERS = ("tb_writer", "_wandb", "_ml_flow")
KNOWN = (
    "a SummaryWriter, a run of W&B, mlflow, a Hugging Face Trainer, an Accelerator, Lightning's"
    " Trainer, or Fabric or one of its loggers. A function belongs into w.on_verdict()"
)


Logger: TypeAlias = Callable[[str, str, int], object]
"""Function that writes a text into a user's logger: its name, the text, and the step.

It is called on the training thread, passes on exceptions of the user's logger, and ignores texts
that the logger does not support.
"""
_Adapters: TypeAlias = Mapping[tuple[str, ...], Callable[[Any], Logger]]


def _adapt_summary_writer(writer: Any) -> Logger:
    """Return a function for TensorBoard's SummaryWriter, from torch or tensorboardX."""

    def write_text(name: str, text: str, step: int) -> None:
        # Markdown shows indented text unchanged.
        writer.add_text(name, f"    {text}".replace("\n", "\n    "), step)
        writer.flush()

    return write_text


def _adapt_wandb(given: Any) -> Logger:
    """Return a function for a W&B run, or for the wandb module while a run is active.

    Texts are in the run's summary, because a row would change the step of the user's next row.
    """

    def write_text(name: str, text: str, step: int) -> None:
        run = given if hasattr(given, "finish_artifact") else getattr(given, "run", None)
        (run or given).summary[name] = text

    return write_text


class _MlflowAdapter:
    """A function for the mlflow run that is active now or at a later write. It starts no run."""

    def __init__(self, mlflow: Any) -> None:
        self._mlflow = mlflow
        self._active = mlflow.active_run()

    def __call__(self, name: str, text: str, step: int) -> None:
        # The run may have ended.
        self._active = self._active or self._mlflow.active_run()
        if self._active is not None:
            self._mlflow.MlflowClient().log_text(self._active.info.run_id, text, f"{name}.txt")


def _adapt_lightning_logger(logger: Any) -> Logger:
    """Return a function for a logger of Lightning or Fabric."""

    def write_text(name: str, text: str, step: int) -> None:
        experiment, run_id = logger.experiment, getattr(logger, "run_id", None)
        if hasattr(experiment, "log_text") and run_id:  # MLflow's client
            experiment.log_text(run_id, text, f"{name}.txt")
        elif write := _adapt(experiment, _LOGGERS):
            write(name, text, step)

    return write_text


def _adapt_group(find_loggers: Callable[[], Iterable[Logger]]) -> Logger:
    """Return a function for several loggers, which are looked up at each write."""

    def write_text(name: str, text: str, step: int) -> None:
        for write in find_loggers():
            write(name, text, step)

    return write_text


def _adapt_huggingface_trainer(trainer: Any) -> Logger:
    """Return a function for the loggers in a Hugging Face Trainer's `report_to`."""
    # By id of the callback. Some callbacks release their logger before the run ends.
    loggers: dict[int, Logger] = {}

    def find_loggers() -> Iterable[Logger]:
        for callback in trainer.callback_handler.callbacks:
            if type(callback).__module__.startswith(_TRACKERS_OF_TRANSFORMERS):
                inner = (getattr(callback, name, None) for name in _LOGGERS_OF_TRACKERS)
                if found := next(_adapt_each(inner), None):
                    loggers.setdefault(id(callback), found)
        return loggers.values()

    find_loggers()
    return _adapt_group(find_loggers)


_LOGGERS: _Adapters = {
    ("add_scalar", "add_text", "flush"): _adapt_summary_writer,
    ("log_metrics", "active_run", "MlflowClient"): _MlflowAdapter,
    ("log", "summary"): _adapt_wandb,
}
"""Adapters by the attributes of a logger."""
_OWNERS_OF_LOGGERS: _Adapters = {
    ("callback_handler", "state", "log"): _adapt_huggingface_trainer,
    ("trackers", "log", "prepare"): lambda accelerator: _adapt_group(
        lambda: _adapt_each(getattr(each, "tracker", None) for each in accelerator.trackers)
    ),
    ("log_metrics", "experiment"): _adapt_lightning_logger,
    # Lightning's Trainer, or Fabric.
    ("loggers",): lambda trainer: _adapt_group(
        lambda: map(_adapt_lightning_logger, trainer.loggers)
    ),
}


def adapt_logger(value: Any) -> Logger:
    """Return the function that writes to an object which the user has passed.

    Raise ConfigError if it is not a logger.
    """
    if isinstance(value, (list, tuple)) and value:
        inner = [adapt_logger(each) for each in value]
        return _adapt_group(lambda: inner)
    found = _adapt(value, {**_LOGGERS, **_OWNERS_OF_LOGGERS})
    if found is None:
        raise ConfigError(f"log_to: {type(value).__name__} is no logger: pass {KNOWN}")
    return found


def _adapt(value: Any, adapters: _Adapters) -> Logger | None:
    for names, adapt in adapters.items():
        # Look at the class first, because reading some attributes of a logger opens its files.
        if value is not None and all(
            hasattr(type(value), name) or name in dir(value) for name in names
        ):
            return adapt(value)
    return None


def _adapt_each(values: Iterable[Any]) -> Iterator[Logger]:
    """Yield the functions for those of the values that are loggers."""
    return filter(None, (_adapt(value, _LOGGERS) for value in values))
