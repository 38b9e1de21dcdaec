"""The clock of a device's events, the real class, with events of the fake driver."""

from __future__ import annotations

import pytest

from tests.support.device.fake_device import FakeDevice, FakeEvents
from tests.support.device.shim_kernels import COMPILER, WITHOUT_COMPILER
from torchlens_perf.hooks.on_device import clock as events
from torchlens_perf.hooks.on_device.clock import EventClock

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER)
EVENT_NS, LAUNCH_NS = 500, 1500  # of the fake device
MILLISECOND = 1_000_000
SECOND = 1_000_000_000


@pytest.fixture
def fake(device: FakeDevice) -> FakeEvents:
    """The events of one device."""
    return FakeEvents(device)


@pytest.fixture
def clock(fake: FakeEvents) -> EventClock:
    """A clock with a first anchor."""
    return EventClock(fake, fake.now_ns)


def marked(clock: EventClock) -> int:
    """A mark that must be possible."""
    mark = clock.mark()
    assert mark is not None
    return mark


def read(clock: EventClock, mark: int) -> int | None:
    """When the device came to one mark, on the host's line."""
    span = clock.span(mark, mark)
    return None if span is None else span[0]


def both_read(clock: EventClock, first: int, second: int) -> tuple[int, int]:
    """Start and end of a span that must be there."""
    span = clock.span(first, second)
    assert span is not None
    return span[0], sum(span)


@pytest.mark.parametrize("spin_ns", [10_000, MILLISECOND, 500 * MILLISECOND])
def test_work_is_timed_by_the_device(device: FakeDevice, clock: EventClock, spin_ns: int) -> None:
    """The host only enqueues; the span is as long as the device worked, and lies where it did on the host's line."""
    device.spin(7 * MILLISECOND)  # the device is busy when the mark is made
    issued_ns = device.now_ns()
    begin = marked(clock)
    device.spin(spin_ns)
    end = marked(clock)
    clock.drain()
    device.advance(SECOND)
    clock.drain()
    begin_ns, end_ns = both_read(clock, begin, end)
    assert end_ns - begin_ns == pytest.approx(spin_ns + LAUNCH_NS + EVENT_NS, abs=100)
    assert clock.error_ns is not None
    assert begin_ns == pytest.approx(issued_ns + 7 * MILLISECOND + LAUNCH_NS + EVENT_NS, abs=clock.error_ns + 100)
    assert clock.error_ns < 2000


def test_what_the_device_has_not_reached_is_not_known(device: FakeDevice, clock: EventClock) -> None:
    """And nobody waits for it: no synchronization, and one question at each step's end."""
    begin = marked(clock)
    device.spin(50 * MILLISECOND)
    end = marked(clock)
    clock.drain()
    synchronizations, questions = device.synchronizations, device.calls("cuEventQuery")
    for _ in range(5):
        device.advance(8 * MILLISECOND)
        clock.drain()
        assert read(clock, begin) is None, "only with its step"
        assert read(clock, end) is None
    assert device.calls("cuEventQuery") == questions + 5
    device.advance(20 * MILLISECOND)
    clock.drain()
    both_read(clock, begin, end)
    assert device.synchronizations == synchronizations


def test_twenty_steps_ahead_of_the_device(device: FakeDevice, clock: EventClock) -> None:
    """Every mark is read in the end; no synchronization, and two questions a step at most."""
    marks: list[int] = []
    times: dict[int, int] = {}

    def read_all() -> None:
        times.update({mark: time for mark in marks if (time := read(clock, mark)) is not None})

    synchronizations, questions = device.synchronizations, device.calls("cuEventQuery")
    for _ in range(20):
        marks += [marked(clock) for _ in range(6)]
        device.spin(3 * MILLISECOND)
        device.advance(2 * MILLISECOND)
        clock.drain()
        read_all()
    assert 0 < len(times) < len(marks)
    for _ in range(20):
        device.advance(3 * MILLISECOND)
        clock.drain()
        read_all()
    assert len(times) == len(marks)
    in_order = [times[mark] for mark in marks]
    assert in_order == sorted(in_order)
    assert device.synchronizations == synchronizations
    assert device.calls("cuEventQuery") <= questions + 2 * 40


