"""Mark stalls, which are waits of the compute stream for communication.

The host only issues work to a device, so all ranks have equal host times even if one rank is slow.
The working time of a rank's device is the step's duration minus the stalls.

- Stalls are marked only on the compute stream, on which the ends of steps are marked (clock.stream). Waits of
  other streams, such as FSDP2's own, do not delay computation.
- If a phase runs on another stream, that stream's waits delay it, so the step's stalls are unknown.
- Only the outermost of nested waits is marked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.recorder.clocks import LONGEST_MARK_NS
from torchlens_perf.run.ring import Kind

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

_WAIT = int(Kind.WAIT)
# Values of `_holder` that are not thread ids.
_NO_THREAD, _TAIL = 0, -1
_NO_MARK = -1

SpanMarked = Callable[[int, int, int, int], None]
"""Receives the kind of a span, the id of its name, and the marks of its begin and end."""


class StallMarker:
    """Marker of device waits of the training thread, or of autograd's thread in a backward pass.

    Methods must be called with the GIL.
    """

    def __init__(self, session: Session, clock: Any, span_marked: SpanMarked) -> None:
        """Create the object on the training thread."""
        self._session, self._recorder = session, session.recorder
        self._clock = clock
        self._span_marked = span_marked
        self._wait = session.intern("wait")
        self._collective = session.intern("synchronous collective")
        # Lock that is held during a stall. It is only acquired without blocking.
        self._open = threading.Lock()
        self._holder = _NO_THREAD  # The thread that holds the lock.
        self._depth = 0
        self._begin = self._name_id = 0

    @guard("marking a stall")
    def begin(self, name_id: int) -> int | None:
        """Mark the begin of a wait. The calling thread must call end() after the wait.

        Return the mark, or None inside another wait.
        """
        thread = threading.get_ident()
        if self._holder == thread:
            self._depth += 1
            return None
        # Another user thread may wait while the device computes.
        if not self._session.thread.is_current():
            return None
        return self._begin_stall(name_id, thread)

    def _mark(self, *stream: int) -> int | None:
        """Record a mark on a stream, by default the current one, and charge its time."""
        start_ns = self._recorder.now_ns()
        mark: int | None = self._clock.mark(*stream)
        self._recorder.add_overhead(min(self._recorder.now_ns() - start_ns, LONGEST_MARK_NS))
        return mark

    def _begin_stall(self, name_id: int, holder: int) -> int | None:
        if not self._open.acquire(blocking=False):
            return None
        try:
            mark = self._mark(self._clock.stream)
            if mark is not None:
                self._begin, self._name_id, self._depth, self._holder = mark, name_id, 1, holder
                return mark
        except BaseException:
            self._open.release()
            raise
        self._open.release()
        return None

    @guard("marking a stall")
    def end(self) -> int | None:
        """Mark the end of a wait. Return the mark if this was the outermost wait."""
        if self._holder != threading.get_ident():
            return None
        self._depth -= 1
        if self._depth:
            return None
        mark: int | None = None
        try:
            mark = self._mark(self._clock.stream)
        finally:
            self._close_stall(mark)
        return mark

    def begin_wait(self) -> None:
        """Mark the begin of a wait for a c10d operation or a functional collective's tensor."""
        self.begin(self._wait)

    def begin_collective(self) -> Callable[[], None] | None:
        """Mark the begin of a collective for which the current stream waits.

        Return the function to call after the collective, or None if nothing was marked.
        """
        stall = self.begin(self._collective)
        # The listener also receives collectives that start inside another wait.
        has_listener = self._session.clocks.collective_listener is not None
        mark = self._mark() if stall is None and has_listener else stall
        return None if mark is None else partial(self._end_collective, mark, stall is not None)

    @guard("marking a collective")
    def _end_collective(self, begin: int, is_stall: bool) -> None:
        end = self.end() if is_stall else self._mark()
        listener = self._session.clocks.collective_listener
        if listener is not None and end is not None:
            listener(begin, end)

    @guard("marking the end of a backward pass's computation")
    def begin_backward_tail(self, name_id: int) -> int | None:
        """Begin a stall on any thread, after a backward pass has computed its last gradient.

        Return the mark, or None inside another wait.
        """
        mark = self._begin_stall(name_id, _TAIL)
        if mark is not None:
            self._clock.backward_end = _NO_MARK
        return mark

    @guard("marking the end of a backward pass")
    def end_backward_tail(self, *, raised: bool = False, is_known: bool = True) -> None:
        """End the stall of begin_backward_tail(). Called on the thread that called the backward pass.

        is_known: False if the last gradient has no mark, and the gradients are sent to other ranks.
        """
        if not is_known and not raised:
            self._clock.open_ended += 1
        if self._holder != _TAIL:
            return
        backward_end, end = self._clock.backward_end, None
        try:
            if not raised:
                # The mark of the backward pass's end is also the end of the stall.
                is_marked = backward_end != _NO_MARK
                end = backward_end if is_marked else self._mark(self._clock.stream)
        finally:
            self._close_stall(end)

    def finish_step(self) -> None:
        """Close a stall whose end mark is missing because of an exception, and count it.

        Called at the end of a step with waits. No wait is in progress there.
        """
        if not self._recorder.backwards:
            if self._holder != _NO_THREAD:
                self._close_stall(None)
            # An exception interrupted begin() before it had set the holder.
            elif self._open.locked():
                self._open.release()
                self._clock.open_ended += 1

    def _close_stall(self, mark: int | None) -> None:
        """End the current stall. mark: the mark of the stall's end, or None if it is missing."""
        begin, name_id, self._holder = self._begin, self._name_id, _NO_THREAD
        self._open.release()
        if mark is None:
            self._clock.open_ended += 1
        else:
            self._span_marked(_WAIT, name_id, begin, mark)
