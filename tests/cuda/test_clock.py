"""The clock of a device with the events of the fake driver, and with events in Python."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.device.fake_device import FakeDevice, FakeEvent, FakeStreams
from tests.support.device.shim_kernels import COMPILER, WITHOUT_COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER)
# Costs of calls on the fake device.
EVENT_NS, LAUNCH_NS = 500, 1500
MILLISECOND = 1_000_000
SECOND = 1_000_000_000


@pytest.fixture
def fake(device: FakeDevice) -> FakeStreams:
    return FakeStreams(device)


@pytest.fixture(params=["driver", "events"])
def clock(fake: FakeStreams, request: pytest.FixtureRequest) -> Any:
    """Return a clock that has its first anchor."""
    return fake.create_clock() if request.param == "driver" else fake.create_clock_of_events()


@pytest.fixture
def driver_clock(fake: FakeStreams) -> Any:
    return fake.create_clock()


def marked(clock: Any) -> int:
    """Make a mark on the device and require that it succeeds."""
    mark = clock.mark()
    assert mark is not None
    return mark


def read(clock: Any, mark: int) -> int | None:
    """Return the host time at which the device reached a mark."""
    span = clock.span(mark, mark)
    return None if span is None else span[0]


def both_read(clock: Any, first: int, second: int) -> tuple[int, int]:
    """Return the start and end of a span and require that both times are known."""
    span = clock.span(first, second)
    assert span is not None
    return span[0], sum(span)


@pytest.mark.parametrize("spin_ns", [10_000, MILLISECOND, 500 * MILLISECOND])
def test_span_has_the_devices_duration_although_the_host_only_enqueues(
    device: FakeDevice, clock: Any, spin_ns: int
) -> None:
    """The span is also at the right time on the host's time line."""
    device.spin(7 * MILLISECOND)  # This work keeps the device busy when the mark is made.
    issued_ns = device.now_ns()
    begin = marked(clock)
    device.spin(spin_ns)
    end = marked(clock)
    clock.read_reached_marks()
    device.advance(SECOND)
    clock.read_reached_marks()
    begin_ns, end_ns = both_read(clock, begin, end)
    assert end_ns - begin_ns == pytest.approx(spin_ns + LAUNCH_NS + EVENT_NS, abs=100)
    assert clock.error_ns is not None
    assert begin_ns == pytest.approx(
        issued_ns + 7 * MILLISECOND + LAUNCH_NS + EVENT_NS, abs=clock.error_ns + 100
    )
    assert clock.error_ns < 2000


def test_time_of_a_mark_is_unknown_until_the_device_has_reached_it(
    device: FakeDevice, clock: Any
) -> None:
    """The host does not wait for the device, and makes one query at each step's end."""
    begin = marked(clock)
    device.spin(50 * MILLISECOND)
    end = marked(clock)
    clock.read_reached_marks()
    synchronizations, questions = device.synchronizations, device.calls("cuEventQuery")
    for _ in range(5):
        device.advance(8 * MILLISECOND)
        clock.read_reached_marks()
        assert read(clock, begin) is None, "only with its step"
        assert read(clock, end) is None
    assert device.calls("cuEventQuery") == questions + 5
    device.advance(20 * MILLISECOND)
    clock.read_reached_marks()
    both_read(clock, begin, end)
    assert device.synchronizations == synchronizations


def test_all_marks_are_read_if_the_host_is_twenty_steps_ahead(
    device: FakeDevice, clock: Any
) -> None:
    """The host does not wait for the device, and makes at most two queries per step."""
    marks: list[int] = []
    times: dict[int, int] = {}

    def read_all() -> None:
        times.update({mark: time for mark in marks if (time := read(clock, mark)) is not None})

    synchronizations, questions = device.synchronizations, device.calls("cuEventQuery")
    for _ in range(20):
        marks += [marked(clock) for _ in range(6)]
        device.spin(3 * MILLISECOND)
        device.advance(2 * MILLISECOND)
        clock.read_reached_marks()
        read_all()
    assert 0 < len(times) < len(marks)
    for _ in range(20):
        device.advance(3 * MILLISECOND)
        clock.read_reached_marks()
        read_all()
    assert len(times) == len(marks)
    in_order = [times[mark] for mark in marks]
    assert in_order == sorted(in_order)
    assert device.synchronizations == synchronizations
    assert device.calls("cuEventQuery") <= questions + 2 * 40


