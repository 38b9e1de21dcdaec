"""A bounded queue of a signal's items in memory, and the thread that sends them.

A failed request is retried with growing pauses of up to a minute, or after the delay that the
endpoint requests. Meanwhile, new items are queued. A full queue drops the oldest items. Items with
a source are not lost: the source is kept, and the items can be built from it again. Only one
request is in flight at a time, so at most one request is delivered twice.
"""

from __future__ import annotations

import dataclasses
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.metrics.export import Metric, MetricsData
from opentelemetry.sdk.trace import ReadableSpan

from torchlens_perf.errors import guard
from torchlens_perf.exporters.delivery.answer import SendOutcome, SendResult, retry_result
from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.run.undelivered import UndeliveredStep, WholeRun
from torchlens_perf.run.verdicts import Alert

Item: TypeAlias = ReadableSpan | ReadableLogRecord | MetricsData
"""An element of a request. A request of metrics has a single element."""
Source: TypeAlias = UndeliveredStep | Alert | WholeRun
"""The origin of items, from which they can be built again."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MAX_RETRY_AFTER_S = 600.0
_IDLE_S = 3600.0
_LOG_INTERVAL_S = 300.0
_WAIT_SLICE_S = 0.5
_MAX_DROPPED_SOURCES = 8192


class Transport(Protocol):
    """A way to send requests to an endpoint."""

    def send(self, items: Sequence[Item]) -> SendResult:
        """Send items once. The timeout of the user's settings applies."""

    def close(self) -> None:
        """Release all resources. The caller must not call send() afterwards."""


@dataclasses.dataclass(frozen=True)
class QueueLimits:
    """Size of a signal's requests and queue."""

    batch_items: int = 512
    """Largest number of items in a request."""
    delay_s: float = 0.0
    """Longest time to wait for a full request."""
    max_items: int = 16384
    """Largest number of items in the queue."""
    replaces: bool = False
    """True if each request contains the values of all earlier ones, as with cumulative metrics."""


@dataclasses.dataclass(frozen=True)
class _Queued:
    """Items that are sent in one request, possibly with others."""

    items: Sequence[Item]
    count: int
    source: Source | None


