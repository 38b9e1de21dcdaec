"""Publish the device's progress, from which the sidecar finds the device that is behind in a hang.

The training thread checks the progress at each step's end without waiting for the device. If the
training thread is blocked, the result of its last check remains published. Both the first and the
last check at the same mark are published: two checks are needed to show that a device makes no
progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from torchlens_perf.run.clock import DeviceMark

if TYPE_CHECKING:
    from torchlens_perf.hooks.on_device.clock import EventClock
    from torchlens_perf.recorder.session import Session

_MAX_STEPS = 256


class MarkedSpan(NamedTuple):
    """A span that the device may not have reached yet."""

    kind: int
    name_id: int
    step: int
    begin: int
    end: int
    issued_ns: int
    """Host time at which the end was marked."""


class DeviceProgress:
    """Progress of one device. Used on the training thread at the end of each step."""

    def __init__(self) -> None:
        # (last mark, step number) of each recent step.
        self._ends: deque[tuple[int, int]] = deque(maxlen=_MAX_STEPS)
        self._reached = -1
        self._known: DeviceMark | None = None

    def check_and_publish(
        self, session: Session, clock: EventClock, boundary: int | None, spans: Iterable[MarkedSpan]
    ) -> None:
        """Check the progress and publish it. Call clock.read_reached_marks() before this method.

        boundary: the mark of this step's end.
        spans: recent spans in order of time, including spans that the device has not reached.
        """
        step = session.recorder.step
        if boundary is not None:
            self._ends.append((boundary, step))
        reached, now_ns = clock.find_last_reached_mark(), clock.now_ns()
        if reached is None:
            return
        if self._known is not None and reached == self._reached:
            self._known = self._known._replace(looked_ns=now_ns)
        else:
            self._reached, self._known = reached, self._locate_mark(reached, spans, now_ns)
        if self._known is not None and not session.recorder.closed:
            session.ring.set_device_mark(self._known.to_words())

    def _locate_mark(
        self, reached: int, spans: Iterable[MarkedSpan], now_ns: int
    ) -> DeviceMark | None:
        before = None
        for last, step in self._ends:
            if last > reached:
                if before is None:
                    # The clock was created inside this step, so the step's first marks are missing.
                    return None
                kind, name_id, is_end = (
                    _find_newest_mark(reached, before, spans) if reached > before else (0, 0, False)
                )
                return DeviceMark(step, reached - before, kind, name_id, is_end, now_ns, now_ns)
            before = last
        if before is None:
            return None
        return DeviceMark(self._ends[-1][1] + 1, 0, 0, 0, False, now_ns, now_ns)


def _find_newest_mark(
    reached: int, before: int, spans: Iterable[MarkedSpan]
) -> tuple[int, int, bool]:
    """Return (kind, name id, is an end) of the newest mark after `before` and up to `reached`."""
    best, found = before, (0, 0, False)
    for span in spans:
        for mark, is_end in ((span.begin, False), (span.end, True)):
            if best < mark <= reached:
                best, found = mark, (span.kind, span.name_id, is_end)
    return found