def test_events_come_from_a_pool(device: FakeDevice, fake: FakeEvents, clock: EventClock) -> None:
    """A thousand steps take the events of two, and an anchor a second."""
    for _ in range(1000):
        begin, end = marked(clock), marked(clock)
        device.advance(MILLISECOND)
        clock.drain()
        read(clock, begin)
        read(clock, end)
    assert fake.made < 12


def test_streams_do_not_wait_for_each_other(device: FakeDevice, fake: FakeEvents, clock: EventClock) -> None:
    """A stream that is far behind does not keep another one's times back."""
    slow, fast = device.new_stream(), device.new_stream()
    fake.stream = slow
    slow_begin = marked(clock)
    device.spin(900 * MILLISECOND, slow)
    slow_end = marked(clock)
    fake.stream = fast
    begin = marked(clock)
    device.spin(MILLISECOND, fast)
    end = marked(clock)
    clock.drain()
    device.advance(10 * MILLISECOND)
    clock.drain()
    begin_ns, end_ns = both_read(clock, begin, end)
    assert end_ns - begin_ns == pytest.approx(MILLISECOND + LAUNCH_NS + EVENT_NS, abs=100)
    assert read(clock, slow_end) is None
    device.advance(SECOND)
    clock.drain()
    begin_ns, end_ns = both_read(clock, slow_begin, slow_end)
    assert end_ns - begin_ns == pytest.approx(900 * MILLISECOND + LAUNCH_NS + EVENT_NS, abs=100)


def test_a_capture_is_left_alone(device: FakeDevice, fake: FakeEvents, clock: EventClock) -> None:
    """No record, no query and no elapsed time while a graph is captured, and the marks that were not made counted."""
    before = marked(clock)
    clock.drain()
    device.advance(MILLISECOND)
    fake.stream = device.new_stream()
    device.begin_capture(fake.stream)
    calls = {name: device.calls(name) for name in ("cuEventQuery", "cuEventRecord", "cuEventElapsedTime_v2")}
    assert clock.mark() is None
    clock.drain()
    assert {name: device.calls(name) for name in calls} == calls
    device.end_capture(fake.stream)
    fake.stream = 0
    assert clock.captured == 1
    clock.drain()
    assert read(clock, before) is not None


def test_a_capture_on_another_thread_goes_on(device: FakeDevice, clock: EventClock) -> None:
    """In the global mode any thread's question would end it: ours are asked in a mode in which they do not."""
    before = marked(clock)
    clock.drain()
    device.advance(MILLISECOND)
    anothers = device.new_stream()
    device.begin_capture(anothers)
    clock.drain()
    assert read(clock, before) is not None
    device.advance(2 * SECOND)
    clock.drain()  # takes an anchor
    device.end_capture(anothers)


def test_a_device_far_behind_is_not_marked_further(device: FakeDevice, clock: EventClock) -> None:
    """Counted; and marked again once it has come to the last mark."""
    device.spin(10 * SECOND)
    for _ in range(events.BEHIND_STEPS + 1):
        marked(clock)
        clock.drain()
    assert clock.mark() is None
    assert clock.skipped == 1
    device.advance(11 * SECOND)
    for _ in range(events.BEHIND_STEPS):
        clock.drain()
    assert clock.mark() is not None