def test_events_are_reused_over_a_thousand_steps(
    device: FakeDevice, fake: FakeStreams, clock: Any
) -> None:
    """A thousand steps use as many events as two steps, and those made in advance."""
    for _ in range(1000):
        begin, end = marked(clock), marked(clock)
        device.advance(MILLISECOND)
        clock.read_reached_marks()
        read(clock, begin)
        read(clock, end)
    assert clock.made <= 40


def test_stream_that_is_behind_does_not_delay_marks_of_another_stream(
    device: FakeDevice, fake: FakeStreams, clock: Any
) -> None:
    slow, fast = device.new_stream(), device.new_stream()
    fake.stream = slow
    slow_begin = marked(clock)
    device.spin(900 * MILLISECOND, slow)
    slow_end = marked(clock)
    fake.stream = fast
    begin = marked(clock)
    device.spin(MILLISECOND, fast)
    end = marked(clock)
    clock.read_reached_marks()
    device.advance(10 * MILLISECOND)
    clock.read_reached_marks()
    begin_ns, end_ns = both_read(clock, begin, end)
    assert end_ns - begin_ns == pytest.approx(MILLISECOND + LAUNCH_NS + EVENT_NS, abs=100)
    assert read(clock, slow_end) is None
    device.advance(SECOND)
    clock.read_reached_marks()
    begin_ns, end_ns = both_read(clock, slow_begin, slow_end)
    assert end_ns - begin_ns == pytest.approx(900 * MILLISECOND + LAUNCH_NS + EVENT_NS, abs=100)


def test_marks_during_a_graph_capture_make_no_device_call_and_are_counted(
    device: FakeDevice, fake: FakeStreams, clock: Any
) -> None:
    before = marked(clock)
    clock.read_reached_marks()
    device.advance(MILLISECOND)
    fake.stream = device.new_stream()
    device.begin_capture(fake.stream)
    calls = {
        name: device.calls(name) for name in ("cuEventQuery", "cuEventRecord", "cuEventElapsedTime")
    }
    assert clock.mark() is None
    clock.read_reached_marks()
    assert {name: device.calls(name) for name in calls} == calls
    device.end_capture(fake.stream)
    fake.stream = 0
    assert clock.captured == 1
    clock.read_reached_marks()
    assert read(clock, before) is not None


def test_mark_queries_do_not_invalidate_a_capture_on_another_thread(
    device: FakeDevice, driver_clock: Any
) -> None:
    """In global capture mode, a query invalidates captures of all threads unless it is in relaxed
    mode.
    """
    before = marked(driver_clock)
    driver_clock.read_reached_marks()
    device.advance(MILLISECOND)
    anothers = device.new_stream()
    device.begin_capture(anothers)
    driver_clock.read_reached_marks()
    assert read(driver_clock, before) is not None
    device.advance(2 * SECOND)
    driver_clock.read_reached_marks()  # Makes an anchor.
    device.end_capture(anothers)


def test_captured_idle_stream_gets_no_anchor_and_no_query(
    device: FakeDevice, fake: FakeStreams, driver_clock: Any
) -> None:
    """torch also gives the stream of the anchors to programs, and a program may capture it."""
    names = ("cuEventQuery", "cuEventRecord", "cuEventElapsedTime")
    device.advance(2 * SECOND)  # An anchor is due.
    device.begin_capture(fake.idle_stream)
    calls = [device.calls(name) for name in names]
    driver_clock.read_reached_marks()
    assert [device.calls(name) for name in names] == calls
    device.end_capture(fake.idle_stream)
    device.advance(2 * SECOND)
    driver_clock.read_reached_marks()
    assert device.calls("cuEventRecord") == calls[1] + 1
    assert (driver_clock.missing_marks, driver_clock.status) == (0, 0)


