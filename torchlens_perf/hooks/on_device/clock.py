"""Record timed events on a device, and read their times once the device has reached them.

::

    mark() ─▶ pending, a queue per stream ──read_reached_marks()──▶ device times ─▶ span()

Events of one stream complete in order, so one query per step is enough: once the device has reached
a step's newest mark, it has reached all earlier marks. No function here waits for the device.
(torch queries both events again to compute the time between them, which takes a microsecond.)

Anchors convert device times to host times. An anchor is an event on an otherwise idle stream. The
host reads its own clock before it records the event and again after the event has completed. A new
anchor is normally taken every second: CUDA returns the time between events as float32 milliseconds,
which is coarser for longer times. Durations are differences of device times. Each anchor continues
the time line of the previous anchor. events.py contains the events of real devices.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Event

    from torchlens_perf.hooks.on_device.events import AcceleratorEvents

# Maximum number of events in use and in the pool. Each event needs a few hundred bytes of host
# memory.
MAX_EVENTS = 32768
# Maximum number of device times kept for span(). The oldest times are dropped.
MAX_TIMES = 2 * MAX_EVENTS
# No marks are recorded while the device is more than this many steps behind the host.
BEHIND_STEPS = 64
ANCHOR_EVERY_NS = 1_000_000_000
# An event on an idle stream takes a few microseconds.
ANCHOR_TIMEOUT_NS = 50_000
# An older anchor is replaced even by a less accurate one: float32 milliseconds become coarse.
OLDEST_ANCHOR_NS = 30_000_000_000
_FIRST_ANCHORS = 5
_FIRST_TIMEOUT_NS = 1_000_000


class DeviceAnchor(NamedTuple):
    """An event and its time on the host's CLOCK_MONOTONIC, accurate to `error_ns`."""

    event: Event
    host_ns: int
    error_ns: int
    device_ns: int = 0
    """The event's time on the device's time line, which begins at the first anchor."""


class _StreamMarks:
    """The marks of one stream that have not been read."""

    def __init__(self) -> None:
        self.pending: deque[tuple[int, Event, DeviceAnchor]] = deque()
        self.boundaries: deque[tuple[int, Event]] = deque()  # The newest mark at each step's end.
        self.read = 0  # The newest mark that has been read.


