"""In which steps the backward times of modules are sampled, which takes Python hooks on every tensor. Pure."""

from __future__ import annotations

from typing import NamedTuple

_SHARE = 0.001  # of the training time, at most, goes into sampling
_FASTEST_GROWTH = 8  # the first sampled steps are slower than later ones: what they cost must not rule for long


class Boundary(NamedTuple):
    """Where one step ends and the next one begins."""

    step: int
    """The one that begins."""
    time_ns: int
    tool_ns: int
    """Time spent in our hooks so far, as far as it is a part of what every step costs."""


class SamplingSchedule:
    """One step of `every`; of a multiple of it where sampling would take more than 0.1 % of the time.

    The multiples are powers of two, and each period's steps are among those of the shorter ones: ranks that measure
    a slightly different cost still sample the same steps. In synchronous training all wait for the one that samples.
    """

    def __init__(self, every: int) -> None:
        """every: 0 for no sampled steps."""
        self._every = every
        self._ended = self._begun = Boundary(0, 0, 0)  # of the last sampled step, and of the one in progress
        self._later_ns = 0.0  # what the sampled steps before have cost after their end
        self.period = every
        """Steps from one sampled step to the next."""

    def wants(self, step: int) -> bool:
        return self.period > 0 and step % self.period == self._every // 2

    def recording_begins(self, now: Boundary) -> None:
        self._ended = self._begun = now

    def step_begins(self, now: Boundary) -> None:
        self._begun = now

    def add_cost(self, duration_ns: int) -> None:
        """A sampled step costs that much more, after its end."""
        self._later_ns += duration_ns

    def step_ended(self, now: Boundary) -> None:
        """A sampled step has ended: takes into account what it has cost more than those before it."""
        before, begun = self._ended, self._begun
        others = begun.step - before.step
        if others > 0:
            more_ns = now.tool_ns - begun.tool_ns - (begun.tool_ns - before.tool_ns) / others
            # The gradient hooks' time is part of the backward pass. They take about as long as hanging them up.
            later_ns, self._later_ns = self._later_ns, 0.0
            self.sampled(2 * max(0.0, more_ns) + later_ns, (begun.time_ns - before.time_ns) / others)
        self._ended = now

    def sampled(self, cost_ns: float, step_ns: float) -> None:
        """Sets the period. cost_ns: what sampling took in a step; step_ns: what a step without takes."""
        period = self._every
        while period * step_ns * _SHARE < cost_ns and period < self.period * _FASTEST_GROWTH:
            period *= 2
        self.period = period
