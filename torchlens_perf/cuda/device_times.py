"""Measure device times of a step's phases and waits by events on the compute stream.

Host times of a phase show when its work was issued, device times show when it ran. Both are
recorded. Device times become known a few steps later, so records contain the step number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.cuda.clock import create_clock
from torchlens_perf.cuda.stalls import StallMarker
from torchlens_perf.cuda.step_parts import StepPartCollector
from torchlens_perf.errors import DeviceError, HookUnavailable, guard
from torchlens_perf.interruption import ours
from torchlens_perf.recorder import native_tap
from torchlens_perf.recorder.devices import CONNECTIONS, find_accelerator_in_use

if TYPE_CHECKING:
    from torchlens_perf.cuda.steps import PendingSteps
    from torchlens_perf.recorder.session import Session

# Until this step, the device is looked for after step 1, 2, 4, 8, ..., and later now and then.
_FIRST_STEPS = 64
# Counters of DeviceClock, and their names in the published facts.
_COUNTERS = ("captured", "skipped", "crowded", "aside", "open_ended", "unread")
# Clocks that forked children keep, because a child must not free the parent's events.
_never_freed: list[Any] = []


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
        self._clock: Any = None
        self._published: tuple[int, ...] | None = None
        self._is_unavailable = False  # True after an error showed that the device cannot be timed.

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        if os.environ.get(CONNECTIONS) == "1" and not self._asked_for:
            raise HookUnavailable(
                f"not recorded: with {CONNECTIONS}=1 they would keep communication from overlapping"
                ' with computation; device_times="on" records them anyway'
            )

        def start_in_first_steps() -> None:
            step = session.recorder.step
            if step & (step + 1) == 0:
                self._start_if_device_in_use(session)
            if self._clock is not None or self._is_unavailable or step >= _FIRST_STEPS:
                session.step_callbacks.remove(start_in_first_steps)

        def start_or_publish() -> None:
            if self._clock is not None:
                self._publish_clock_state(session)
            elif session.recorder.step >= _FIRST_STEPS:
                self._start_if_device_in_use(session)

        try:
            with (
                session.running_each_step(self.name, start_in_first_steps),
                session.run_throttled(self.name, start_or_publish),
            ):
                yield
        finally:
            # A forked child can neither query the device nor free the parent's events.
            if session.recorder.closed and self._clock is not None:
                _never_freed.append(self._clock)
            elif self._clock is not None:
                with guard("the device's last times"):
                    session.recorder.read_last_device_times()
                    self._publish_clock_state(session, last=True)
            self._stop_marking(session)

    def start_marking(self, session: Session, clock: Any) -> None:
        """Start marking with a DeviceClock."""
        recorder, self._clock = session.recorder, clock
        stalls = StallMarker(session, clock, recorder.queue_device_span)
        if self._parts is not None:
            clock.listener = self._parts.add_span
        recorder.set_device_clock(clock, stalls.begin_wait, stalls.end, stalls.finish_step)
        session.clocks.use_clock(clock, stalls)
        set_collective_timer(stalls.begin_collective)
        self._publish_clock_state(session)

    def _stop_marking(self, session: Session) -> None:
        if not session.recorder.closed and self._clock is not None:
            session.recorder.set_device_clock(None)
        session.clocks.use_clock(None)
        set_collective_timer(None)

    def _start_if_device_in_use(self, session: Session) -> None:
        """Start marking if torch uses a device. The check takes longer than all other work at the
        end of a step.
        """
        if self._is_unavailable:
            return
        import torch

        try:
            device = find_accelerator_in_use(
                self._kind, computes_there=session.metadata.computes_on(self._kind)
            )
            if device is None or (
                self._kind == "cuda" and torch.cuda.is_current_stream_capturing()
            ):
                return  # Reading the device clock would abort the graph capture.
            self.start_marking(session, create_clock(device))
        except ours(DeviceError, RuntimeError, NotImplementedError) as error:
            self._is_unavailable = True
            session.note(f"device times are not recorded: {error}")

    def _publish_clock_state(self, session: Session, *, last: bool = False) -> None:
        """Publish the error of device times and the number of missing marks for the sidecar.

        Publish at the first call, when a count of missing marks leaves 0, and at the end of the
        watch.
        """
        clock, before = self._clock, self._published
        missing = tuple(getattr(clock, name) for name in _COUNTERS)
        is_new = before is None or any(
            then == 0 < now for then, now in zip(before, missing, strict=True)
        )
        self._published = missing
        if is_new and clock.status:
            session.note(f"device times are missing: the driver returned error {clock.status}")
        if last or is_new:
            name = f"{self._kind.upper() if self._kind == 'cuda' else self._kind} events"
            counts: Any = dict(zip(_COUNTERS, missing, strict=True))
            counts |= {"clock": name, "error_ns": clock.error_ns}
            session.facts.device = counts
            session.publish()


def set_collective_timer(timer: Callable[[], Callable[[], None] | None] | None) -> None:
    """Set the function that the native tap calls before each synchronous collective on a device.

    timer: returns the function to call after the collective, or is None to switch the calls off.
    """
    native = native_tap.load_tap()
    if native is not None:
        native.time_with(timer)
