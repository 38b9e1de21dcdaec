"""Sends one signal's requests from its outbox, on a thread of its own, until it is closed.

A request that the endpoint does not take now is tried again for as long as there is room in the outbox: after as long
as the endpoint asks, else after ever longer, up to a minute. Meanwhile what comes is written to the disk, so that a
sidecar that is killed loses none of it. A request is in flight one at a time, so that at most one is delivered twice.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torchlens_perf.errors import guard
from torchlens_perf.exporters.delivery.answer import Answer, Outcome, later
from torchlens_perf.exporters.delivery.otlp_requests import halves, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchlens_perf.exporters.delivery.otlp_requests import Item
    from torchlens_perf.exporters.delivery.outbox import Outbox, Request

logger = logging.getLogger("torchlens_perf.sidecar")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_LONGEST_ASKED_S = 600.0  # that an endpoint may ask to wait
_IDLE_S, _LOOK_S = 3600.0, 1.0
_LOGGED_EVERY_S = 300.0
_SLICE_S = 0.5


class Transport(Protocol):
    """Takes requests to an endpoint."""

    def send(self, items: Sequence[Item]) -> Answer:
        """One try; bounded in time."""

    def close(self) -> None:
        """No more is sent."""


class Sender:
    """Delivers an outbox. Numbers are of items: spans, metric points, log records."""

    def __init__(
        self,
        outbox: Outbox,
        transport: Transport,
        collect: Callable[[bool], float] = lambda final: float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """collect: called on the sender's thread, to add() what is due by now, or all if it is the last time; returns
        in how many seconds something is due again. clock: seconds; also what pauses are measured by."""
        self.signal, self.outbox = outbox.signal, outbox
        self._transport, self._collect, self._clock = transport, collect, clock
        self.put = self.delivered = self.rejected = self.refused = 0
        """How many were to be delivered, and were; of these, rejected by the endpoint; refused for good by it."""
        self.put = outbox.waiting()  # an earlier process left these
        self._changed = threading.Condition()
        self._closing = self._ended = self._left = False
        self._next_try_s = 0.0
        self._failures = 0  # in a row
        self._failed = 0  # in all
        self._logged_s = float("-inf")
        self._thread = threading.Thread(target=self._run, name=f"otlp-{self.signal}", daemon=True)
        self._thread.start()

    def add(self, items: Sequence[Item]) -> None:
        """Takes items over; never waits. The sidecar's thread, and the sender's."""
        with self._changed:
            self.put += size(items)
        self.outbox.put(items)

    @property
    def failing(self) -> bool:
        """Whether the last try has failed."""
        return self._failures > 0

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is due, or a try from now on has failed, at most so long. Returns whether nothing is."""
        with self._changed:
            failed = self._failed
            self._next_try_s = 0.0
            self._changed.notify_all()

            def wait(slice_s: float) -> bool:
                return self._changed.wait_for(
                    lambda: self.outbox.due_s() > 0 or self._failed != failed or self._ended, slice_s
                )

            _in_slices(wait, timeout_s)
        return self.outbox.due_s() > 0

    def begin_closing(self) -> None:
        """From here on, what is left is delivered until a try fails. Does not wait."""
        with self._changed:
            self._closing = True
            self._next_try_s = 0.0
            self._changed.notify_all()
        self.outbox.wake()

    def close(self, timeout_s: float) -> None:
        """Waits for that, at most so long; what then is left waits on the disk."""
        self.begin_closing()
        if not _in_slices(self._has_ended, timeout_s):
            self._left = True
            logger.warning("the OTLP endpoint did not take all %s within %g s", self.signal, timeout_s)
        self._collect(True)
        self._keep()

    def _has_ended(self, within_s: float) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with guard(f"sending {self.signal} over OTLP"):
            try:
                while self._round():
                    pass
            finally:
                self._collect(True)  # what came during the last try
                self._keep()
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                self._transport.close()

    def _round(self) -> bool:
        """One try, or one pause. Returns whether to go on."""
        final = self._closing
        due_s = min(self._collect(final), self.outbox.due_s() or _IDLE_S)
        if self._failures and not self._closing:
            self._keep(everything=False)
        pause_s = self._next_try_s - self._clock()
        if pause_s > 0 and not self._closing:
            with self._changed:
                self._changed.wait(min(pause_s, due_s, _LOOK_S))  # what came meanwhile goes to the disk
            return True
        request = self.outbox.oldest(everything=final)
        if request is None:
            with self._changed:
                self._changed.notify_all()
            if not final:
                self.outbox.wait(min(due_s, _IDLE_S))
            return not final
        return self._judge(request, self._answer(request)) or not self._closing

    def _answer(self, request: Request) -> Answer:
        """One try. What a transport did not expect may be over the next time, and must not end the thread."""
        try:
            return self._transport.send(request.items)
        except Exception as error:
            return later(f"{type(error).__name__}: {error}")

    def _judge(self, request: Request, answer: Answer) -> bool:
        """Draws the conclusions from an answer. Returns False where the endpoint does not take requests now."""
        if self._left:  # another thread has written it to the disk
            return False
        if answer.outcome is Outcome.LATER:
            self._failures += 1
            self._failed += 1
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(10, self._failures - 1))
            pause_s *= random.uniform(0.8, 1.2)  # nodes must not come back all at once
            if answer.after_s is not None:
                pause_s = max(pause_s, min(answer.after_s, _LONGEST_ASKED_S))
            with self._changed:
                self._next_try_s = self._clock() + pause_s
                self._changed.notify_all()
            self._log_failure(answer.reason)
            return False
        parts: list[list[Item]] = []
        if answer.outcome is Outcome.DELIVERED:
            self.delivered += request.count - min(answer.rejected, request.count)
            self.rejected += min(answer.rejected, request.count)
        elif answer.outcome is Outcome.TOO_LARGE and (split := halves(request.items)):
            parts = split
        else:
            self.refused += request.count
            logger.error("the OTLP endpoint has refused %d %s: %s", request.count, self.signal, answer.reason)
        self.outbox.remove(request, parts)
        if self._failures:
            logger.info("the OTLP endpoint takes %s again; %d wait", self.signal, self.outbox.waiting())
            self._failures = 0
        with self._changed:
            self._changed.notify_all()
        return True

    def _keep(self, *, everything: bool = True) -> None:
        if not self.outbox.to_disk(everything=everything):
            self._log_failure("what waits cannot be written to the run directory, and stays in memory")

    def _log_failure(self, reason: str) -> None:
        if self._clock() - self._logged_s >= _LOGGED_EVERY_S:
            self._logged_s = self._clock()
            logger.error("%s are not delivered: %s; they wait, and are tried again", self.signal, reason)


def _in_slices(wait: Callable[[float], bool], timeout_s: float) -> bool:
    """Calls wait(seconds) until it returns True, for so long in all. Returns whether it did.

    A thread that just begins may receive a Ctrl-C, and then nothing wakes the main thread: it looks only where it runs.
    """
    until_s = time.monotonic() + timeout_s
    while not (done := wait(max(0.0, min(_SLICE_S, until_s - time.monotonic())))) and time.monotonic() < until_s:
        pass
    return done
