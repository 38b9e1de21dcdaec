"""A token bucket that limits the spans a job may send. Pure.

The timestamps of steps refill it, so a replay, which reads faster than real time, sends no more
spans.
"""

from __future__ import annotations

_MINUTE_S = 60.0
_BURST_S = 20.0  # capacity in seconds of the rate; the rest of a minute's budget refills it


class SpanBudget:
    """A limit of `spans_per_s` spans a second, averaged over any minute; 0 disables it."""

    def __init__(self, spans_per_s: float) -> None:
        self.is_unlimited = spans_per_s <= 0
        self.capacity = spans_per_s * _BURST_S
        self._refill_per_s = spans_per_s * (1 - _BURST_S / _MINUTE_S)
        self._left = self.capacity
        self._newest_s: float | None = None

    def at(self, time_s: float) -> float:
        """Return the number of spans that a step that ended at `time_s` may send."""
        if self._newest_s is not None and time_s > self._newest_s:
            self._left = min(
                self.capacity, self._left + (time_s - self._newest_s) * self._refill_per_s
            )
        self._newest_s = time_s if self._newest_s is None else max(time_s, self._newest_s)
        return self._left

    def spend(self, spans: float) -> None:
        self._left -= spans