class EventClock:
    """Clock of one device. A mark is an event that is recorded on the current stream.

    Methods must be called with the GIL, because autograd's threads also record marks.
    """

    def __init__(
        self, events: AcceleratorEvents, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Take the first anchor, which needs a few microseconds. now_ns: the host's clock."""
        self._events = events
        self.name = events.name
        self.now_ns = now_ns
        self._pool: list[Event] = []
        self._made = 0
        # One C call is atomic, which is necessary because autograd's threads also record marks.
        self._next_mark = itertools.count(1).__next__
        self.marked = 0
        """The newest mark's number, which equals the number of marks so far."""
        self._streams: dict[Hashable, _StreamMarks] = {}
        # Time on the device's time line, and the anchor that was used to compute it, by mark.
        self._times: dict[int, tuple[int, DeviceAnchor]] = {}
        self._behind = False
        self.captured = 0
        """Number of marks that were not recorded because the stream was being captured."""
        self.skipped = 0
        """Number of marks not recorded: the device was far behind, had no anchor or failed."""
        self.crowded = 0
        """Number of marks that were not recorded because MAX_EVENTS events were in use."""
        self.aside = 0
        """Number of steps in which a phase waited on another stream than the compute stream.

        Counted by StallMarker.
        """
        self.open_ended = 0
        """Number of waits without end mark, and of backward passes without tail mark.

        Counted by StallMarker.
        """
        self.marked_on: Hashable | None = None
        """The stream of the newest mark."""
        self.passed_over: set[Hashable] = set()
        """Streams on which mark() did nothing because of `only_on`.

        StallMarker clears it at the ends of steps.
        """
        self.drift_ns = 0
        """Largest error of an anchor's time line, measured at the next anchor."""
        # An anchor event that did not complete in time, and the time at which it was recorded.
        self._late: tuple[Event, int] | None = None
        with events.allow_during_captures():
            anchors = [self._take_anchor(_FIRST_TIMEOUT_NS) for _ in range(_FIRST_ANCHORS)]
        self._anchor = min(
            (each for each in anchors if each is not None),
            key=lambda each: each.error_ns,
            default=None,
        )
        self._anchored_ns = now_ns()  # Time of the last attempt to take an anchor.

    @property
    def error_ns(self) -> int | None:
        """The observed error of times on the host's time line, or None without an anchor.

        The difference of two times does not contain this error.
        """
        return None if self._anchor is None else self._anchor.error_ns + self.drift_ns

    @property
    def missing_marks(self) -> int:
        """Number of marks that should have been recorded but were not."""
        return self.captured + self.skipped + self.crowded + self.aside + self.open_ended

    def current_stream(self) -> Hashable | None:
        """Return the calling thread's current stream, or None while it is being captured."""
        return self._events.current_stream()

    def mark(self, only_on: Hashable | None = None) -> int | None:
        """Record a mark on the current stream. Return None, and count the missing mark, if that is
        impossible.

        only_on: the only stream on which a mark is recorded. Any other current stream is added to
        `passed_over`, without a mark or a count.
        """
        anchor = self._anchor
        if self._behind or anchor is None:
            self.skipped += 1
            return None
        event: Event | None = None
        try:
            stream = self._events.current_stream()
            if stream is None:
                self.captured += 1
                return None
            if only_on is not None and stream != only_on:
                self.passed_over.add(stream)
                return None
            if self._pool:
                event = self._pool.pop()
            elif self._made < MAX_EVENTS:
                event = self._events.create_event()
                self._made += 1
            else:
                self.crowded += 1
                return None
            self._events.record(event, stream)
            self.marked = mark = self._next_mark()
            self.marked_on = stream
            queue = self._streams.get(stream)
            if queue is None:
                queue = self._streams.setdefault(stream, _StreamMarks())
            queue.pending.append((mark, event, anchor))
            return mark
        except BaseException:
            self._made -= event is not None
            self.skipped += 1
            raise

    def span(self, begin: int, end: int) -> tuple[int, int] | None:
        """Return (start in host time, duration in device time) of a span, or None if unknown.

        Times are known after the device has reached both marks, and kept for MAX_TIMES marks.
        """
        first, last = self._times.get(begin), self._times.get(end)
        if first is None or last is None:
            return None
        begin_ns, anchor = first
        return anchor.host_ns + begin_ns - anchor.device_ns, last[0] - begin_ns

    def read_reached_marks(self, max_steps: int = 2) -> None:
        """Read the times of marks that the device has reached. Called at the end of each step.

        Query the device once for each stream with marks, and once more for each completed step, up
        to `max_steps`. A new anchor is taken every second.
        """
        if self._events.is_capturing():
            return
        with self._events.allow_during_captures():
            self._read_streams(max_steps)

    def _read_streams(self, max_steps: int) -> None:
        for key, stream in list(self._streams.items()):
            for _ in range(max_steps):
                if not stream.boundaries or not self._read_oldest_step(stream):
                    break
            if stream.pending:
                newest, event, _ = stream.pending[-1]
                if not stream.boundaries or stream.boundaries[-1][0] != newest:
                    stream.boundaries.append((newest, event))
            elif not stream.boundaries:
                del self._streams[key]  # CUDA may give a later stream the same handle.
        max_behind = max((len(stream.boundaries) for stream in self._streams.values()), default=0)
        self._behind = max_behind > (0 if self._behind else BEHIND_STEPS)
        if self.now_ns() - self._anchored_ns >= ANCHOR_EVERY_NS:
            self._refresh_anchor()
        while len(self._times) > MAX_TIMES:
            del self._times[next(iter(self._times))]

    def find_last_reached_mark(self) -> int | None:
        """Return the last mark that the device has reached on the stream that is furthest behind.

        Called at a step's end after read_reached_marks(). The device is queried only if it has not
        reached the end of the previous step, by a binary search: three queries for eight marks.
        """
        stream = max(self._streams.values(), key=lambda each: len(each.boundaries), default=None)
        if stream is None or self._events.is_capturing():
            return None
        if len(stream.boundaries) < 2:
            return stream.read
        with self._events.allow_during_captures():
            # All marks before `low` have been reached, and no mark from `high` on.
            low, high = 0, len(stream.pending)
            while low < high:
                middle = (low + high) // 2
                if stream.pending[middle][1].query():
                    low = middle + 1
                else:
                    high = middle
        return stream.pending[low - 1][0] if low else stream.read

    def _read_oldest_step(self, stream: _StreamMarks) -> bool:
        """Read all marks up to the end of the oldest unread step.

        Return False if the device has not reached that mark yet.
        """
        last, event = stream.boundaries[0]
        if not event.query():
            return False
        stream.boundaries.popleft()
        while stream.pending and stream.pending[0][0] <= last:
            mark, reached, anchor = stream.pending.popleft()
            stream.read = mark
            self._times[mark] = (
                anchor.device_ns + round(anchor.event.elapsed_time(reached) * 1e6),
                anchor,
            )
            self._pool.append(reached)
        return True

    def _take_anchor(self, timeout_ns: int) -> DeviceAnchor | None:
        """Return a new anchor, or None if its event does not complete in time.

        The event is late while other work keeps the device's front end busy.
        """
        event = self._events.create_event()
        before_ns = self.now_ns()
        self._events.record_on_idle_stream(event)
        while not event.query():
            if self.now_ns() - before_ns > timeout_ns:
                self._late = event, before_ns
                return None
        return _build_anchor(event, before_ns, self.now_ns())

    def _refresh_anchor(self) -> None:
        now_ns, old = self.now_ns(), self._anchor
        self._anchored_ns = now_ns
        anchor = None
        if self._late is not None and (old is None or now_ns - old.host_ns > OLDEST_ANCHOR_NS):
            event, before_ns = self._late
            if event.query():
                anchor = _build_anchor(event, before_ns, now_ns)
        anchor = self._take_anchor(ANCHOR_TIMEOUT_NS) or anchor
        if anchor is None:
            # The old anchor stays in use. Its drift is measured when the next anchor is taken.
            return
        if old is not None:
            since_ns = round(old.event.elapsed_time(anchor.event) * 1e6)
            off_ns = abs(old.host_ns + since_ns - anchor.host_ns)
            self.drift_ns = max(self.drift_ns, off_ns - old.error_ns - anchor.error_ns)
            anchor = anchor._replace(device_ns=old.device_ns + since_ns)
        self._anchor = anchor


def _build_anchor(event: Event, before_ns: int, after_ns: int) -> DeviceAnchor:
    return DeviceAnchor(event, (before_ns + after_ns) // 2, (after_ns - before_ns + 1) // 2)
