"""Stalls of the compute stream: which waits are marked, and which are not; the real classes, on the fake device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.collective_rig import CollectiveRig, on_autograds_thread, on_thread
from tests.support.device.fake_device import FakeDevice, FakeEvents
from tests.support.device.shim_kernels import COMPILER, WITHOUT_COMPILER
from tests.support.recorders import IDS, IMPLEMENTATIONS
from torchlens_perf.hooks.on_device import clock
from torchlens_perf.hooks.on_device.clock import EventClock
from torchlens_perf.hooks.on_device.stalls import Stalls
from torchlens_perf.recorder.clocks import Clocks
from torchlens_perf.recorder.training_thread import TrainingThread
from torchlens_perf.run.ring import Kind

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER)
MILLISECOND = 1_000_000
OVER_NS = 20_000  # what the fake device takes for launches and events
TAIL = 77  # a name's id


class Loop(CollectiveRig):
    """A recorder whose waits are marked on the fake device."""

    def __init__(self, implementation: ModuleType, device: FakeDevice, folder: Path) -> None:
        self.device, self.fake = device, FakeEvents(device)
        super().__init__(implementation, folder, clock=self.fake.now_ns)
        self.device_clock = EventClock(self.fake, self.fake.now_ns)
        self.session: Any = type("Session", (), {"intern": self.ring.intern, "clocks": Clocks()})()
        self.session.recorder = self.recorder
        self.session.thread = TrainingThread(self.recorder, lambda note: None)
        self.spans: list[tuple[int, ...]] = []
        self.stalls = Stalls(self.session, self.device_clock, lambda *span: self.spans.append(span))
        self.recorder.set_device_clock(None, None, self.stalls.begin_wait, self.stalls.end)
        self.stalls.stream = self.fake.stream

    def blocked(self, duration_ns: int = MILLISECOND, *, raised: bool = False) -> None:
        """A wait, as Work.wait and the taps have it."""
        if self.recorder.begin_wait():
            self.device.spin(duration_ns, self.fake.stream)
            self.recorder.end_wait(raised)

    def phase(self) -> None:
        """The end of a forward or backward pass, where it computes."""
        self.device_clock.mark()
        self.stalls.phase_marked()

    def durations_ms(self) -> list[float]:
        """Of the stalls, once the device has come to them all."""
        for _ in range(2):
            self.device.advance(1000 * MILLISECOND)
            self.device_clock.drain()
        times = [self.device_clock.span(begin, end) for _, _, begin, end in self.spans]
        assert all(kind == Kind.WAIT for kind, *_ in self.spans)
        return [round(time[1] / MILLISECOND, 1) for time in times if time is not None]


@pytest.fixture(params=IMPLEMENTATIONS, ids=IDS)
def loop(request: pytest.FixtureRequest, device: FakeDevice, tmp_path: Path) -> Iterator[Loop]:
    made = Loop(request.param, device, tmp_path)
    yield made
    made.recorder.set_device_clock(None, None)
    made.close()


def test_outermost_waits_only(loop: Loop) -> None:
    """A Work that waits for others, or FSDP2 for a Work, is one stall."""
    synchronizations = loop.device.synchronizations
    loop.blocked(2 * MILLISECOND)
    loop.stalls.begin(TAIL)
    loop.blocked(3 * MILLISECOND)
    loop.device.spin(MILLISECOND)
    loop.blocked()
    loop.stalls.end()
    loop.blocked(raised=True)
    assert loop.durations_ms() == [2.0, 5.0, 1.0]
    assert [name for _, name, *_ in loop.spans] == [loop.ring.intern("wait"), TAIL, loop.ring.intern("wait")]
    assert loop.device_clock.marked == 6
    assert loop.device.synchronizations == synchronizations


def test_threads(loop: Loop) -> None:
    """Autograd's thread, in a backward pass; no other one, which may be blocked while the device computes."""
    on_thread(loop.blocked)
    on_autograds_thread(loop.blocked)
    assert loop.spans == []
    loop.recorder.begin(Kind.BACKWARD, 0)
    on_autograds_thread(loop.blocked)
    on_thread(loop.blocked)
    loop.recorder.end(Kind.BACKWARD, 0)
    assert len(loop.spans) == 1
    loop.stalls.begin(TAIL)
    on_thread(loop.blocked)  # its end is not that of the training thread's
    loop.device.spin(MILLISECOND)
    loop.stalls.end()
    assert loop.durations_ms() == [1.0, 2.0], "with what the other thread has put into the stream"


def test_another_stream(loop: Loop) -> None:
    """What waits there, as FSDP2's streams do, holds up nobody here: not marked, and nothing is missing for it."""
    loop.fake.stream = loop.device.new_stream()
    loop.blocked()
    assert (loop.spans, loop.device_clock.marked) == ([], 0)
    loop.fake.stream = 0
    loop.blocked()
    loop.phase()
    loop.stalls.step_ended()
    assert loop.device_clock.missing == 0
    assert loop.durations_ms() == [1.0]


