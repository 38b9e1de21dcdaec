"""How many spans a job may send: a token bucket, refilled by the time of the steps. Pure.

By the steps' own time and not by the sidecar's, so that a run that is read faster than it was made has no more of them.
"""

from __future__ import annotations

_MINUTE_S = 60.0
_BURST_S = 20.0  # what may come at once, in seconds of the budget; the rest of a minute's is spread over it


class SpanBudget:
    """At most `spans_per_s` spans a second, as a mean over any minute. 0: any number."""

    def __init__(self, spans_per_s: float) -> None:
        self.is_unlimited = spans_per_s <= 0
        self.capacity = spans_per_s * _BURST_S
        self._refill_per_s = spans_per_s * (1 - _BURST_S / _MINUTE_S)
        self._left = self.capacity
        self._newest_s: float | None = None

    def at(self, time_s: float) -> float:
        """The spans that may be sent of a step that ended then."""
        if self._newest_s is not None and time_s > self._newest_s:
            self._left = min(self.capacity, self._left + (time_s - self._newest_s) * self._refill_per_s)
        self._newest_s = time_s if self._newest_s is None else max(time_s, self._newest_s)
        return self._left

    def spend(self, spans: float) -> None:
        """So many are sent."""
        self._left -= spans
