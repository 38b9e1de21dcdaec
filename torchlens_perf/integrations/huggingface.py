"""Callback for Hugging Face's Trainer and classes derived from it, such as TRL's trainers.

::

    trainer = Trainer(model, args, train_dataset=data, callbacks=[TorchlensCallback()])
    trainer.add_callback(TorchlensCallback(log_to=trainer))  # verdicts in the loggers of report_to
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import ConfigError, guard
from torchlens_perf.integrations.framework_run import FrameworkRun, missing_framework_error
from torchlens_perf.interruption import ours

try:
    from transformers import TrainerCallback
except ours(ImportError) as error:
    raise missing_framework_error("transformers", error) from None

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from typing_extensions import Unpack

    from torchlens_perf.config import WatchSettings


class TorchlensCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Callback that records Trainer.train(). Steps are counted as the Trainer's `global_step`.

    The Trainer fetches all batches of a step before on_step_begin. The Trainer logs, evaluates and
    saves after on_step_end. A step is therefore recorded from one on_step_end to the next. The
    recorded step includes evaluation and saving after the previous step. Steps with evaluation or
    saving are tagged and not compared with other steps. Work after the last step is not recorded.
    """

    def __init__(self, *, log_to: object = None, **settings: Unpack[WatchSettings]) -> None:
        """log_to: see Watch.log_to(). Pass the Trainer itself to use the loggers in its `report_to`.
        settings: as in watch(). Raise ConfigError for an invalid argument.
        """
        if isinstance(log_to, str):
            raise ConfigError(
                f"log_to={log_to!r}: pass the Trainer itself:"
                " trainer.add_callback(TorchlensCallback(log_to=trainer))"
            )
        self._run = FrameworkRun(settings, log_to)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        left = max(0, int(state.max_steps) - int(state.global_step))
        self._run.begin(kwargs.get("model"), lambda: int(state.global_step), total_steps=left)

    @guard("end of a step of the Trainer")
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._run.step()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._run.tag("evaluation")

    on_predict = on_evaluate

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._run.tag("checkpoint")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._run.end()
