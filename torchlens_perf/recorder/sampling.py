"""Choose the steps in which backward times of modules are sampled, which needs Python hooks on
every tensor. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

# Largest share of the training time for sampling.
_MAX_SHARE = 0.001
# The first sampled steps are slower than later ones, so their cost must not determine the period
# for long.
_FASTEST_GROWTH = 8


class StepBoundary(NamedTuple):
    """The boundary between two steps."""

    step: int
    """The step that begins."""
    time_ns: int
    tool_ns: int
    """Time spent in hooks so far, without overhead that only some steps have."""


class SamplingSchedule:
    """Samples one step of `every`, or of a multiple of it if sampling would take more than 0.1 % of
    the time.

    The multiples are powers of two, and steps of a longer period belong to all shorter ones. Ranks
    that measure slightly different costs then sample the same steps. Otherwise, all ranks would
    wait for each one that samples.
    """

    def __init__(self, every: int) -> None:
        """every: 0 samples no steps."""
        self._every = every
        self._ended = self._begun = StepBoundary(
            0, 0, 0
        )  # of the last sampled step, and of the one in progress
        self._later_ns = 0.0  # Cost that earlier sampled steps have caused after their end.
        self.period = every
        """Number of steps from one sampled step to the next."""

    def is_sampled(self, step: int) -> bool:
        return self.period > 0 and step % self.period == self._every // 2

    def start_recording(self, now: StepBoundary) -> None:
        self._ended = self._begun = now

    def begin_sampled_step(self, now: StepBoundary) -> None:
        self._begun = now

    def add_later_cost(self, duration_ns: int) -> None:
        """Add a cost of a sampled step that arises after its end."""
        self._later_ns += duration_ns

    def end_sampled_step(self, now: StepBoundary) -> None:
        """Update the period with the extra cost of a sampled step that has ended."""
        before, begun = self._ended, self._begun
        others = begun.step - before.step
        if others > 0:
            more_ns = now.tool_ns - begun.tool_ns - (begun.tool_ns - before.tool_ns) / others
            # The time of the gradient hooks is inside the backward pass. It is about as long as
            # attaching them.
            later_ns, self._later_ns = self._later_ns, 0.0
            self.set_period(
                2 * max(0.0, more_ns) + later_ns, (begun.time_ns - before.time_ns) / others
            )
        self._ended = now

    def set_period(self, cost_ns: float, step_ns: float) -> None:
        """Set the period. cost_ns: cost of sampling in a step; step_ns: duration of a step without
        sampling.
        """
        period = self._every
        while period * step_ns * _MAX_SHARE < cost_ns and period < self.period * _FASTEST_GROWTH:
            period *= 2
        self.period = period
