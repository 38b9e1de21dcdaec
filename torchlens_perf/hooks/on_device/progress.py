"""How far the device is, for the sidecar: in a hang, whose device has not come as far as the others'.

The training thread looks at each step's end, and waits for nothing; where it is blocked itself, its last look is all
that is known. That a device stands shows only where it was looked at again later, and was at the same mark: so both
times are published.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from torchlens_perf.run.clock import DeviceMark

if TYPE_CHECKING:
    from torchlens_perf.hooks.on_device.clock import EventClock
    from torchlens_perf.recorder.session import Session

_MAX_STEPS = 256  # whose ends are remembered


class MarkedSpan(NamedTuple):
    """A span that the device may not have come to yet."""

    kind: int
    name_id: int
    step: int
    begin: int
    end: int
    issued_ns: int
    """When the host marked the end."""


class DeviceProgress:
    """Of one clock. On the training thread, at steps' ends."""

    def __init__(self) -> None:
        self._ends: deque[tuple[int, int]] = deque(maxlen=_MAX_STEPS)  # of steps: the last mark, and which step
        self._reached = -1
        self._known: DeviceMark | None = None

    def step_ended(
        self, session: Session, clock: EventClock, boundary: int | None, spans: Iterable[MarkedSpan]
    ) -> None:
        """Looks, after the clock has been drained. boundary: the mark of this step's end. spans: the oldest first, of
        which some are not reached."""
        step = session.recorder.step
        if boundary is not None:
            self._ends.append((boundary, step))
        reached, now_ns = clock.frontier(), clock.now_ns()
        if reached is None:
            return
        if self._known is not None and reached == self._reached:
            self._known = self._known._replace(looked_ns=now_ns)
        else:
            self._reached, self._known = reached, self._find(reached, spans, now_ns)
        if self._known is not None and not session.recorder.closed:
            session.ring.set_device_mark(self._known.words())

    def _find(self, reached: int, spans: Iterable[MarkedSpan], now_ns: int) -> DeviceMark | None:
        before = None
        for last, step in self._ends:
            if last > reached:
                if before is None:
                    return None  # in the step in which marking began: not all of its marks are there
                kind, name_id, is_end = _closest(reached, before, spans) if reached > before else (0, 0, False)
                return DeviceMark(step, reached - before, kind, name_id, is_end, now_ns, now_ns)
            before = last
        if before is None:
            return None
        return DeviceMark(self._ends[-1][1] + 1, 0, 0, 0, False, now_ns, now_ns)


def _closest(reached: int, before: int, spans: Iterable[MarkedSpan]) -> tuple[int, int, bool]:
    """The newest mark of a span until then, after the mark `before`: kind, name and whether it is an end."""
    best, found = before, (0, 0, False)
    for span in spans:
        for mark, is_end in ((span.begin, False), (span.end, True)):
            if best < mark <= reached:
                best, found = mark, (span.kind, span.name_id, is_end)
    return found
