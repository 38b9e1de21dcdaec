"""A token bucket that limits the number of spans that a job may send. Pure.

The bucket is refilled by the timestamps of steps instead of a clock. A replay, which is faster than
real time, thus sends no more spans than the run.
"""

from __future__ import annotations

_MINUTE_S = 60.0
# Capacity of the bucket, in seconds of the rate. The rest of a minute's budget refills the bucket.
_BURST_S = 20.0


class SpanBudget:
    """A limit of `spans_per_s` spans per second, averaged over any minute; 0 for no limit."""

    def __init__(self, spans_per_s: float) -> None:
        self.is_unlimited = spans_per_s <= 0
        self.capacity = spans_per_s * _BURST_S
        self._refill_per_s = spans_per_s * (1 - _BURST_S / _MINUTE_S)
        self._left = self.capacity
        self._newest_s: float | None = None

    def refill_until(self, time_s: float) -> float:
        """Refill the bucket up to `time_s`. Return the number of spans that may be sent."""
        if self._newest_s is not None and time_s > self._newest_s:
            self._left = min(
                self.capacity, self._left + (time_s - self._newest_s) * self._refill_per_s
            )
        self._newest_s = time_s if self._newest_s is None else max(time_s, self._newest_s)
        return self._left

    def spend(self, spans: float) -> None:
        self._left -= spans
