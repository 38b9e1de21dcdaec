"""The loggers that users have, as w.log_to() writes into them. Nothing here imports one.

A logger keeps its own axis: where figures of ours could move it, they wait for the user's next row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torchlens_perf.errors import ConfigError

_TRACKERS_OF_TRANSFORMERS = "transformers.integrations"
KNOWN = (
    "a SummaryWriter, a run of W&B, mlflow, a Hugging Face Trainer, an Accelerator, Lightning's Trainer, Fabric or one "
    "of its loggers, or a function of (figures, step)"
)


class Logger(Protocol):
    """Where figures and texts go. Training thread; raises what the user's logger raises."""

    def figures(self, values: dict[str, float], step: int) -> None:
        """Numbers, by name."""

    def text(self, name: str, text: str, step: int) -> None:
        """A sentence, or a report; a logger that has no place for texts leaves it out."""


class SummaryWriter:
    """TensorBoard's, of torch or of tensorboardX."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def figures(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name, f"    {text}".replace("\n", "\n    "), step)  # Markdown: as it is
        self._writer.flush()


class WandbRun:
    """A run of W&B, or its module while a run is active."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def figures(self, values: dict[str, float], step: int) -> None:
        # A row of their own would move the step that the user's next row gets.
        self._run.log(values, commit=False)

    def text(self, name: str, text: str, step: int) -> None:
        run = getattr(self._run, "run", None) if not hasattr(self._run, "finish_artifact") else self._run
        (run or self._run).summary[name] = text


class MlflowModule:
    """The active run of mlflow when the first figures come; none is begun."""

    def __init__(self, mlflow: Any) -> None:
        self._mlflow = mlflow
        self._run_id = ""

    def _known_run(self) -> str:
        active = None if self._run_id else self._mlflow.active_run()
        if active is not None:
            self._run_id = active.info.run_id
        return self._run_id

    def figures(self, values: dict[str, float], step: int) -> None:
        run_id = self._known_run()
        if run_id:
            self._mlflow.log_metrics(values, step=step, run_id=run_id)

    def text(self, name: str, text: str, step: int) -> None:
        run_id = self._known_run()
        if run_id:  # it may have ended
            self._mlflow.MlflowClient().log_text(run_id, text, f"{name}.txt")


class LightningLogger:
    """One of Lightning's, which Fabric has too."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def figures(self, values: dict[str, float], step: int) -> None:
        self._logger.log_metrics(values, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        experiment, run_id = self._logger.experiment, getattr(self._logger, "run_id", None)
        if hasattr(experiment, "log_text") and run_id:  # MLflow's client
            experiment.log_text(run_id, text, f"{name}.txt")
            return
        writer = writer_of(experiment)
        if writer is not None:
            writer.text(name, text, step)


class Several:
    """All loggers that something has when they are written to."""

    def __init__(self, loggers: Callable[[], Iterable[Logger]]) -> None:
        self._loggers = loggers

    def figures(self, values: dict[str, float], step: int) -> None:
        for logger in self._loggers():
            logger.figures(values, step)

    def text(self, name: str, text: str, step: int) -> None:
        for logger in self._loggers():
            logger.text(name, text, step)


class HuggingFaceTrainer:
    """What `report_to` names. Trainer.log() itself is not called: a trainer derived from it may average and clear its
    own figures there, and it would print ours."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._texts: dict[int, Logger] = {}  # by callback: some let go of theirs before the run ends

    def figures(self, values: dict[str, float], step: int) -> None:
        trainer = self._trainer
        for callback in self._trackers():
            # A copy each: some add to what they get.
            callback.on_log(trainer.args, trainer.state, trainer.control, logs=dict(values), model=trainer.model)

    def text(self, name: str, text: str, step: int) -> None:
        self._trackers()
        for logger in self._texts.values():
            logger.text(name, text, step)

    def _trackers(self) -> list[Any]:
        found = []
        for callback in self._trainer.callback_handler.callbacks:
            if type(callback).__module__.startswith(_TRACKERS_OF_TRANSFORMERS):
                found.append(callback)
                inner = (getattr(callback, name, None) for name in ("tb_writer", "_wandb", "_ml_flow"))
                writer = next(filter(None, map(writer_of, inner)), None)
                if writer is not None:
                    self._texts.setdefault(id(callback), writer)
        return found


class Accelerator:
    """Accelerate's, with the trackers that it has when it is written to."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def figures(self, values: dict[str, float], step: int) -> None:
        self._accelerator.log(values, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        for tracker in self._accelerator.trackers:
            writer = writer_of(getattr(tracker, "tracker", None))
            if writer is not None:
                writer.text(name, text, step)


class Function:
    """A function of the user's; texts come by w.on_verdict()."""

    def __init__(self, function: Callable[[dict[str, float], int], object]) -> None:
        self._function = function

    def figures(self, values: dict[str, float], step: int) -> None:
        self._function(values, step)

    def text(self, name: str, text: str, step: int) -> None:
        """It takes none."""


def writer_of(value: Any) -> Logger | None:
    """What takes texts as well as figures, and belongs to no framework; None for all else."""
    if _has(value, "add_scalar", "add_text", "flush"):
        return SummaryWriter(value)
    if _has(value, "log_metrics", "active_run", "MlflowClient"):
        return MlflowModule(value)
    if _has(value, "log", "summary"):
        return WandbRun(value)
    return None


def logger_for(value: Any) -> Logger:
    """How to write into what the user has passed. Raises ConfigError for what is no logger."""
    writer = writer_of(value)
    if writer is not None:
        return writer
    if isinstance(value, (list, tuple)) and value:
        inner = [logger_for(each) for each in value]
        return Several(lambda: inner)
    if _has(value, "callback_handler", "state", "log"):
        return HuggingFaceTrainer(value)
    if _has(value, "trackers", "log", "prepare"):
        return Accelerator(value)
    if _has(value, "log_metrics", "experiment"):
        return LightningLogger(value)
    if _has(value, "loggers"):
        return Several(lambda: [LightningLogger(each) for each in value.loggers])
    if callable(value):
        return Function(value)
    raise ConfigError(f"log_to: {type(value).__name__} is no logger: pass {KNOWN}")


def _has(value: Any, *names: str) -> bool:
    # By class where it can be told there: reading some attributes of a logger opens its files.
    return value is not None and all(hasattr(type(value), name) or name in dir(value) for name in names)
