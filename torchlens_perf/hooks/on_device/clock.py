"""The clock of a device in eager mode: timed events, pooled, and read when the device has long passed them.

::

    mark() ─▶ pending, a queue for each stream ──drain(), at a step's end──▶ times on the device's line ─▶ span()

Events of one stream happen in their order, so one question a step is enough: has the newest mark of an earlier step
been reached? Then all before it have been. Nothing here waits for the device. (torch asks both events again before it
tells how far they are apart, which costs the host a microsecond.)

The device's times come onto the host's time line by anchors: an event on a stream that is otherwise idle, whose record
and whose happening the host brackets by its own clock. An anchor is at most a second old, which also keeps the float32
milliseconds, in which CUDA tells how far two events are apart, fine enough. Durations are differences on the device's
line, on which each anchor continues the one before it. events.py has the events of real devices.
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

MAX_EVENTS = 32768  # that wait to be read, or in the pool; an event is a few hundred bytes of the host
MAX_TIMES = 2 * MAX_EVENTS  # that are kept for span(), the newest
BEHIND_STEPS = 64  # that the device may be behind before no more is marked
ANCHOR_EVERY_NS = 1_000_000_000
ANCHOR_TIMEOUT_NS = 50_000  # an idle stream's event takes some microseconds
OLDEST_ANCHOR_NS = 30_000_000_000  # beyond it, one that is known less well is better: float32 milliseconds grow coarse
_FIRST_ANCHORS = 5
_FIRST_TIMEOUT_NS = 1_000_000


class DeviceAnchor(NamedTuple):
    """An event, and when it happened on the host's CLOCK_MONOTONIC, give or take `error_ns`."""

    event: Event
    host_ns: int
    error_ns: int
    device_ns: int = 0
    """On the device's line, which begins at the first anchor."""


class _Stream:
    """What is marked on one stream and has not been read."""

    def __init__(self) -> None:
        self.pending: deque[tuple[int, Event, DeviceAnchor]] = deque()
        self.boundaries: deque[tuple[int, Event]] = deque()  # the newest mark at each step's end
        self.read = 0  # the newest mark that has been read


