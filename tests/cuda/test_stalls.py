"""Stalls of the compute stream while it waits for communication, on the fake device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.collective_rig import CollectiveRig, on_autograds_thread, on_thread
from tests.support.device.fake_device import FakeDevice, FakeStreams
from tests.support.device.shim_kernels import COMPILER, WITHOUT_COMPILER
from torchlens_perf.cuda.stalls import StallMarker
from torchlens_perf.recorder.clocks import Clocks
from torchlens_perf.recorder.training_thread import TrainingThread
from torchlens_perf.run.ring import Kind

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER)
MILLISECOND = 1_000_000
OVER_NS = 20_000  # Time of launches and events on the fake device.
TAIL = 77  # Id of the name of the tail.


class Loop(CollectiveRig):
    """A recorder that marks waits on the fake device."""

    def __init__(self, device: FakeDevice, folder: Path, **limits: int) -> None:
        self.device, self.fake = device, FakeStreams(device)
        super().__init__(folder, clock=self.fake.now_ns)
        self.device_clock = self.fake.create_clock(**limits)
        self.session: Any = type("Session", (), {"intern": self.ring.intern, "clocks": Clocks()})()
        self.session.recorder = self.recorder
        self.session.thread = TrainingThread(self.recorder, lambda note: None)
        self.spans: list[tuple[int, ...]] = []
        self.stalls = StallMarker(
            self.session, self.device_clock, lambda *span: self.spans.append(span)
        )
        self.recorder.set_device_clock(
            self.device_clock, self.stalls.begin_wait, self.stalls.end, self.stalls.finish_step
        )
        self.device_clock.stream = self.fake.stream

    def blocked(self, duration_ns: int = MILLISECOND, *, raised: bool = False) -> None:
        """Wait for a collective in the way Work.wait and the taps do."""
        if self.recorder.begin_wait():
            self.device.spin(duration_ns, self.fake.stream)
            self.recorder.end_wait(raised)

    def phase(self) -> None:
        """End a forward or backward pass on a stream."""
        self.recorder.begin(Kind.FORWARD, 0)
        self.recorder.end(Kind.FORWARD, 0)

    def durations_ms(self) -> list[float]:
        """Wait until the device has reached all stalls, and return their durations."""
        for _ in range(2):
            self.device.advance(1000 * MILLISECOND)
            self.device_clock.read_reached_marks()
        times = [self.device_clock.span(begin, end) for _, _, begin, end in self.spans]
        assert all(kind == Kind.WAIT for kind, *_ in self.spans)
        return [round(time[1] / MILLISECOND, 1) for time in times if time is not None]


@pytest.fixture
def loop(request: pytest.FixtureRequest, device: FakeDevice, tmp_path: Path) -> Iterator[Loop]:
    made = Loop(device, tmp_path, **getattr(request, "param", {}))
    yield made
    made.recorder.set_device_clock(None)
    made.close()


def test_nested_waits_are_one_stall(loop: Loop) -> None:
    """A Work may wait for other Works, and FSDP2 waits for a Work."""
    synchronizations = loop.device.synchronizations
    loop.blocked(2 * MILLISECOND)
    loop.stalls.begin(TAIL)
    loop.blocked(3 * MILLISECOND)
    loop.device.spin(MILLISECOND)
    loop.blocked()
    loop.stalls.end()
    loop.blocked(raised=True)
    assert loop.durations_ms() == [2.0, 5.0, 1.0]
    assert [name for _, name, *_ in loop.spans] == [
        loop.ring.intern("wait"),
        TAIL,
        loop.ring.intern("wait"),
    ]
    assert loop.device_clock.marked == 6
    assert loop.device.synchronizations == synchronizations


def test_waits_of_unrelated_threads_are_no_stalls(loop: Loop) -> None:
    """A wait of autograd's thread is a stall in a backward pass.

    Other threads may wait while the device computes.
    """
    on_thread(loop.blocked)
    on_autograds_thread(loop.blocked)
    assert loop.spans == []
    loop.recorder.begin(Kind.BACKWARD, 0)
    on_autograds_thread(loop.blocked)
    on_thread(loop.blocked)
    loop.recorder.end(Kind.BACKWARD, 0)
    assert len(loop.spans) == 1
    loop.stalls.begin(TAIL)
    on_thread(loop.blocked)  # A wait on another thread must not end the training thread's stall.
    loop.device.spin(MILLISECOND)
    loop.stalls.end()
    assert loop.durations_ms() == [1.0, 2.0], "with what the other thread has put into the stream"


def test_waits_on_other_streams_than_the_compute_stream_are_no_stalls(loop: Loop) -> None:
    """Waits on FSDP2's streams do not delay computation, and no mark is missing."""
    loop.fake.stream = loop.device.new_stream()
    loop.blocked()
    assert (loop.spans, loop.device_clock.marked) == ([], 0)
    loop.fake.stream = 0
    loop.blocked()
    loop.phase()
    loop.recorder.end_device_step()
    assert loop.device_clock.missing_marks == 0
    assert loop.durations_ms() == [1.0]


