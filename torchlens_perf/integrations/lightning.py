"""Callback and profiler for Lightning's Trainer.

::

    trainer = Trainer(callbacks=[TorchlensCallback(log_to="trainer")])
    trainer = Trainer(profiler=TorchlensProfiler())
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import ConfigError, guard
from torchlens_perf.integrations.framework_run import FrameworkRun, missing_framework_error
from torchlens_perf.interruption import ours
from torchlens_perf.recorder.recorder import Section, section

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.profilers import Profiler
except ours(ImportError) as error:
    raise missing_framework_error("lightning", error) from None

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from typing_extensions import Unpack

    from torchlens_perf.config import WatchSettings

_SETTINGS = re.compile(r"\{.*\}")
TRAINER = "trainer"
"""Value of log_to that selects the Trainer's own loggers."""


class TorchlensCallback(Callback):  # type: ignore[misc,unused-ignore]
    """Callback that records Trainer.fit(). A step ends if a batch has increased `global_step`.

    Several optimizer steps in one batch count as one step. Batches whose gradients are accumulated
    are micro-steps. Validation and saving after a batch tag the step in which they run.
    """

    def __init__(self, *, log_to: object = None, **settings: Unpack[WatchSettings]) -> None:
        """log_to: see Watch.log_to(). "trainer" selects all loggers of the Trainer.
        settings: as in watch(). Raise ConfigError for an invalid argument.
        """
        super().__init__()
        if isinstance(log_to, str) and log_to != TRAINER:
            raise ConfigError(f'log_to={log_to!r}: must be "trainer", or a logger')
        self._logs_to_trainer = log_to == TRAINER
        self._run = FrameworkRun(settings, None if self._logs_to_trainer else log_to)
        self._global_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._global_step, total = trainer.global_step, 0
        with guard("how many steps there will be"):
            expected = trainer.estimated_stepping_batches
            total = int(expected) - trainer.global_step if expected != float("inf") else 0
        self._run.begin(
            pl_module, lambda: int(trainer.global_step), total_steps=total,
            log_to=trainer if self._logs_to_trainer else None,
        )  # fmt: skip

    @guard("end of a batch of Lightning")
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._run.step()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.tag("evaluation")

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._run.tag("checkpoint")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._run.end()


class TorchlensProfiler(Profiler):  # type: ignore[misc,unused-ignore]
    """Profiler that records Lightning's actions as sections of the report.

    Actions are hooks of the module, the callbacks and the strategy. The profiler records
    Trainer.fit() even without a TorchlensCallback; in that case, calls of the optimizer end the
    steps. With a TorchlensCallback, the profiler joins the callback's recording.
    """

    def __init__(self, **settings: Unpack[WatchSettings]) -> None:
        """settings: as in watch(). Raise ConfigError for an invalid setting."""
        super().__init__()
        self._run = FrameworkRun(settings, None)
        self._open: dict[str, list[Section]] = {}

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self._local_rank = local_rank
        if stage == "fit" and not self._run.is_recording:
            self._run.begin()

    @guard("begin of an action of Lightning")
    def start(self, action_name: str) -> None:
        # The names of Lightning's callbacks contain their settings, for example
        # "[Callback]ModelCheckpoint{'monitor': None, ...}.on_train_end".
        entered = section(_SETTINGS.sub("", action_name))
        entered.__enter__()
        self._open.setdefault(action_name, []).append(entered)

    @guard("end of an action of Lightning")
    def stop(self, action_name: str) -> None:
        entered = self._open.get(action_name)
        if entered:
            entered.pop().__exit__(None, None, None)

    def summary(self) -> str:
        """Return an empty text for Lightning to print, because the report is shown separately."""
        return ""

    def teardown(self, stage: str | None) -> None:
        super().teardown(stage)
        if stage == "fit":
            self._run.end()
