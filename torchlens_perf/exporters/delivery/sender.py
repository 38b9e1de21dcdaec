"""A thread that sends the requests in a signal's outbox until it is closed.

A failed request is retried until the outbox is full and drops it. The pause before a retry is the
delay that the endpoint requests, or a backoff of up to a minute. During retries, new requests are
written to disk, so they survive if the sidecar is killed. Only one request is in flight at a time,
so at most one request is delivered twice.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torchlens_perf.errors import guard
from torchlens_perf.exporters.delivery.answer import SendOutcome, SendResult, retry_result
from torchlens_perf.exporters.delivery.otlp_requests import count_items, split_in_halves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchlens_perf.exporters.delivery.otlp_requests import Item
    from torchlens_perf.exporters.delivery.outbox import Outbox, QueuedRequest

logger = logging.getLogger("torchlens_perf.sidecar")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MAX_RETRY_AFTER_S = 600.0
_IDLE_S, _WRITE_INTERVAL_S = 3600.0, 1.0
_LOG_INTERVAL_S = 300.0
_WAIT_SLICE_S = 0.5


class Transport(Protocol):
    """A way to send requests to an endpoint."""

    def send(self, items: Sequence[Item]) -> SendResult:
        """Send items once, within a bounded time."""

    def close(self) -> None:
        """Release all resources. The caller must not call send() afterwards."""


class Sender:
    """Delivers an outbox, and counts its items: spans, metric points or log records."""

    def __init__(
        self,
        outbox: Outbox,
        transport: Transport,
        collect: Callable[[bool], float] = lambda final: float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the thread.

        - collect: callback on the sender's thread that calls queue_items() with the items that are
          due, or with all items if its argument is True. The callback returns the seconds until
          more items are due.
        - clock: returns seconds.
        """
        self.signal, self.outbox = outbox.signal, outbox
        self._transport, self._collect, self._clock = transport, collect, clock
        self.put = self.delivered = self.rejected = self.refused = 0
        """Numbers of items: added, delivered, rejected, and in refused requests."""
        # Include the items of an earlier process.
        self.put = outbox.count_undelivered()
        self._changed = threading.Condition()
        self._closing = self._ended = self._written_by_close = False
        self._next_try_s = 0.0
        self._consecutive_failures = 0
        self._total_failures = 0
        self._logged_s = float("-inf")
        self._thread = threading.Thread(target=self._run, name=f"otlp-{self.signal}", daemon=True)
        self._thread.start()

    def queue_items(self, items: Sequence[Item]) -> None:
        """Queue items without waiting, on the sidecar's or the sender's thread."""
        with self._changed:
            self.put += count_items(items)
        self.outbox.put(items)

    @property
    def is_failing(self) -> bool:
        """True if the last attempt to send failed."""
        return self._consecutive_failures > 0

    def flush(self, timeout_s: float) -> bool:
        """Send until no request is due, an attempt fails or the timeout passes.

        Return True if no request is due.
        """
        with self._changed:
            failed = self._total_failures
            self._next_try_s = 0.0
            self._changed.notify_all()

            def wait(slice_s: float) -> bool:
                return self._changed.wait_for(
                    lambda: (
                        self.outbox.seconds_until_due() > 0
                        or self._total_failures != failed
                        or self._ended
                    ),
                    slice_s,
                )

            _wait_in_slices(wait, timeout_s)
        return self.outbox.seconds_until_due() > 0

    def begin_closing(self) -> None:
        """Make the thread deliver the remaining items and end, without waiting for the thread."""
        with self._changed:
            self._closing = True
            self._next_try_s = 0.0
            self._changed.notify_all()
        self.outbox.wake()

    def close(self, timeout_s: float) -> None:
        """Deliver the remaining items within the timeout, and write undelivered items to disk."""
        self.begin_closing()
        if not _wait_in_slices(self._has_ended, timeout_s):
            self._written_by_close = True
            logger.warning(
                "the OTLP endpoint did not accept all %s within %g s", self.signal, timeout_s
            )
        self._collect(True)
        self._write_undelivered()

    def _has_ended(self, within_s: float) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with guard(f"sending {self.signal} over OTLP"):
            try:
                while self._send_or_pause():
                    pass
            finally:
                # Items may have arrived during the last attempt.
                self._collect(True)
                self._write_undelivered()
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                self._transport.close()

    def _send_or_pause(self) -> bool:
        """Send one request or pause once. Return True to continue."""
        final = self._closing
        due_s = min(self._collect(final), self.outbox.seconds_until_due() or _IDLE_S)
        if self._consecutive_failures and not self._closing:
            self._write_undelivered(everything=False)
        pause_s = self._next_try_s - self._clock()
        if pause_s > 0 and not self._closing:
            with self._changed:
                # Wake up regularly during a long pause to write new requests to disk.
                self._changed.wait(min(pause_s, due_s, _WRITE_INTERVAL_S))
            return True
        request = self.outbox.next_request(everything=final)
        if request is None:
            with self._changed:
                self._changed.notify_all()
            if not final:
                self.outbox.wait(min(due_s, _IDLE_S))
            return not final
        return self._process_result(request, self._send_once(request)) or not self._closing

    def _send_once(self, request: QueuedRequest) -> SendResult:
        """Send once. An unexpected exception leads to a retry and does not end the thread."""
        try:
            return self._transport.send(request.items)
        except Exception as error:
            return retry_result(f"{type(error).__name__}: {error}")

    def _process_result(self, request: QueuedRequest, answer: SendResult) -> bool:
        """Process the result of a request. Return False if the request must be retried later."""
        # close() timed out and has written the request to disk.
        if self._written_by_close:
            return False
        if answer.outcome is SendOutcome.LATER:
            with self._changed:
                self._consecutive_failures += 1
                pause_s = min(
                    _LONGEST_PAUSE_S,
                    _FIRST_PAUSE_S * 2.0 ** min(10, self._consecutive_failures - 1),
                )
                # Nodes must not all retry at the same moment.
                pause_s *= random.uniform(0.8, 1.2)
                if answer.after_s is not None:
                    pause_s = max(pause_s, min(answer.after_s, _MAX_RETRY_AFTER_S))
                self._next_try_s = self._clock() + pause_s
                self._total_failures += 1
                self._changed.notify_all()
            self._log_failure(answer.reason)
            return False
        parts: list[list[Item]] = []
        if answer.outcome is SendOutcome.DELIVERED:
            self.delivered += request.count - min(answer.rejected, request.count)
            self.rejected += min(answer.rejected, request.count)
        elif answer.outcome is SendOutcome.TOO_LARGE and (split := split_in_halves(request.items)):
            parts = split
        else:
            self.refused += request.count
            logger.error(
                "the OTLP endpoint refused %d items of %s: %s",
                request.count,
                self.signal,
                answer.reason,
            )
        self.outbox.remove(request, parts)
        if self._consecutive_failures:
            logger.info(
                "the OTLP endpoint accepts %s again; %d items are waiting",
                self.signal,
                self.outbox.count_undelivered(),
            )
            self._consecutive_failures = 0
        with self._changed:
            self._changed.notify_all()
        return True

    def _write_undelivered(self, *, everything: bool = True) -> None:
        if not self.outbox.write_to_disk(everything=everything):
            self._log_failure(
                "undelivered items cannot be written to the run directory and stay in memory"
            )

    def _log_failure(self, reason: str) -> None:
        if self._clock() - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = self._clock()
            logger.error(
                "%s are not delivered: %s. They are kept and retried.", self.signal, reason
            )


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
