"""Measure device times of a step's phases and waits by events on the compute stream.

Host times of a phase show when its work was issued, device times show when it ran. Both are
recorded. Device times become known a few steps later, so records contain the step number.
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
from torchlens_perf.hooks.on_device.events import AcceleratorEvents, create_events
from torchlens_perf.hooks.on_device.progress import DeviceProgress, MarkedSpan
from torchlens_perf.hooks.on_device.stalls import StallMarker
from torchlens_perf.hooks.on_device.step_parts import StepPartCollector
from torchlens_perf.interruption import ours
from torchlens_perf.recorder import native_tap
from torchlens_perf.recorder.clocks import LONGEST_MARK_NS, MAX_UNREAD_STEPS
from torchlens_perf.recorder.devices import CONNECTIONS, find_accelerator_in_use
from torchlens_perf.run.device.step_parts import PART_OF_SPAN
from torchlens_perf.run.ring import UNKNOWN_NS, Kind

if TYPE_CHECKING:
    from torchlens_perf.cuda.steps import PendingSteps
    from torchlens_perf.recorder.session import Session

_DEVICE, _STEP, _BACKWARD = int(Kind.DEVICE), int(Kind.STEP), int(Kind.BACKWARD)
# Kinds of spans that are marked only in sampled steps.
_PROBED = (int(Kind.MODULE), int(Kind.SECTION))
# Maximum error of device times on the host's time line at which delays are recorded.
WORST_ERROR_NS = 50_000
# Clocks that forked children keep, because a child must not destroy the parent's events.
_never_freed: list[EventClock] = []


class DeviceTimesHook:
    """Hook that marks steps, phases and waits for communication on the device.

    In sampled steps it also marks modules and sections.
    """

    name = "device times"

    def __init__(
        self, *, asked_for: bool, kind: str = "cuda", known: PendingSteps | None = None
    ) -> None:
        """asked_for: True to record device times even if this prevents overlap
        (CUDA_DEVICE_MAX_CONNECTIONS=1).

        kind: torch's name of the device type.
        known: queue for steps with known times, which are merged over ranks.
        """
        self._asked_for = asked_for
        self._kind = kind
        self._parts = None if known is None else StepPartCollector(known)
        self._pending: deque[MarkedSpan] = deque()
        self._clock: EventClock | None = None
        self._stalls: StallMarker | None = None
        self._boundary: int | None = None  # The mark of the current step's begin.
        self._missing_before = 0  # The clock's number of missing marks at the step's begin.
        self._given_up = 0  # Number of dropped spans, whose times are missing.
        self._missing = (0,) * 6
        self._has_published = False
        self._progress = DeviceProgress()
        self._is_unavailable = False  # True after an error showed that the device cannot be timed.

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        if os.environ.get(CONNECTIONS) == "1" and not self._asked_for:
            raise HookUnavailable(
                f"not recorded: with {CONNECTIONS}=1 they would keep communication from overlapping"
                ' with computation; device_times="on" records them anyway'
            )
        try:
            with session.running_each_step(self.name, lambda: self._handle_step_end(session)):
                yield
        finally:
            self._stop_marking(session)
            with guard("the device's last times"):
                self._read_last_times(session)

    def start_marking(
        self,
        session: Session,
        events: AcceleratorEvents,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Start marking. The device must already have a context. now_ns: the host's clock."""
        clock = self._clock = EventClock(events, now_ns)
        recorder, pending = session.recorder, self._pending

        def queue_span(kind: int, name_id: int, begin: int, end: int) -> None:
            pending.append(MarkedSpan(kind, name_id, recorder.step, begin, end, now_ns()))

        stalls = self._stalls = StallMarker(session, clock, queue_span)

        def mark_span_end(kind: int, name_id: int, begin: int) -> None:
            end = clock.mark()
            if end is not None:
                queue_span(kind, name_id, begin, end)
                if kind in PART_OF_SPAN:
                    stalls.note_phase_stream()
                if kind == _BACKWARD:
                    stalls.set_backward_end(end)

        mark, span = (
            guard("marking the device")(clock.mark),
            guard("marking the device")(mark_span_end),
        )
        recorder.set_device_clock(mark, span, stalls.begin_wait, stalls.end)
        session.clocks.use_clock(clock, stalls)
        set_collective_timer(stalls.begin_collective)

    def _stop_marking(self, session: Session) -> None:
        if not session.recorder.closed:
            session.recorder.set_device_clock(None, None)
        session.clocks.use_clock(None)
        set_collective_timer(None)

    def _handle_step_end(self, session: Session) -> None:
        succeeded = False
        try:
            if self._clock is None:
                self._start_if_device_in_use(session)
            else:
                self._mark_step_end(session, self._clock)
            succeeded = True
        finally:
            # A failed callback is switched off, so later marks would never be read.
            if not succeeded:
                self._stop_marking(session)

    def _mark_step_end(self, session: Session, clock: EventClock) -> None:
        recorder, start_ns = session.recorder, session.recorder.now_ns()
        step, boundary = recorder.step, clock.mark()
        waited_ns = recorder.now_ns() - start_ns - LONGEST_MARK_NS
        if waited_ns > 0:
            # Exclude this wait for the device from the overhead of the step's end.
            session.step.leave_out_device_wait(waited_ns)
        if self._stalls is not None:
            self._stalls.finish_step()  # Counts missing end marks, for the check below.
        # Write no record of the step itself if a mark is missing.
        if (
            boundary is not None
            and self._boundary is not None
            and clock.missing_marks == self._missing_before
        ):
            self._pending.append(
                MarkedSpan(_STEP, 0, step, self._boundary, boundary, clock.now_ns())
            )
        self._boundary, self._missing_before = boundary, clock.missing_marks
        if self._stalls is not None:
            self._stalls.stream = clock.current_stream() or self._stalls.stream
        start_ns = session.recorder.now_ns()
        clock.read_reached_marks()
        self._progress.check_and_publish(session, clock, boundary, self._pending)
        recorded, probed = self._record_known_spans(session, clock, step)
        # Reading the marks of an earlier, sampled step takes time in this step.
        if probed:
            session.step.add_overhead_of_sampled_step(
                (session.recorder.now_ns() - start_ns) * probed // recorded
            )
        self._publish_clock_state(session, clock)

    def _start_if_device_in_use(self, session: Session) -> None:
        """Start marking if torch uses a device. Checked after step 1, 2, 4, 8, ...

        The check takes longer than all other work at the end of a step.
        """
        step = session.recorder.step
        if self._is_unavailable or step & (step + 1):
            return
        try:
            device = find_accelerator_in_use(
                self._kind, computes_there=session.metadata.computes_on(self._kind)
            )
            if device is None or _is_capturing(self._kind):
                return  # Reading the device clock would abort the graph capture.
            self.start_marking(session, create_events(device))
        except ours(DeviceError, RuntimeError, NotImplementedError) as error:
            self._is_unavailable = True
            session.note(f"device times are not recorded: {error}")

    def _record_known_spans(
        self, session: Session, clock: EventClock, step: int
    ) -> tuple[int, int]:
        """Record all spans whose device times are known, in the order of their ends on the host.

        Return the number of recorded spans, and how many of them exist only in sampled steps.
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
                    parts.add_span(span.kind, span.step, start_ns, duration_ns)
            elif step - span.step < MAX_UNREAD_STEPS:
                break
            else:
                self._given_up += 1
            pending.popleft()
        return recorded, probed

    def _publish_clock_state(
        self, session: Session, clock: EventClock, *, last: bool = False
    ) -> None:
        """Publish the error of device times and the number of missing marks for the sidecar.

        Publish at the first call, when a count of missing marks leaves 0, and at the end of the
        watch.
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

    def _read_last_times(self, session: Session) -> None:
        """Record the last device times without waiting for the device.

        Spans that the device has not reached count as missing.
        """
        clock = self._clock
        if clock is None:
            return
        # A forked child can neither query the device nor destroy the parent's events.
        if session.recorder.closed:
            _never_freed.append(clock)
            return
        # The first call ends a step at the newest mark. The second call reads up to this mark.
        clock.read_reached_marks(BEHIND_STEPS)
        clock.read_reached_marks(BEHIND_STEPS)
        self._record_known_spans(session, clock, session.recorder.step)
        self._given_up += len(self._pending)
        self._pending.clear()
        self._publish_clock_state(session, clock, last=True)


def _is_capturing(kind: str) -> bool:
    import torch

    return kind == "cuda" and torch.cuda.is_current_stream_capturing()


def set_collective_timer(timer: Callable[[], Callable[[], None] | None] | None) -> None:
    """Set the function that the native tap calls before each synchronous collective on a device.

    timer: returns the function to call after the collective, or is None to switch the calls off.
    """
    native = native_tap.load_tap()
    if native is not None:
        native.time_with(timer)