@pytest.mark.parametrize("tail", [False, True])
def test_a_phase_on_another_stream(loop: Loop, tail: bool) -> None:
    """What it waits there is its own stream's, and the step lacks it: once, and the next one lacks nothing."""
    loop.fake.stream = loop.device.new_stream()
    if tail:
        on_autograds_thread(loop.stalls.begin_tail, TAIL)
        loop.stalls.end_tail()
    else:
        loop.blocked()
        loop.blocked()
    loop.phase()
    loop.fake.stream = 0
    loop.stalls.step_ended()
    assert (loop.spans, loop.device_clock.aside) == ([], 1)
    loop.blocked()
    loop.phase()
    loop.fake.stream = loop.device.new_stream()
    loop.phase()  # and waits for nobody there
    loop.stalls.step_ended()
    assert loop.device_clock.missing == 1


def test_tail_ends_with_the_backward_pass(loop: Loop) -> None:
    """It begins on autograd's thread, has no stall inside of it, and shares its end's mark."""
    loop.recorder.begin(Kind.BACKWARD, 0)
    on_autograds_thread(loop.stalls.begin_tail, TAIL)
    loop.blocked(4 * MILLISECOND)
    on_autograds_thread(loop.blocked)
    loop.recorder.end(Kind.BACKWARD, 0)
    mark = loop.device_clock.mark()
    assert mark is not None
    loop.stalls.backward_ended(mark)
    loop.stalls.end_tail()
    assert [end for *_, end in loop.spans] == [mark]
    assert loop.device_clock.marked == 2
    loop.stalls.begin_tail(TAIL)
    loop.device.spin(2 * MILLISECOND)
    loop.stalls.end_tail()  # the backward pass had no mark: not the one before's
    loop.blocked()
    assert loop.durations_ms() == [5.0, 2.0, 1.0]


def test_what_does_not_end(loop: Loop) -> None:
    """A backward pass that raises has no tail; an interrupted wait is forgotten at the step's end, and with it those
    after it. Each step lacks something."""
    loop.stalls.begin_tail(TAIL)
    loop.stalls.end_tail(raised=True)
    assert loop.device_clock.missing == 1
    loop.stalls.begin(TAIL)
    loop.blocked()
    loop.stalls.step_ended()
    loop.stalls.end()
    assert loop.spans == []
    assert loop.device_clock.missing == 2
    loop.blocked()
    loop.stalls.step_ended()
    assert loop.durations_ms() == [1.0]
    assert loop.device_clock.missing == 2


def test_a_pass_that_does_not_say_when_it_computed(loop: Loop) -> None:
    """Its tail may be missing; of one that raised, nobody waited."""
    loop.stalls.end_tail(raised=True, is_known=False)
    assert loop.device_clock.missing == 0
    loop.stalls.end_tail(is_known=False)
    assert loop.device_clock.missing == 1


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), KeyboardInterrupt()], ids=["ours", "user's"])
@pytest.mark.parametrize("which", ["begin", "end", "begin_tail", "end_tail"])
def test_a_mark_that_fails(loop: Loop, monkeypatch: pytest.MonkeyPatch, which: str, error: BaseException) -> None:
    """The step lacks it; the stalls after it are marked."""
    begin, end = loop.stalls.begin, loop.stalls.end
    if which.endswith("tail"):
        begin, end = loop.stalls.begin_tail, loop.stalls.end_tail
    raising = [which.startswith("begin"), which.startswith("end")]
    record = loop.fake.record

    def failing(event: Any, stream: int) -> None:
        if raising.pop(0):
            raise error
        record(event, stream)

    monkeypatch.setattr(loop.fake, "record", failing)
    with suppress(RuntimeError, KeyboardInterrupt):
        begin(TAIL)
    with suppress(RuntimeError, KeyboardInterrupt):
        end()
    monkeypatch.setattr(loop.fake, "record", record)
    assert loop.spans == []
    assert loop.device_clock.missing > 0
    loop.blocked(2 * MILLISECOND)
    assert loop.durations_ms() == [2.0]
    loop.stalls.begin_tail(TAIL)
    loop.device.spin(MILLISECOND)
    loop.stalls.end_tail()
    assert loop.durations_ms() == [2.0, 1.0]


def test_capture(loop: Loop) -> None:
    """Nothing of ours becomes part of a graph, and the step is known to lack something."""
    stream = loop.fake.stream = loop.stalls.stream = loop.device.new_stream()
    loop.device.begin_capture(stream)
    events = loop.device.calls("cuEventRecord")
    loop.blocked()
    assert loop.device.calls("cuEventRecord") == events
    loop.device.end_capture(stream)
    assert loop.spans == []
    assert loop.device_clock.missing == 1
    loop.blocked()
    assert len(loop.spans) == 1


def test_bounded(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that does not come to anything."""
    monkeypatch.setattr(clock, "MAX_EVENTS", 64)
    for _ in range(64):
        loop.blocked()
    assert loop.fake.made <= 64 + 8
    assert loop.device_clock.missing == loop.device_clock.crowded > 0


def test_host_waits_are_as_without_a_device(loop: Loop) -> None:
    """The host's record of the wait is there all the same, without what marking took; and after the clock is gone."""
    loop.blocked()
    loop.recorder.set_device_clock(None, None)
    loop.blocked()
    waits = [each for each in loop.records() if each["kind"] == Kind.WAIT]
    assert len(waits) == 2
    assert len(loop.spans) == 1
    assert waits[0]["duration_ns"] == waits[1]["duration_ns"]