class EventClock:
    """A Clock whose marks are events on the current stream. One device; under the GIL, as autograd marks too."""

    def __init__(self, events: AcceleratorEvents, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Looks for a first anchor, for some microseconds; now_ns: the host's clock."""
        self._events = events
        self.name = events.name
        self.now_ns = now_ns
        self._pool: list[Event] = []
        self._made = 0
        self._next_mark = itertools.count(1).__next__  # atomic: autograd's threads mark too
        self.marked = 0
        """The newest mark; so many were made."""
        self._streams: dict[Hashable, _Stream] = {}
        self._times: dict[int, tuple[int, DeviceAnchor]] = {}  # on the device's line, and by which anchor
        self._behind = False
        self.captured = 0
        """Marks that were not made because the stream was being captured."""
        self.skipped = 0
        """Marks that were not made because the device was BEHIND_STEPS behind, no anchor could be had, or it failed."""
        self.crowded = 0
        """Marks that were not made because MAX_EVENTS others had not been read."""
        self.aside = 0
        """Steps in which a phase's stream waited that is not the steps'. Counted by those who mark, as is the next."""
        self.open_ended = 0
        """Stalls whose end was not marked, and backward passes whose computation did not say when it ended."""
        self.marked_on: Hashable | None = None
        """The stream of the newest mark."""
        self.passed_over: set[Hashable] = set()
        """Streams that mark() was not to mark on, until somebody clears it."""
        self.drift_ns = 0
        """The most that an anchor was off when the next one was taken."""
        self._late: tuple[Event, int] | None = None  # an anchor that did not happen in time, and when it was recorded
        with events.beside_captures():
            anchors = [self._take_anchor(_FIRST_TIMEOUT_NS) for _ in range(_FIRST_ANCHORS)]
        self._anchor = min((each for each in anchors if each is not None), key=lambda each: each.error_ns, default=None)
        self._anchored_ns = now_ns()  # when one was last tried

    @property
    def error_ns(self) -> int | None:
        """How far a time may be off on the host's time line, as far as was seen; None without an anchor. Differences
        of two times are not affected by it."""
        return None if self._anchor is None else self._anchor.error_ns + self.drift_ns

    @property
    def missing(self) -> int:
        """Grows wherever something that should have been marked was not."""
        return self.captured + self.skipped + self.crowded + self.aside + self.open_ended

    def current(self) -> Hashable | None:
        """The calling thread's current stream; None while it is being captured."""
        return self._events.current()

    def mark(self, only_on: Hashable | None = None) -> int | None:
        """Marks now, on the current stream; None where that cannot be, which is counted. only_on: nothing is marked,
        and nothing counted, where the current stream is another one: that is passed over."""
        anchor = self._anchor
        if self._behind or anchor is None:
            self.skipped += 1
            return None
        event: Event | None = None
        try:
            stream = self._events.current()
            if stream is None:
                self.captured += 1
                return None
            if only_on is not None and stream != only_on:
                self.passed_over.add(stream)
                return None
            if self._pool:
                event = self._pool.pop()
            elif self._made < MAX_EVENTS:
                event = self._events.new()
                self._made += 1
            else:
                self.crowded += 1
                return None
            self._events.record(event, stream)
            self.marked = mark = self._next_mark()
            self.marked_on = stream
            queue = self._streams.get(stream)
            if queue is None:
                queue = self._streams.setdefault(stream, _Stream())
            queue.pending.append((mark, event, anchor))
            return mark
        except BaseException:
            self._made -= event is not None
            self.skipped += 1
            raise

    def span(self, begin: int, end: int) -> tuple[int, int] | None:
        """Start on the host's line, and duration on the device's. None while that is not known, or no longer: the times
        of MAX_TIMES marks are kept."""
        first, last = self._times.get(begin), self._times.get(end)
        if first is None or last is None:
            return None
        begin_ns, anchor = first
        return anchor.host_ns + begin_ns - anchor.device_ns, last[0] - begin_ns

    def drain(self, max_steps: int = 2) -> None:
        """At a step's end: reads what has happened. One question to the device for each stream with marks, and one
        more for each step that it has come to, up to `max_steps`; once a second, a new anchor."""
        if self._events.capturing():
            return
        with self._events.beside_captures():
            self._drain(max_steps)

    def _drain(self, max_steps: int) -> None:
        for key, stream in list(self._streams.items()):
            for _ in range(max_steps):
                if not stream.boundaries or not self._drain_to_boundary(stream):
                    break
            if stream.pending:
                newest, event, _ = stream.pending[-1]
                if not stream.boundaries or stream.boundaries[-1][0] != newest:
                    stream.boundaries.append((newest, event))
            elif not stream.boundaries:
                del self._streams[key]  # its handle may be another stream's one day
        max_behind = max((len(stream.boundaries) for stream in self._streams.values()), default=0)
        self._behind = max_behind > (0 if self._behind else BEHIND_STEPS)
        if self.now_ns() - self._anchored_ns >= ANCHOR_EVERY_NS:
            self._refresh_anchor()
        while len(self._times) > MAX_TIMES:
            del self._times[next(iter(self._times))]

    def frontier(self) -> int | None:
        """At a step's end, after drain(): the last mark that the device has reached, on the stream that is furthest
        behind. Asks only where it has not come to the end of the step before: three questions for eight marks."""
        stream = max(self._streams.values(), key=lambda each: len(each.boundaries), default=None)
        if stream is None or self._events.capturing():
            return None
        if len(stream.boundaries) < 2:
            return stream.read
        with self._events.beside_captures():
            low, high = 0, len(stream.pending)  # of those before `low` all are reached, of those from `high` on none
            while low < high:
                middle = (low + high) // 2
                if stream.pending[middle][1].query():
                    low = middle + 1
                else:
                    high = middle
        return stream.pending[low - 1][0] if low else stream.read

    def _drain_to_boundary(self, stream: _Stream) -> bool:
        """Reads all marks up to the oldest step's end, if the device has reached it."""
        last, event = stream.boundaries[0]
        if not event.query():
            return False
        stream.boundaries.popleft()
        while stream.pending and stream.pending[0][0] <= last:
            mark, reached, anchor = stream.pending.popleft()
            stream.read = mark
            self._times[mark] = anchor.device_ns + round(anchor.event.elapsed_time(reached) * 1e6), anchor
            self._pool.append(reached)
        return True

    def _take_anchor(self, patience_ns: int) -> DeviceAnchor | None:
        """None where the event does not happen in time: something else keeps the device's front end busy."""
        event = self._events.new()
        before_ns = self.now_ns()
        self._events.record_aside(event)
        while not event.query():
            if self.now_ns() - before_ns > patience_ns:
                self._late = event, before_ns
                return None
        return _anchor_between(event, before_ns, self.now_ns())

    def _refresh_anchor(self) -> None:
        now_ns, old = self.now_ns(), self._anchor
        self._anchored_ns = now_ns
        anchor = None
        if self._late is not None and (old is None or now_ns - old.host_ns > OLDEST_ANCHOR_NS):
            event, before_ns = self._late
            if event.query():
                anchor = _anchor_between(event, before_ns, now_ns)
        anchor = self._take_anchor(ANCHOR_TIMEOUT_NS) or anchor
        if anchor is None:
            return  # the old one stays, and its drift is seen when the next one is taken
        if old is not None:
            since_ns = round(old.event.elapsed_time(anchor.event) * 1e6)
            off_ns = abs(old.host_ns + since_ns - anchor.host_ns)
            self.drift_ns = max(self.drift_ns, off_ns - old.error_ns - anchor.error_ns)
            anchor = anchor._replace(device_ns=old.device_ns + since_ns)
        self._anchor = anchor


def _anchor_between(event: Event, before_ns: int, after_ns: int) -> DeviceAnchor:
    return DeviceAnchor(event, (before_ns + after_ns) // 2, (after_ns - before_ns + 1) // 2)
