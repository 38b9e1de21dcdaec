"""Device times of collectives that nothing else tells of: events around their call, on the current stream.

Only of those whose caller waits at once: they run in the current stream's order. When an asynchronous one ends, the
current stream does not know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torchlens_perf.errors import guard

if TYPE_CHECKING:
    from torchlens_perf.clock import Clock
    from torchlens_perf.session import Session

_UNREAD_STEPS = 256  # after which a time that the device has not told is not waited for


class _Pending(NamedTuple):
    """An operation that the device may not have come to yet."""

    ticket: int
    clock: Clock
    begin: int
    end: int
    step: int


class CollectiveEvents:
    """Marks with the session's device clock, and reads at a step's end. Without such a clock it does nothing."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pending: deque[_Pending] = deque()

    @guard("timing a collective")
    def begin(self) -> Callable[[], None] | None:
        """Before the call, on the thread that issues; returns what to call after it, if the device can be marked."""
        clock = self._session.clock
        if clock is self._session.host_clock:
            return None
        mark = clock.mark()
        return None if mark is None else partial(self._end, clock, mark)

    @guard("timing a collective")
    def _end(self, clock: Clock, begin: int) -> None:
        end = clock.mark()
        ticket = self._session.recorder.claim() if end is not None else 0
        if end is not None and ticket:
            self._pending.append(_Pending(ticket, clock, begin, end, self._session.recorder.step))

    def read(self) -> None:
        """At a step's end: tells the recorder what the device's clock knows by now."""
        recorder = self._session.recorder
        while self._pending:
            first = self._pending[0]
            times = first.clock.span(first.begin, first.end)
            if times is not None:
                start_ns, duration_ns = times
                recorder.part_over(first.ticket, start_ns, start_ns + duration_ns)
            elif recorder.step - first.step < _UNREAD_STEPS:
                return
            else:
                recorder.part_over(first.ticket)
            self._pending.popleft()