@pytest.mark.parametrize("method", ["create_event", "record", "query", "elapsed_time"])
def test_clock_is_right_after_an_exception_has_interrupted_an_anchor(
    device: FakeDevice, fake: FakeStreams, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The exception, which may be a signal handler's, goes to the user's code."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    clock = fake.create_clock_of_events()

    def take_an_anchor() -> None:
        clock.read_reached_marks(0)
        for _ in range(10):  # Here the exception arrives.
            pass

    for _ in range(64):  # All events that were made in advance are used.
        marked(clock)
    for _ in range(2):
        clock.read_reached_marks()
        device.advance(MILLISECOND)
    begin = marked(clock)
    for _ in range(64 * (method == "create_event")):  # No event is left.
        marked(clock)
    device.advance(2 * SECOND)  # An anchor is due.
    with monkeypatch.context() as patched:
        patched.setattr(fake if hasattr(fake, method) else FakeEvent, method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            take_an_anchor()
    soon_ns = device.now_ns()
    soon = marked(clock)
    for _ in range(3):
        device.advance(2 * SECOND)
        clock.read_reached_marks()
    issued_ns = device.now_ns()
    end = marked(clock)
    clock.read_reached_marks()
    device.advance(MILLISECOND)
    clock.read_reached_marks()
    begin_ns, end_ns = both_read(clock, begin, end)
    assert clock.error_ns < 5000
    assert end_ns == pytest.approx(issued_ns + EVENT_NS, abs=clock.error_ns + 2000)
    assert end_ns - begin_ns == pytest.approx(8 * SECOND, abs=10 * MILLISECOND)
    assert read(clock, soon) == pytest.approx(soon_ns + EVENT_NS, abs=clock.error_ns + 2000)


def test_stream_first_seen_in_the_middle_of_a_step_is_read_with_that_step(
    device: FakeDevice, fake: FakeStreams, clock: Any
) -> None:
    first = marked(clock)
    fake.stream = device.new_stream()
    begin = marked(clock)
    device.spin(3 * MILLISECOND, fake.stream)
    end = marked(clock)
    fake.stream = 0
    last = marked(clock)
    clock.read_reached_marks()
    device.advance(MILLISECOND)
    clock.read_reached_marks()
    assert [read(clock, mark) is not None for mark in (first, begin, end, last)] == [
        True, False, False, True,
    ]  # fmt: skip
    assert clock.find_last_reached_mark() == first, "the new stream has not reached its first mark"
    device.advance(10 * MILLISECOND)
    clock.read_reached_marks()
    begin_ns, end_ns = both_read(clock, begin, end)
    assert end_ns - begin_ns == pytest.approx(3 * MILLISECOND + LAUNCH_NS + EVENT_NS, abs=100)
    assert clock.missing_marks == 0


def test_new_stream_may_lose_its_place_while_its_first_mark_is_recorded(
    device: FakeDevice, fake: FakeStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record sets the GIL free, and another thread may end the step and mark another stream."""
    clock, record = fake.create_clock_of_events(), fake.record
    new, slow = device.new_stream(), device.new_stream()
    between: list[int] = []

    def record_after_another_thread(event: FakeEvent, stream: int) -> None:
        if stream == new and not between:
            between.append(0)
            clock.read_reached_marks()
            fake.stream = slow
            device.spin(100 * MILLISECOND, slow)
            between[0] = marked(clock)
            fake.stream = new
        record(event, stream)

    monkeypatch.setattr(fake, "record", record_after_another_thread)
    fake.stream = new
    mark = marked(clock)
    fake.stream = 0
    clock.read_reached_marks()
    device.advance(MILLISECOND)
    clock.read_reached_marks()
    assert read(clock, mark) is not None
    assert read(clock, between[0]) is None, "the other stream is behind"
    device.advance(SECOND)
    clock.read_reached_marks()
    assert read(clock, between[0]) is not None


def test_negative_times_of_the_driver_are_lost(device: FakeDevice, driver_clock: Any) -> None:
    """No time is made of them, and marks and anchors after them are right."""
    begin, end = marked(driver_clock), marked(driver_clock)
    driver_clock.read_reached_marks()
    device.advance(2 * SECOND)  # An anchor is due.
    device.set_drift(-2)
    driver_clock.read_reached_marks()
    device.set_drift(0)
    assert driver_clock.span(begin, end) is None
    assert read(driver_clock, begin) is None
    issued_ns = device.now_ns()
    later = marked(driver_clock)
    driver_clock.read_reached_marks()
    device.advance(2 * SECOND)
    driver_clock.read_reached_marks()
    assert read(driver_clock, later) == pytest.approx(
        issued_ns + EVENT_NS, abs=driver_clock.error_ns + 500
    )


def test_no_marks_are_made_while_the_device_is_far_behind(device: FakeDevice, clock: Any) -> None:
    """Missing marks are counted. Marking continues after the device has reached the last mark."""
    device.spin(10 * SECOND)
    steps = 0
    while clock.mark() is not None:
        clock.read_reached_marks()
        steps += 1
    assert steps == 65
    assert clock.skipped == 1
    device.advance(11 * SECOND)
    for _ in range(steps):
        clock.read_reached_marks()
    assert clock.mark() is not None


def test_marks_beyond_the_event_limit_are_skipped_and_counted_separately(
    fake: FakeStreams,
) -> None:
    """The limit bounds memory. Marks skipped for a late device are counted separately."""
    clock = fake.create_clock(max_events=8)
    marks = sum(clock.mark() is not None for _ in range(20))
    assert marks >= 7, "one event is the anchor's"
    assert (clock.crowded, clock.skipped, clock.missing_marks) == (20 - marks, 0, 20 - marks)


def test_event_limit_is_sufficient_for_a_large_model_two_steps_ahead(
    device: FakeDevice, clock: Any
) -> None:
    """The model has 82 modules with FSDP2 and 8 micro-steps."""
    for step in range(6):
        for _ in range(3936):
            marked(clock)
        device.spin(300 * MILLISECOND)
        marked(clock)
        clock.read_reached_marks()
        if step >= 2:
            device.advance(300 * MILLISECOND)
    assert clock.missing_marks == 0


@pytest.mark.parametrize("function", ["cuEventRecord", "cuEventCreate"])
def test_failure_of_the_driver_leaves_the_mark_missing(
    device: FakeDevice, driver_clock: Any, function: str
) -> None:
    for _ in range(64 * (function == "cuEventCreate")):
        driver_clock.mark()  # No event is left that was made in advance.
    device.fail(function)
    assert driver_clock.mark() is None
    assert (driver_clock.skipped, driver_clock.status) == (1, 999)
    device.fail("")
    assert driver_clock.mark() is not None


def test_failure_of_events_in_python_leaves_the_mark_missing(
    fake: FakeStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = fake.create_clock_of_events()
    with monkeypatch.context() as patched:
        patched.setattr(fake, "record", lambda *given: 1 / 0)
        assert clock.mark() is None
    assert clock.mark() is not None
    assert (clock.skipped, clock.status) == (1, -1)


def test_marks_never_read_are_dropped_with_their_old_step(
    device: FakeDevice, fake: FakeStreams
) -> None:
    """If the backward pass of a module never runs, the mark of that pass's start is never read."""
    clock = fake.create_clock(max_events=16)
    marks = []
    for _ in range(30):
        marks += [marked(clock), marked(clock)]
        clock.read_reached_marks()
        device.advance(MILLISECOND)
    clock.read_reached_marks()
    assert [read(clock, mark) is not None for mark in marks] == [False] * 28 + [True] * 32


def test_anchors_correct_the_drift_of_the_devices_clock(
    device: FakeDevice, fake: FakeStreams, clock: Any
) -> None:
    """The device's clock gains 50 us per second. The remaining error is reported by the clock."""
    device.set_drift(50e-6)
    for _ in range(8):
        device.advance(SECOND)
        clock.read_reached_marks()
    assert clock.error_ns is not None
    assert clock.error_ns == pytest.approx(50_000, rel=0.1)
    issued_ns = device.now_ns()
    mark = marked(clock)
    clock.read_reached_marks()
    device.advance(MILLISECOND)
    clock.read_reached_marks()
    read_ns = read(clock, mark)
    assert read_ns == pytest.approx(issued_ns + EVENT_NS, abs=clock.error_ns)


def test_duration_of_a_span_across_two_anchors_has_no_drift_correction(
    device: FakeDevice, fake: FakeStreams, clock: Any
) -> None:
    """A span's length is that of the device's clock, even if this clock gains 50 us per second."""
    device.set_drift(50e-6)
    for _ in range(5):
        begin = marked(clock)
        device.advance(SECOND)
        clock.read_reached_marks()
        end = marked(clock)
        clock.read_reached_marks()
        device.advance(MILLISECOND)
        clock.read_reached_marks()
        span = clock.span(begin, end)
        assert span is not None
        assert span[1] == pytest.approx((SECOND + 1400) * (1 + 50e-6), abs=2000)


def test_marks_are_counted_as_missing_while_no_anchor_succeeds(
    device: FakeDevice, fake: FakeStreams
) -> None:
    """The front end of the device is busy at first, and a later attempt to make an anchor succeeds."""
    device.spin(2 * SECOND, fake.idle_stream)
    clock = fake.create_clock()
    assert clock.error_ns is None
    assert clock.mark() is None
    assert clock.skipped == 1
    device.advance(4 * SECOND)
    clock.read_reached_marks()
    assert clock.error_ns is not None
    assert clock.mark() is not None


def test_inexact_anchor_is_used_only_if_the_last_one_is_old(
    device: FakeDevice, fake: FakeStreams, clock: Any
) -> None:
    """The error of an anchor is half of the time between its record and its completion."""
    first_error_ns = clock.error_ns
    for _ in range(40):
        # The device is busy at each attempt to make an anchor.
        device.spin(900 * MILLISECOND, fake.idle_stream)
        device.advance(SECOND + MILLISECOND)
        device.spin(100 * MILLISECOND, fake.idle_stream)
        clock.read_reached_marks()
    assert first_error_ns is not None
    assert clock.error_ns is not None
    assert first_error_ns < 2000 < clock.error_ns < SECOND


def test_inaccurate_first_anchor_is_replaced_soon(device: FakeDevice, fake: FakeStreams) -> None:
    """The device is busy when the clock is created. The lag of device times is unknown until then."""
    device.spin(4_500_000, fake.idle_stream)
    clock = fake.create_clock()
    assert clock.error_ns > 50_000
    device.advance(200 * MILLISECOND)
    clock.read_reached_marks()
    assert clock.error_ns < 50_000 + clock.drift_ns


def test_device_is_marked_while_the_context_of_another_device_is_current(
    device: FakeDevice, driver_clock: Any
) -> None:
    """The other device's context is current again after a mark and after a reading."""
    device.context = 2
    marks = [marked(driver_clock) for _ in range(100)]
    driver_clock.read_reached_marks()
    assert device.context == 2
    device.advance(MILLISECOND)
    driver_clock.read_reached_marks()
    assert device.context == 2
    assert all(read(driver_clock, mark) is not None for mark in marks)
    assert (driver_clock.skipped, driver_clock.status) == (0, 0)


def test_error_of_a_long_pause_is_forgotten_at_the_next_anchor(
    device: FakeDevice, driver_clock: Any
) -> None:
    """During an evaluation of a minute, no step ends and no anchor is taken."""
    device.set_drift(10e-6)
    for pause_s in (1, 60, 1):
        device.advance(pause_s * SECOND)
        driver_clock.read_reached_marks()
    assert driver_clock.error_ns < 50_000


def test_failure_to_read_whether_a_stream_is_captured_is_no_capture(
    device: FakeDevice, driver_clock: Any
) -> None:
    device.fail("cuStreamIsCapturing")
    assert driver_clock.mark() is None
    device.fail("")
    assert (driver_clock.captured, driver_clock.skipped, driver_clock.status) == (0, 1, 999)