class Sender:
    """Delivers a signal's items, and counts them: spans, metric points or log records."""

    def __init__(
        self,
        signal: str,
        transport: Transport,
        limits: QueueLimits,
        collect: Callable[[Sender], float] = lambda sender: math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the thread.

        - collect: callback on the sender's thread that gives the items that are due to
          queue_items() of its argument. It returns the seconds until more items are due.
        - clock: returns seconds.
        """
        self.signal = signal
        self._transport, self._limits = transport, limits
        self.replaces = limits.replaces
        self._collect, self._clock = collect, clock
        self.put = self.delivered = self.rejected = self.refused = self.lost = 0
        """Numbers of items: added, delivered, rejected, in refused requests, and dropped for good.
        """
        self._changed = threading.Condition()
        self._queue: deque[_Queued] = deque()
        self._in_flight: list[_Queued] = []
        self._oldest_s = math.inf
        self._dropped: dict[UndeliveredStep, int] = {}
        self._closing = self._ended = self._woken = False
        self._next_try_s = 0.0
        self._consecutive_failures = self._total_failures = 0
        self._logged_s = -math.inf
        self._thread = threading.Thread(target=self._run, name=f"otlp-{signal}", daemon=True)
        self._thread.start()

    # -- on any thread

    def queue_items(self, items: Sequence[Item], source: Source | None = None) -> None:
        """Queue items without waiting. source: see Source; None if they cannot be built again."""
        size = self._limits.batch_items
        parts = [items[start : start + size] for start in range(0, len(items), size)]
        with self._changed:
            self.put += count_items(items)
            if isinstance(source, UndeliveredStep):
                self.put -= self._dropped.pop(source, 0)
            if not self._queue:
                self._oldest_s = self._clock()
            self._queue.extend(_Queued(part, count_items(part), source) for part in parts)
            self._drop_oldest()
            if not self.is_failing:
                self._wake()

    def keep_sources(self, sources: Iterable[UndeliveredStep]) -> None:
        """Add sources whose items an earlier process has not delivered."""
        with self._changed:
            for source in sources:
                self.put += source.spans
                self._keep_source(source, source.spans)

    def find_dropped_sources(self) -> list[UndeliveredStep]:
        """Return the oldest sources of dropped items for which the queue has room.

        Return none during an outage. queue_items() takes the items of these sources.
        """
        found: list[UndeliveredStep] = []
        with self._changed:
            room = 0 if self.is_failing else self._limits.max_items - self._count_queued()
            for source in self._dropped:
                if room <= 0:
                    break
                found.append(source)
                room -= source.spans
        return found

    def postpone_sources(self, sources: Iterable[UndeliveredStep], *, give_up: bool) -> None:
        """Move dropped sources behind all others. give_up: count their items as lost instead."""
        with self._changed:
            for source in sources:
                count = self._dropped.pop(source, 0)
                if give_up:
                    self.lost += count
                elif count:
                    self._dropped[source] = count

    def undelivered_sources(self) -> list[Source]:
        """Return the sources of all items that are not delivered, oldest first."""
        with self._changed:
            waiting = [each.source for each in (*self._in_flight, *self._queue) if each.source]
            return list(dict.fromkeys([*self._dropped, *waiting]))

    @property
    def waiting(self) -> int:
        """Number of items that are not delivered and not lost."""
        with self._changed:
            in_flight = sum(each.count for each in self._in_flight)
            return in_flight + self._count_queued() + sum(self._dropped.values())

    @property
    def can_rebuild(self) -> bool:
        """True if all items that wait can be built from their sources again."""
        with self._changed:
            return all(each.source is not None for each in (*self._in_flight, *self._queue))

    @property
    def is_failing(self) -> bool:
        """True if the last attempt to send failed."""
        return self._consecutive_failures > 0

    def wake(self) -> None:
        """Call `collect` now, because more items may be due."""
        with self._changed:
            self._wake()

    def flush(self, timeout_s: float) -> bool:
        """Send until no request is due, an attempt fails or the timeout passes.

        Return True if no request is due.
        """
        with self._changed:
            failed = self._total_failures
            self._next_try_s = 0.0
            self._wake()

            def is_flushed() -> bool:
                return not self._is_due() and not self._in_flight

            _wait_in_slices(
                lambda slice_s: self._changed.wait_for(
                    lambda: is_flushed() or self._total_failures != failed or self._ended, slice_s
                ),
                timeout_s,
            )
            return is_flushed()

    def begin_closing(self) -> None:
        """Make the thread send the remaining items and end, without waiting for the thread."""
        with self._changed:
            self._closing = True
            self._next_try_s = 0.0
            self._wake()

    def close(self, timeout_s: float) -> None:
        """Send the remaining items within the timeout. After a failed attempt, end at once."""
        self.begin_closing()

        def has_ended(slice_s: float) -> bool:
            self._thread.join(slice_s)
            return not self._thread.is_alive()

        if not _wait_in_slices(has_ended, timeout_s):
            logger.warning(
                "the OTLP endpoint did not accept all %s within %g s", self.signal, timeout_s
            )

    # -- on the sender's thread

    def _run(self) -> None:
        with guard(f"sending {self.signal} over OTLP"):
            try:
                while self._send_or_pause():
                    pass
            finally:
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                self._transport.close()

    def _send_or_pause(self) -> bool:
        """Send one request or pause once. Return True to continue."""
        due_s = self._collect(self)
        with self._changed:
            closing = self._closing
            pause_s = self._next_try_s - self._clock()
            if pause_s <= 0:
                self._take_request(everything=closing)
                pause_s = min(due_s, self._seconds_until_due())
            if not self._in_flight:
                self._changed.notify_all()
                if not closing:
                    self._changed.wait_for(lambda: self._woken, min(pause_s, _IDLE_S))
                    self._woken = False
                return not closing
        sent = [item for each in self._in_flight for item in each.items]
        return self._process_result(self._send_once(sent)) or not closing

    def _send_once(self, items: Sequence[Item]) -> SendResult:
        """Send once. An unexpected exception leads to a retry and does not end the thread."""
        try:
            return self._transport.send(items)
        except Exception as error:
            return retry_result(f"{type(error).__name__}: {error}")

    def _process_result(self, answer: SendResult) -> bool:
        """Process the result of a request. Return False if the request must be retried later."""
        with self._changed:
            sent, self._in_flight = self._in_flight, []
            count = sum(each.count for each in sent)
            was_failing = self.is_failing
            if answer.outcome is SendOutcome.LATER:
                self._queue.extendleft(reversed(sent))
                self._oldest_s = -math.inf
                self._drop_oldest()
                self._schedule_retry(answer.after_s)
            else:
                self._consecutive_failures = 0
            if answer.outcome is SendOutcome.DELIVERED:
                rejected = min(answer.rejected, count)
                self.rejected += rejected
                self.delivered += count - rejected
            elif answer.outcome is SendOutcome.REFUSED:
                self.refused += count
            self._changed.notify_all()
        self._log_result(answer, count, was_failing=was_failing)
        return answer.outcome is not SendOutcome.LATER

    def _log_result(self, answer: SendResult, count: int, *, was_failing: bool) -> None:
        if answer.outcome is SendOutcome.REFUSED:
            message = "the OTLP endpoint refused %d items of %s: %s"
            logger.error(message, count, self.signal, answer.reason)
        if answer.outcome is not SendOutcome.LATER:
            if was_failing:
                message = "the OTLP endpoint accepts %s again; %d items are waiting"
                logger.info(message, self.signal, self.waiting)
        elif self._clock() - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = self._clock()
            message = "%s are not delivered: %s. They are kept and retried."
            logger.error(message, self.signal, answer.reason)

    # -- parts; the caller must hold the lock

    def _wake(self) -> None:
        self._woken = True
        self._changed.notify_all()

    def _count_queued(self) -> int:
        return sum(each.count for each in self._queue)

    def _is_due(self) -> bool:
        return bool(self._queue) and self._seconds_until_due() <= 0

    def _seconds_until_due(self) -> float:
        if self._count_queued() >= self._limits.batch_items:
            return 0.0
        return self._oldest_s + self._limits.delay_s - self._clock() if self._queue else math.inf

    def _take_request(self, *, everything: bool) -> None:
        """Move the oldest items from the queue to the request in flight, if a request is due."""
        count = 0
        while self._queue and (everything or count or self._is_due()):
            if count and count + self._queue[0].count > self._limits.batch_items:
                break
            self._in_flight.append(self._queue.popleft())
            count += self._in_flight[-1].count
        if count and self._queue:
            self._oldest_s = self._clock()

    def _drop_oldest(self) -> None:
        most = 0 if self._limits.replaces else self._limits.max_items
        while self._count_queued() > most and len(self._queue) > 1:
            step = self._queue[0].source
            # A step that is larger than the queue is sent as a whole.
            if isinstance(step, UndeliveredStep) and step is self._queue[-1].source:
                break
            dropped = self._queue.popleft()
            if self._limits.replaces:
                self.put -= dropped.count
            elif isinstance(dropped.source, UndeliveredStep):
                self._keep_source(dropped.source, dropped.count)
            else:
                self.lost += dropped.count

    def _keep_source(self, source: UndeliveredStep, count: int) -> None:
        self._dropped[source] = self._dropped.get(source, 0) + count
        if len(self._dropped) > _MAX_DROPPED_SOURCES:
            self.lost += self._dropped.pop(next(iter(self._dropped)))

    def _schedule_retry(self, after_s: float | None) -> None:
        self._consecutive_failures += 1
        self._total_failures += 1
        pause_s = _FIRST_PAUSE_S * 2.0 ** min(10, self._consecutive_failures - 1)
        # Nodes must not all retry at the same moment.
        pause_s = min(_LONGEST_PAUSE_S, pause_s) * random.uniform(0.8, 1.2)
        if after_s is not None:
            pause_s = max(pause_s, min(after_s, _MAX_RETRY_AFTER_S))
        self._next_try_s = self._clock() + pause_s


def count_items(items: Iterable[Item]) -> int:
    """Return the number of spans, metric points or log records in these items."""
    return sum(
        sum(len(metric.data.data_points) for metric in metrics_of(item))
        if isinstance(item, MetricsData)
        else 1
        for item in items
    )


def metrics_of(data: MetricsData) -> list[Metric]:
    """Return the metrics of all resources and scopes."""
    return [
        metric
        for of in data.resource_metrics
        for scope in of.scope_metrics
        for metric in scope.metrics
    ]


def _wait_in_slices(wait: Callable[[float], bool], timeout_s: float) -> bool:
    """Call `wait` with short timeouts until it returns True or `timeout_s` passes. Return its last
    result.

    Python only handles Ctrl-C while the main thread runs Python code, so a single long wait could
    delay the handler.
    """
    until_s = time.monotonic() + timeout_s
    while (
        not (done := wait(max(0.0, min(_WAIT_SLICE_S, until_s - time.monotonic()))))
        and time.monotonic() < until_s
    ):
        pass
    return done
