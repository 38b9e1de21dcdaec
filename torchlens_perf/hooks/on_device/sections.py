"""Device time: where a step's phases, and what its stream waits for, begin and end on the device, by events.

The host's times of these phases say when their work was issued, not when the device did it. Both are recorded. What
the device has done is known some steps later; the records name the step that they are about.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchlens_perf.errors import DeviceError, HookUnavailable, guard
from torchlens_perf.hooks.on_device.clock import BEHIND_STEPS, EventClock
from torchlens_perf.hooks.on_device.events import AcceleratorEvents, events_of
from torchlens_perf.hooks.on_device.progress import DeviceProgress, MarkedSpan
from torchlens_perf.hooks.on_device.stalls import Stalls
from torchlens_perf.hooks.on_device.step_parts import StepParts
from torchlens_perf.recorder import native_tap
from torchlens_perf.recorder.clocks import LONGEST_MARK_NS, MAX_UNREAD_STEPS
from torchlens_perf.recorder.devices import CONNECTIONS, accelerator_in_use
from torchlens_perf.run.device.step_parts import PART_OF_SPAN
from torchlens_perf.run.ring import UNKNOWN_NS, Kind

if TYPE_CHECKING:
    from torchlens_perf.cuda.steps import KnownSteps
    from torchlens_perf.recorder.session import Session

_DEVICE, _STEP, _BACKWARD = int(Kind.DEVICE), int(Kind.STEP), int(Kind.BACKWARD)
_PROBED = (int(Kind.MODULE), int(Kind.SECTION))  # in sampled steps only
WORST_ERROR_NS = 50_000  # of the device's times on the host's line; above it, how far the device is behind is not known
_never_freed: list[EventClock] = []  # in forked children


class DeviceHook:
    """Marks phases and stalls on the device in every step, modules and sections in sampled steps, and the steps."""

    name = "device times"

    def __init__(self, *, asked_for: bool, kind: str = "cuda", known: KnownSteps | None = None) -> None:
        """asked_for: also where one connection to the device makes marks cost the overlap of communication. kind: of
        device, as torch has it. known: where steps go whose times are known, to be merged over ranks."""
        self._asked_for = asked_for
        self._kind = kind
        self._parts = None if known is None else StepParts(known)
        self._pending: deque[MarkedSpan] = deque()
        self._clock: EventClock | None = None
        self._stalls: Stalls | None = None
        self._boundary: int | None = None  # where the step in progress began on the device
        self._missing_before = 0  # marks that were not made until then
        self._given_up = 0  # spans whose times the device has not reported
        self._missing = (0,) * 6
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

    def start(self, session: Session, events: AcceleratorEvents, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Begins to mark. The device has a context: we make none. now_ns: the host's clock."""
        clock = self._clock = EventClock(events, now_ns)
        recorder, pending = session.recorder, self._pending

        def span_marked(kind: int, name_id: int, begin: int, end: int) -> None:
            pending.append(MarkedSpan(kind, name_id, recorder.step, begin, end, now_ns()))

        stalls = self._stalls = Stalls(session, clock, span_marked)

        def span_ended(kind: int, name_id: int, begin: int) -> None:
            end = clock.mark()
            if end is not None:
                span_marked(kind, name_id, begin, end)
                if kind in PART_OF_SPAN:
                    stalls.phase_marked()
                if kind == _BACKWARD:
                    stalls.backward_ended(end)

        mark, span = guard("marking the device")(clock.mark), guard("marking the device")(span_ended)
        recorder.set_device_clock(mark, span, stalls.begin_wait, stalls.end)
        session.clocks.use(clock, stalls)
        time_collectives(stalls.begin_collective)

    def _stop(self, session: Session) -> None:
        if not session.recorder.closed:
            session.recorder.set_device_clock(None, None)
        session.clocks.use(None)
        time_collectives(None)

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
        recorder, start_ns = session.recorder, session.recorder.now_ns()
        step, boundary = recorder.step, clock.mark()
        waited_ns = recorder.now_ns() - start_ns - LONGEST_MARK_NS
        if waited_ns > 0:
            recorder.add_overhead(-waited_ns)  # it counts as ours with all else at a step's end
        if self._stalls is not None:
            self._stalls.step_ended()  # what it has lost is missing in this step
        # The step's record completes it: there is none where a stall may be missing.
        if boundary is not None and self._boundary is not None and clock.missing == self._missing_before:
            self._pending.append(MarkedSpan(_STEP, 0, step, self._boundary, boundary, clock.now_ns()))
        self._boundary, self._missing_before = boundary, clock.missing
        if self._stalls is not None:
            self._stalls.stream = clock.current() or self._stalls.stream
        start_ns = session.recorder.now_ns()
        clock.drain()
        self._progress.step_ended(session, clock, boundary, self._pending)
        recorded, probed = self._record(session, clock, step)
        if probed:  # what an earlier step was probed for is read in this one
            session.step.add_probe_cost((session.recorder.now_ns() - start_ns) * probed // recorded)
        self._tell(session, clock)

    def _look_for_a_device(self, session: Session) -> None:
        """At the ends of the first, second, fourth step and so on, as asking takes longer than all else there."""
        step = session.recorder.step
        if self._gone or step & (step + 1):
            return
        try:
            device = accelerator_in_use(self._kind, computes_there=session.metadata.computes_on(self._kind))
            if device is None or _is_capturing(self._kind):
                return  # looking for an anchor would end a capture
            self.start(session, events_of(device))
        except (DeviceError, RuntimeError, NotImplementedError) as error:
            self._gone = True
            session.note(f"device times are not taken: {error}")

    def _record(self, session: Session, clock: EventClock, step: int) -> tuple[int, int]:
        """Writes the spans that the device has reported by now, in the order in which they ended on the host. How many,
        and how many of them only sampled steps have."""
        pending, recorder, parts = self._pending, session.recorder, self._parts
        recorded = probed = 0
        while pending:
            span = pending[0]
            times = clock.span(span.begin, span.end)
            if times is not None:
                start_ns, duration_ns = times
                recorded += 1
                probed += span.kind in _PROBED
                behind_ns = max(0, start_ns + duration_ns - span.issued_ns)
                if clock.error_ns is None or clock.error_ns > WORST_ERROR_NS:
                    behind_ns = UNKNOWN_NS
                recorder.record_completed(
                    _DEVICE, span.name_id, span.step, start_ns, duration_ns, 0, span.kind, behind_ns
                )
                if parts is not None:
                    parts.add(span.kind, span.step, start_ns, duration_ns)
            elif step - span.step < MAX_UNREAD_STEPS:
                break
            else:
                self._given_up += 1
            pending.popleft()
        return recorded, probed

    def _tell(self, session: Session, clock: EventClock, *, last: bool = False) -> None:
        """Reports to the sidecar how good the times are, and which are missing: at once where some are for the first
        time, and at the end."""
        missing = clock.captured, clock.skipped, clock.crowded, clock.aside, clock.open_ended, self._given_up
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
                    "crowded": clock.crowded,
                    "aside": clock.aside,
                    "open_ended": clock.open_ended,
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


def _is_capturing(kind: str) -> bool:
    import torch

    return kind == "cuda" and torch.cuda.is_current_stream_capturing()


def time_collectives(timer: Callable[[], Callable[[], None] | None] | None) -> None:
    """What the native tap calls before synchronous collectives on a device from here on; None: nothing."""
    native = native_tap.load()
    if native is not None:
        native.time_with(timer)
