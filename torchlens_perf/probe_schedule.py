"""Which steps are probed for their modules' backward times, which takes Python hooks on every tensor. Pure."""

from __future__ import annotations

_SHARE = 0.001  # of the training time, at most, goes into probing
_FASTEST_GROWTH = 8  # the first probes are slower than later ones: what they cost must not rule for long


class ProbeSchedule:
    """One step of `every`; of a multiple of it where probing would take more than 0.1 % of the time.

    The multiples are powers of two, and each period's steps are among those of the shorter ones: ranks that measure
    a slightly different cost still probe the same steps. In synchronous training all wait for the one that probes.
    """

    def __init__(self, every: int) -> None:
        """every: 0 for no probes."""
        self._every = every
        self.period = every
        """Steps from one probe to the next."""

    def wants(self, step: int) -> bool:
        """Whether the step with this index is probed."""
        return self.period > 0 and step % self.period == self._every // 2

    def probed(self, cost_ns: float, step_ns: float) -> None:
        """A probed step has ended. cost_ns: what probing took in it; step_ns: what a step without takes."""
        period = self._every
        while period * step_ns * _SHARE < cost_ns and period < self.period * _FASTEST_GROWTH:
            period *= 2
        self.period = period
