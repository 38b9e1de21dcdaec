"""Keep the recorder's cost below the `budget` of watch()."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchlens_perf.recorder.budget import EVERY_STEP, Budget, Spent

if TYPE_CHECKING:
    from torchlens_perf.recorder.recorder import Recorder
    from torchlens_perf.recorder.session import Session


class BudgetHook:
    """Hook that times modules and phases in fewer steps if recording costs more than the budget."""

    name = "budget"

    def __init__(self, share: float) -> None:
        self._share = share

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        recorder = session.recorder
        budget = Budget(self._share, _read_spent(recorder))
        recorder.module_mask = budget.module_mask

        def update() -> None:
            if budget.update(_read_spent(recorder)):
                recorder.module_mask = budget.module_mask
                recorder.phase_mask = budget.phase_mask
                publish()

        def publish() -> None:
            session.facts.recording = {
                "mark_ns": budget.mark_ns,
                "module_period": budget.modules.period,
                "phase_period": budget.phases.period,
            }
            session.publish()

        try:
            with session.run_throttled("the budget of recording", update):
                yield
        finally:
            recorder.module_mask = recorder.phase_mask = EVERY_STEP
            publish()


def _read_spent(recorder: Recorder) -> Spent:
    return Spent(
        recorder.step, recorder.now_ns(), recorder.tool_ns, recorder.written, recorder.module_calls,
        recorder.module_steps, recorder.measured_calls, recorder.measured_ns,
        recorder.phases_ns, recorder.phase_steps,
    )  # fmt: skip
