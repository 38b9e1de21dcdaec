"""Device times of a step's phases and of the waits on its stream, measured by events.

The host's times of these phases say when their work was issued, the device's times when it ran.
Both are recorded. Device times become known a few steps later, so their records contain the step.
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
    from torchlens_perf.cuda.steps import PendingSteps
    from torchlens_perf.recorder.session import Session

_DEVICE, _STEP, _BACKWARD = int(Kind.DEVICE), int(Kind.STEP), int(Kind.BACKWARD)
# Kinds of spans that are marked in sampled steps only.
_PROBED = (int(Kind.MODULE), int(Kind.SECTION))
# With a larger error of device times on the host's time line, the device's delay is unknown.
WORST_ERROR_NS = 50_000
# Clocks in forked children, which must not destroy the events.
_never_freed: list[EventClock] = []


class DeviceHook:
    """Hook that marks steps, phases and stalls on the device.

    In sampled steps it also marks modules and sections.
    """

    name = "device times"

    def __init__(
        self, *, asked_for: bool, kind: str = "cuda", known: PendingSteps | None = None
    ) -> None:
        """asked_for: mark even if that prevents overlap, as with a single device connection.

        kind: torch's name of the device type.
        known: receives the steps whose times are known, to be merged over ranks.
        """
        self._asked_for = asked_for
        self._kind = kind
        self._parts = None if known is None else StepParts(known)
        self._pending: deque[MarkedSpan] = deque()
        self._clock: EventClock | None = None
        self._stalls: Stalls | None = None
        self._boundary: int | None = None  # The mark at which the current step began.
        self._missing_before = 0  # The clock's count of missing marks at that mark.
        self._given_up = 0  # Number of spans whose times the device did not report.
        self._missing = (0,) * 6
        self._has_published = False
        self._progress = DeviceProgress()
        self._is_unavailable = False  # True once it is clear that there is no device to time.

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        if os.environ.get(CONNECTIONS) == "1" and not self._asked_for:
            raise HookUnavailable(
                f"not recorded: with {CONNECTIONS}=1 they would keep communication from overlapping"
                ' with computation; device_times="on" records them anyway'
            )
        try:
            with session.each_step(self.name, lambda: self._step_ended(session)):
                yield
        finally:
            self._stop(session)
            with guard("the device's last times"):
                self._read_last(session)

    def start(
        self,
        session: Session,
        events: AcceleratorEvents,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Begin to mark. The device must already have a context. now_ns: the host's clock."""
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

        mark, span = (
            guard("marking the device")(clock.mark),
            guard("marking the device")(span_ended),
        )
        recorder.set_device_clock(mark, span, stalls.begin_wait, stalls.end)
        session.clocks.use(clock, stalls)
        time_collectives(stalls.begin_collective)

    def _stop(self, session: Session) -> None:
        if not session.recorder.closed:
            session.recorder.set_device_clock(None, None)
        session.clocks.use(None)
        time_collectives(None)

    def _step_ended(self, session: Session) -> None:
        succeeded = False
        try:
            if self._clock is None:
                self._look_for_a_device(session)
            else:
                self._read(session, self._clock)
            succeeded = True
        finally:
            # After an exception this function is not called again, and no marks would be read.
            if not succeeded:
                self._stop(session)

    def _read(self, session: Session, clock: EventClock) -> None:
        recorder, start_ns = session.recorder, session.recorder.now_ns()
        step, boundary = recorder.step, clock.mark()
        waited_ns = recorder.now_ns() - start_ns - LONGEST_MARK_NS
        if waited_ns > 0:
            # All work at a step's end counts as overhead, but this time was a wait for the device.
            recorder.add_overhead(-waited_ns)
        if self._stalls is not None:
            self._stalls.step_ended()  # Updates the count of missing marks for this step.
        # The step's record completes the step. It is not written if a stall may be missing.
        if (
            boundary is not None
            and self._boundary is not None
            and clock.missing == self._missing_before
        ):
            self._pending.append(
                MarkedSpan(_STEP, 0, step, self._boundary, boundary, clock.now_ns())
            )
        self._boundary, self._missing_before = boundary, clock.missing
        if self._stalls is not None:
            self._stalls.stream = clock.current() or self._stalls.stream
        start_ns = session.recorder.now_ns()
        clock.drain()
        self._progress.step_ended(session, clock, boundary, self._pending)
        recorded, probed = self._record(session, clock, step)
        # Reading the probes of an earlier step costs time in this one.
        if probed:
            session.step.add_probe_cost((session.recorder.now_ns() - start_ns) * probed // recorded)
        self._publish(session, clock)

    def _look_for_a_device(self, session: Session) -> None:
        """Look for a device in use after the first, second, fourth, eighth, ... step.

        The query takes longer than all other work at a step's end.
        """
        step = session.recorder.step
        if self._is_unavailable or step & (step + 1):
            return
        try:
            device = accelerator_in_use(
                self._kind, computes_there=session.metadata.computes_on(self._kind)
            )
            if device is None or _is_capturing(self._kind):
                return  # Taking an anchor would end the capture.
            self.start(session, events_of(device))
        except (DeviceError, RuntimeError, NotImplementedError) as error:
            self._is_unavailable = True
            session.note(f"device times are not recorded: {error}")

    def _record(self, session: Session, clock: EventClock, step: int) -> tuple[int, int]:
        """Record the spans whose times are known by now, in the order of their ends on the host.

        Returns the number of spans, and how many of them are made in sampled steps only.
        """
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

    def _publish(self, session: Session, clock: EventClock, *, last: bool = False) -> None:
        """Publish the error of the times and the numbers of missing ones for the sidecar.

        This happens at first, when a number becomes positive, and at the end.
        """
        missing = (
            clock.captured,
            clock.skipped,
            clock.crowded,
            clock.aside,
            clock.open_ended,
            self._given_up,
        )
        is_first = [before == 0 < now for before, now in zip(self._missing, missing, strict=True)]
        self._missing = missing
        if last or any(is_first) or not self._has_published:
            self._has_published = True
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

    def _read_last(self, session: Session) -> None:
        """Read the last times without waiting.

        Spans that the device has not reached are counted.
        """
        clock = self._clock
        if clock is None:
            return
        # A forked child can neither query the device nor destroy its events.
        if session.recorder.closed:
            _never_freed.append(clock)
            return
        # The first call makes the newest mark a boundary, the second one reads up to it.
        clock.drain(BEHIND_STEPS)
        clock.drain(BEHIND_STEPS)
        self._record(session, clock, session.recorder.step)
        self._given_up += len(self._pending)
        self._pending.clear()
        self._publish(session, clock, last=True)


def _is_capturing(kind: str) -> bool:
    import torch

    return kind == "cuda" and torch.cuda.is_current_stream_capturing()


def time_collectives(timer: Callable[[], Callable[[], None] | None] | None) -> None:
    """Let the native tap call `timer` before each synchronous collective on a device.

    timer: returns the function to call after the collective. None switches the calls off.
    """
    native = native_tap.load()
    if native is not None:
        native.time_with(timer)
