"""Choose the steps in which backward times of modules are sampled, by Python hooks on tensors.
Pure.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torchlens_perf.recorder.steps import NEVER

# Maximum share of the budget that sampling may take.
_SHARE_OF_BUDGET = 0.2
# Maximum growth of the period at once. The first sampled steps are slower than later steps.
_FASTEST_GROWTH = 8


class StepBoundary(NamedTuple):
    """The boundary between two steps."""

    step: int
    """The step that begins."""
    time_ns: int
    tool_ns: int
    """Total time in hooks, without overhead that only some steps have."""


class SamplingSchedule:
    """Samples one step of `every`, or of a multiple of `every` if sampling takes more than a fifth of
    the budget.

    The multiples are powers of two, so steps of a longer period also belong to all shorter periods.
    Ranks with slightly different costs then sample the same steps. If ranks sampled different
    steps, all ranks would wait in each of these steps.
    """

    def __init__(self, every: int, budget: float) -> None:
        """every: 0 samples no steps. budget: largest share of the training time that recording may
        take; 0 for no limit.
        """
        self._every = every
        self._max_share = _SHARE_OF_BUDGET * budget or math.inf
        self._ended = StepBoundary(0, 0, 0)  # End of the last sampled step.
        self.begun = self._ended
        """Begin of the last sampled step."""
        self.later_ns = 0.0
        """Cost of sampled steps that arose after their end."""
        self.period = every
        """Number of steps between two sampled steps."""

    def is_sampled(self, step: int) -> bool:
        return self.period > 0 and step % self.period == self._every // 2

    def next_sampled_step(self, step: int) -> int:
        """Return the first sampled step after this one."""
        return NEVER if self.period <= 0 else step + 1 + (self._every // 2 - step - 1) % self.period

    def start_recording(self, now: StepBoundary) -> None:
        self._ended = self.begun = now

    def end_sampled_step(self, now: StepBoundary) -> None:
        """Update the period with the extra cost of a sampled step that has ended."""
        before, begun = self._ended, self.begun
        others = begun.step - before.step
        if others > 0:
            more_ns = now.tool_ns - begun.tool_ns - (begun.tool_ns - before.tool_ns) / others
            # The time of the gradient hooks is part of the backward pass. Running a hook takes
            # about as long as attaching it.
            later_ns, self.later_ns = self.later_ns, 0.0
            self.set_period(
                2 * max(0.0, more_ns) + later_ns, (begun.time_ns - before.time_ns) / others
            )
        self._ended = now

    def set_period(self, cost_ns: float, step_ns: float) -> None:
        """Set the period. cost_ns: cost of a sampled step. step_ns: duration of a step without
        sampling.
        """
        period = self._every
        while (
            period * step_ns * self._max_share < cost_ns and period < self.period * _FASTEST_GROWTH
        ):
            period *= 2
        self.period = period
