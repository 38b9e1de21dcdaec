"""Device time: where a step's phases begin and end on the device, by CUDA events.

The host's times of these phases say when their work was issued, not when the device did it. Both are recorded. What
the device has done is known some steps later; the records name the step that they are about.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torchlens_perf.cuda.driver import Driver
from torchlens_perf.cuda.events import BEHIND_STEPS, EventClock, Events, TorchEvents
from torchlens_perf.errors import DeviceError, HookUnavailable, guard
from torchlens_perf.hooks.on_device.progress import DeviceProgress
from torchlens_perf.recorder.devices import CONNECTIONS, device_in_use
from torchlens_perf.run.ring import UNKNOWN_NS, Kind

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

_DEVICE, _STEP = int(Kind.DEVICE), int(Kind.STEP)
_UNREAD_STEPS = 256  # a time that the device has not reported after so many steps is given up
WORST_ERROR_NS = 50_000  # of the device's times on the host's line; above it, how far the device is behind is not known
_never_freed: list[EventClock] = []  # in forked children


class _Pending(NamedTuple):
    """A span that the device may not have come to yet."""

    kind: int
    name_id: int
    step: int
    begin: int
    end: int
    issued_ns: int
    """When the host marked the end."""


class DeviceHook:
    """Marks phases on the device in every step, modules and sections in sampled steps, and the steps themselves."""

    name = "device times"

    def __init__(self, *, asked_for: bool) -> None:
        """asked_for: also where one connection to the device makes marks cost the overlap of communication."""
        self._asked_for = asked_for
        self._pending: deque[_Pending] = deque()
        self._clock: EventClock | None = None
        self._boundary: int | None = None  # where the step in progress began on the device
        self._given_up = 0  # spans whose times the device has not reported
        self._missing = (0, 0, 0)
        self._is_known = False  # to the sidecar
        self._progress = DeviceProgress()
        self._gone = False  # there is no device to time

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        if os.environ.get(CONNECTIONS) == "1" and not self._asked_for:
            raise HookUnavailable(
                f"not taken: with {CONNECTIONS}=1 they would keep communication from overlapping with computation; "
                'device_times="on" takes them all the same'
            )
        try:
            with session.each_step(self.name, lambda: self._step_ended(session)):
                yield
        finally:
            self._stop(session)
            with guard("the device's last times"):
                self._end(session)

    def start(self, session: Session, events: Events, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Begins to mark. The device has a context: we make none. now_ns: the host's clock."""
        clock = self._clock = EventClock(events, now_ns)
        recorder, pending = session.recorder, self._pending

        def span_ended(kind: int, name_id: int, begin: int) -> None:
            end = clock.mark()
            if end is not None:
                pending.append(_Pending(kind, name_id, recorder.step, begin, end, now_ns()))

        mark, span = guard("marking the device")(clock.mark), guard("marking the device")(span_ended)
        recorder.set_device_clock(mark, span)
        session.use_clock(clock)

    def _stop(self, session: Session) -> None:
        """Marks nothing more."""
        if not session.recorder.closed:
            session.recorder.set_device_clock(None, None)
        session.use_clock(None)

    def _step_ended(self, session: Session) -> None:
        worked = False
        try:
            if self._clock is None:
                self._look_for_a_device(session)
            else:
                self._read(session, self._clock)
            worked = True
        finally:
            if not worked:  # it will not be called again: nobody would read what is marked
                self._stop(session)

    def _read(self, session: Session, clock: EventClock) -> None:
        step, boundary = session.recorder.step, clock.mark()
        if boundary is not None and self._boundary is not None:
            self._pending.append(_Pending(_STEP, 0, step, self._boundary, boundary, clock.now_ns()))
        self._boundary = boundary
        clock.drain()
        self._progress.step_ended(session, clock, boundary, self._pending)
        self._record(session, clock, step)
        self._tell(session, clock)

    def _look_for_a_device(self, session: Session) -> None:
        """At the ends of the first, second, fourth step and so on, as asking takes longer than all else there."""
        step = session.recorder.step
        if self._gone or step & (step + 1):
            return
        import torch

        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return  # looking for an anchor would end a capture
        try:
            device = device_in_use()
        except DeviceError as error:
            self._gone = True
            session.note(f"device times are not taken: {error}")
            return
        if device is not None:
            self.start(session, TorchEvents(device, Driver() if torch.version.cuda is not None else None))

    def _record(self, session: Session, clock: EventClock, step: int) -> None:
        """Writes the spans that the device has reported by now, in the order in which they ended on the host."""
        pending, recorder = self._pending, session.recorder
        while pending:
            span = pending[0]
            times = clock.span(span.begin, span.end)
            if times is not None:
                start_ns, duration_ns = times
                behind_ns = max(0, start_ns + duration_ns - span.issued_ns)
                if clock.error_ns is None or clock.error_ns > WORST_ERROR_NS:
                    behind_ns = UNKNOWN_NS
                recorder.record_completed(
                    _DEVICE, span.name_id, span.step, start_ns, duration_ns, 0, span.kind, behind_ns
                )
            elif step - span.step < _UNREAD_STEPS:
                return
            else:
                self._given_up += 1
            pending.popleft()

    def _tell(self, session: Session, clock: EventClock, *, last: bool = False) -> None:
        """Reports to the sidecar how good the times are, and which are missing: at once where some are for the first
        time, and at the end."""
        missing = clock.captured, clock.skipped, self._given_up
        news = [before == 0 < now for before, now in zip(self._missing, missing, strict=True)]
        self._missing = missing
        if last or any(news) or not self._is_known:
            self._is_known = True
            session.publish(
                device={
                    "clock": clock.name,
                    "error_ns": clock.error_ns,
                    "captured": clock.captured,
                    "skipped": clock.skipped,
                    "unread": self._given_up,
                }
            )

    def _end(self, session: Session) -> None:
        """The last look: what the device has not come to is counted, not waited for."""
        clock = self._clock
        if clock is None:
            return
        if session.recorder.closed:  # in a forked child: the device cannot be asked, nor its events destroyed
            _never_freed.append(clock)
            return
        clock.drain(BEHIND_STEPS)  # makes what was marked since the last step's end a boundary
        clock.drain(BEHIND_STEPS)
        self._record(session, clock, session.recorder.step)
        self._given_up += len(self._pending)
        self._pending.clear()
        self._tell(session, clock, last=True)