@pytest.mark.parametrize("tail", [False, True])
def test_step_with_a_pass_on_another_stream_has_incomplete_stalls(loop: Loop, tail: bool) -> None:
    """Waits of that pass are not stalls of the compute stream. The next step is complete."""
    loop.fake.stream = loop.device.new_stream()
    if tail:
        on_autograds_thread(loop.stalls.begin_backward_tail, TAIL)
        loop.stalls.end_backward_tail()
    else:
        loop.blocked()
        loop.blocked()
    loop.phase()
    loop.fake.stream = 0
    loop.recorder.end_device_step()
    assert (loop.spans, loop.device_clock.aside) == ([], 1)
    loop.blocked()
    loop.phase()
    loop.fake.stream = loop.device.new_stream()
    loop.phase()  # This pass on the other stream contains no wait.
    loop.recorder.end_device_step()
    assert loop.device_clock.missing_marks == 1


def test_stall_in_the_backward_tail_ends_with_the_backward_pass(loop: Loop) -> None:
    """The tail begins on autograd's thread, contains no other stall, and ends with the mark of the
    backward pass's end.
    """
    loop.recorder.begin(Kind.BACKWARD, 0)
    on_autograds_thread(loop.stalls.begin_backward_tail, TAIL)
    loop.blocked(4 * MILLISECOND)
    on_autograds_thread(loop.blocked)
    loop.recorder.end(Kind.BACKWARD, 0)
    loop.stalls.end_backward_tail()
    assert [end for *_, end in loop.spans] == [loop.device_clock.backward_end]
    assert loop.device_clock.marked == 3
    loop.stalls.begin_backward_tail(TAIL)
    loop.device.spin(2 * MILLISECOND)
    # The last pass had no mark, and the mark of the previous pass must not be used.
    loop.stalls.end_backward_tail()
    loop.blocked()
    assert loop.durations_ms() == [5.0, 2.0, 1.0]


def test_interrupted_stall_makes_the_stalls_of_the_step_incomplete(loop: Loop) -> None:
    """A backward pass that raises has no tail. An interrupted wait ends at the step's end."""
    loop.stalls.begin_backward_tail(TAIL)
    loop.stalls.end_backward_tail(raised=True)
    assert loop.device_clock.missing_marks == 1
    loop.stalls.begin(TAIL)
    loop.blocked()
    loop.recorder.end_device_step()
    loop.stalls.end()
    assert loop.spans == []
    assert loop.device_clock.missing_marks == 2
    loop.blocked()
    loop.recorder.end_device_step()
    assert loop.durations_ms() == [1.0]
    assert loop.device_clock.missing_marks == 2


def test_backward_pass_with_unknown_end_of_computation_is_counted(loop: Loop) -> None:
    """A backward pass that raised is not counted, because no rank waited for it."""
    loop.stalls.end_backward_tail(raised=True, is_known=False)
    assert loop.device_clock.missing_marks == 0
    loop.stalls.end_backward_tail(is_known=False)
    assert loop.device_clock.missing_marks == 1


