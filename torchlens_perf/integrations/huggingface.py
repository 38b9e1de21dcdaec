"""Hugging Face's Trainer, and what is derived from it, as TRL's trainers.

::

    trainer = Trainer(model, args, train_dataset=data, callbacks=[TorchlensCallback()])
    trainer.add_callback(TorchlensCallback(log_to=trainer))  # figures and verdicts in what `report_to` names
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import ConfigError, guard
from torchlens_perf.integrations.framework_run import FrameworkRun, missing

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise missing("transformers", error) from None

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from typing_extensions import Unpack

    from torchlens_perf.config import WatchSettings


class TorchlensCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Records from on_train_begin to on_train_end; a step is one of the Trainer's `global_step`.

    The Trainer fetches all batches of a step before on_step_begin, and logs, evaluates and saves after on_step_end: so
    a step is from one on_step_end to the next. It holds its own data wait, and what follows on the step before it;
    steps that evaluate or save are tagged, and compared with none. What follows on the last step is in none.
    """

    def __init__(self, *, log_to: object = None, log_every_s: float = 10.0, **settings: Unpack[WatchSettings]) -> None:
        """log_to, log_every_s: see Watch.log_to(); pass the Trainer itself for what `report_to` names. settings: those
        of watch(). Raises ConfigError for what cannot be used.
        """
        if isinstance(log_to, str):
            raise ConfigError(
                f"log_to={log_to!r}: pass the Trainer itself: trainer.add_callback(TorchlensCallback(log_to=trainer))"
            )
        self._run = FrameworkRun(settings, log_to, log_every_s)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        left = max(0, int(state.max_steps) - int(state.global_step))
        self._run.begin(kwargs.get("model"), lambda: int(state.global_step), total_steps=left)

    @guard("end of a step of the Trainer")
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._run.step()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._run.tag("evaluation")

    def on_predict(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._run.tag("evaluation")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._run.tag("checkpoint")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._run.end()