def test_more_marks_than_events(device: FakeDevice, clock: EventClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, and what was not marked counted, apart from a device that is steps behind."""
    monkeypatch.setattr(events, "MAX_EVENTS", 8)
    assert sum(clock.mark() is not None for _ in range(20)) == 8
    assert (clock.crowded, clock.skipped, clock.missing) == (12, 0, 12)


def test_many_marks_on_a_device_that_is_a_step_behind(device: FakeDevice, clock: EventClock) -> None:
    """As FSDP2 makes them with 82 modules and 8 micro-steps, the host two steps ahead: none is missing."""
    for step in range(6):
        for _ in range(3936):
            marked(clock)
        device.spin(300 * MILLISECOND)
        marked(clock)
        clock.drain()
        if step >= 2:
            device.advance(300 * MILLISECOND)
    assert clock.missing == 0


def test_an_event_that_cannot_be_made_or_recorded(
    fake: FakeEvents, clock: EventClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised, and the mark is missing."""
    for name in ("new", "record", "current"):
        with monkeypatch.context() as patched:
            patched.setattr(fake, name, lambda *given: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                clock.mark()
        assert clock.mark() is not None
    assert clock.skipped == 3


def test_old_times_are_forgotten(device: FakeDevice, clock: EventClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module whose backward pass never came has marked its beginning, and nobody will read it."""
    monkeypatch.setattr(events, "MAX_TIMES", 8)
    marks = []
    for _ in range(10):
        marks += [marked(clock), marked(clock)]
        clock.drain()
        device.advance(MILLISECOND)
    clock.drain()
    assert [read(clock, mark) is not None for mark in marks] == [False] * 12 + [True] * 8


def test_the_device_may_drift(device: FakeDevice, fake: FakeEvents, clock: EventClock) -> None:
    """Its clock gains 50 us a second: an anchor a second keeps times that close, and the error is stated."""
    fake.fast = 50e-6
    for _ in range(8):
        device.advance(SECOND)
        clock.drain()
    assert clock.error_ns is not None
    assert clock.error_ns == pytest.approx(50_000, rel=0.1)
    issued_ns = device.now_ns()
    mark = marked(clock)
    clock.drain()
    device.advance(MILLISECOND)
    clock.drain()
    read_ns = read(clock, mark)
    assert read_ns == pytest.approx(issued_ns + EVENT_NS, abs=clock.error_ns)


def test_durations_do_not_depend_on_anchors(device: FakeDevice, fake: FakeEvents, clock: EventClock) -> None:
    """A span across two of them is as long as the device says: its clock gains 50 us a second here."""
    fake.fast = 50e-6
    for _ in range(5):
        begin = marked(clock)
        device.advance(SECOND)
        clock.drain()
        end = marked(clock)
        clock.drain()
        device.advance(MILLISECOND)
        clock.drain()
        span = clock.span(begin, end)
        assert span is not None
        assert span[1] == pytest.approx((SECOND + 1400) * (1 + fake.fast), abs=2000)


def test_without_an_anchor_nothing_is_marked(device: FakeDevice, fake: FakeEvents) -> None:
    """A device whose front end is busy gives none: marks are counted, not guessed; later one is found."""
    device.spin(2 * SECOND, fake.aside)
    clock = EventClock(fake, fake.now_ns)
    assert clock.error_ns is None
    assert clock.mark() is None
    assert clock.skipped == 1
    device.advance(4 * SECOND)
    clock.drain()
    assert clock.error_ns is not None
    assert clock.mark() is not None


def test_an_anchor_that_came_late_is_better_than_one_of_long_ago(
    device: FakeDevice, fake: FakeEvents, clock: EventClock
) -> None:
    """Its error is as wide as its bracket, and said."""
    first_error_ns = clock.error_ns
    for _ in range(40):
        device.spin(900 * MILLISECOND, fake.aside)  # never idle when an anchor is tried
        device.advance(SECOND + MILLISECOND)
        device.spin(100 * MILLISECOND, fake.aside)
        clock.drain()
    assert first_error_ns is not None
    assert clock.error_ns is not None
    assert first_error_ns < 2000 < clock.error_ns < SECOND