@pytest.mark.parametrize("which", ["begin", "end", "begin_backward_tail", "end_backward_tail"])
def test_failed_mark_makes_the_stalls_of_the_step_incomplete(loop: Loop, which: str) -> None:
    """Later stalls are marked."""
    begin, end = loop.stalls.begin, loop.stalls.end
    if which.endswith("tail"):
        begin, end = loop.stalls.begin_backward_tail, loop.stalls.end_backward_tail
    loop.device.fail("cuEventRecord" if which.startswith("begin") else "")
    begin(TAIL)
    loop.device.fail("cuEventRecord" if which.startswith("end") else "")
    end()
    loop.device.fail("")
    assert loop.spans == []
    assert loop.device_clock.missing_marks > 0
    loop.blocked(2 * MILLISECOND)
    assert loop.durations_ms() == [2.0]
    loop.stalls.begin_backward_tail(TAIL)
    loop.device.spin(MILLISECOND)
    loop.stalls.end_backward_tail()
    assert loop.durations_ms() == [2.0, 1.0]


def test_step_in_a_graph_capture_has_incomplete_stalls(loop: Loop) -> None:
    """No event becomes part of the graph."""
    stream = loop.fake.stream = loop.device_clock.stream = loop.device.new_stream()
    loop.device.begin_capture(stream)
    events = loop.device.calls("cuEventRecord")
    loop.blocked()
    assert loop.device.calls("cuEventRecord") == events
    loop.device.end_capture(stream)
    assert loop.spans == []
    assert loop.device_clock.missing_marks == 1
    loop.blocked()
    assert len(loop.spans) == 1


@pytest.mark.parametrize("loop", [{"max_events": 64}], indirect=True)
def test_number_of_open_stall_marks_is_limited(loop: Loop) -> None:
    """The device in this test reaches no mark."""
    for _ in range(64):
        loop.blocked()
    assert loop.device_clock.made == 64
    clock = loop.device_clock
    assert clock.missing_marks == clock.crowded + clock.open_ended
    assert clock.crowded > 0


def test_durations_of_host_waits_exclude_the_time_of_marking(loop: Loop) -> None:
    loop.blocked()
    loop.recorder.set_device_clock(None)
    loop.blocked()
    waits = [each for each in loop.records() if each["kind"] == Kind.WAIT]
    assert len(waits) == 2
    assert len(loop.spans) == 1
    assert waits[0]["duration_ns"] == waits[1]["duration_ns"]


@pytest.mark.parametrize("is_marked", [False, True])
def test_marks_of_a_backward_tail_are_charged(loop: Loop, is_marked: bool) -> None:
    """A mark takes as long as that of a wait. The mark of the pass's end is charged with the pass."""
    loop.blocked()
    of_wait_ns = loop.recorder.tool_ns
    assert of_wait_ns > 0
    loop.recorder.begin(Kind.BACKWARD, 0)
    before_ns = loop.recorder.tool_ns
    loop.stalls.begin_backward_tail(TAIL)
    begin_ns = loop.recorder.tool_ns - before_ns
    if is_marked:
        loop.recorder.end(Kind.BACKWARD, 0)
    before_ns, marked = loop.recorder.tool_ns, loop.device_clock.marked
    loop.stalls.end_backward_tail()

    marks = loop.device_clock.marked - marked
    assert marks == (0 if is_marked else 1)
    assert begin_ns == of_wait_ns // 2
    assert loop.recorder.tool_ns - before_ns == marks * begin_ns


def test_marks_of_a_collective_inside_a_wait_are_charged(loop: Loop) -> None:
    """The listener's marks are on the current stream, in addition to those of the stall."""
    heard: list[tuple[int, int]] = []
    loop.session.clocks.collective_listener = lambda *marks: heard.append(marks)
    loop.blocked()
    of_mark_ns = loop.recorder.tool_ns // 2
    loop.stalls.begin(TAIL)
    before_ns = loop.recorder.tool_ns
    end = loop.stalls.begin_collective()
    assert end is not None
    end()

    assert len(heard) == 1
    assert loop.recorder.tool_ns - before_ns == 2 * of_mark_ns
    loop.stalls.end()
