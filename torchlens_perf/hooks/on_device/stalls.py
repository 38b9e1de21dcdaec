"""Stalls: waits of the compute stream for communication, each between two marks on that stream.

The host only issues work to a device, so host times of all ranks become equal, whichever rank is
slow. The work of a rank's own device is its step minus the stalls.

- Stalls are marked on the compute stream only, the stream of the steps' boundaries. Waits of other
  streams, such as FSDP2's own, do not delay computation.
- If a phase computes on another stream, waits there do delay it. The times of such a step are
  unknown.
- Of nested waits, the outermost is the stall.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.recorder.clocks import LONGEST_MARK_NS
from torchlens_perf.run.ring import Kind

if TYPE_CHECKING:
    from torchlens_perf.hooks.on_device.clock import EventClock
    from torchlens_perf.recorder.session import Session

_WAIT = int(Kind.WAIT)
# Holders of a stall that are not thread ids.
_NO_THREAD, _TAIL = 0, -1

SpanMarked = Callable[[int, int, int, int], None]
"""Receives the kind of a span, the id of its name, and the marks of its begin and end."""


class Stalls:
    """Marker of waits on the training thread, and on autograd's thread in a backward pass.

    Methods must be called with the GIL.
    """

    def __init__(self, session: Session, clock: EventClock, span_marked: SpanMarked) -> None:
        """Create the object on the training thread."""
        self._session, self._recorder = session, session.recorder
        self._clock = clock
        self._span_marked = span_marked
        self._wait, self._collective = (
            session.intern("wait"),
            session.intern("synchronous collective"),
        )
        # Held during a stall. It is only acquired without blocking.
        self._open = threading.Lock()
        self._holder = _NO_THREAD  # The thread that holds the lock.
        self._depth = 0
        self._begin = self._name_id = 0
        self._backward_end: int | None = None
        self.stream: Hashable | None = None
        """The compute stream, as of the last step's end."""
        # Streams other than the compute stream on which a phase of this step has ended.
        self._phases_on: set[Hashable] = set()

    @guard("marking a stall")
    def begin(self, name_id: int) -> int | None:
        """Mark the begin of a wait of the calling thread, which must call end() after it.

        Returns the mark if a stall begins, or None inside of another stall.
        """
        start_ns, thread = self._recorder.now_ns(), threading.get_ident()
        if self._holder == thread:
            self._depth += 1
            return None
        # Another user thread may wait while the device computes.
        if not self._session.thread.is_current():
            return None
        mark = self._begin_stall(name_id, thread)
        self._recorder.add_overhead(min(self._recorder.now_ns() - start_ns, LONGEST_MARK_NS))
        return mark

    def _begin_stall(self, name_id: int, holder: int) -> int | None:
        if not self._open.acquire(blocking=False):
            return None
        try:
            mark = self._clock.mark(self.stream)
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
        """Mark the end of a wait. Return the mark if a stall ends."""
        if self._holder != threading.get_ident():
            return None
        self._depth -= 1
        if self._depth:
            return None
        start_ns, mark = self._recorder.now_ns(), None
        try:
            mark = self._clock.mark(self.stream)
        finally:
            self._close(mark)
        self._recorder.add_overhead(min(self._recorder.now_ns() - start_ns, LONGEST_MARK_NS))
        return mark

    def begin_wait(self) -> None:
        """Mark the begin of a wait for a c10d operation or a functional collective's tensor."""
        self.begin(self._wait)

    def begin_collective(self) -> Callable[[], None] | None:
        """Mark the begin of a collective on the current stream, which waits until it has ended.

        Returns the function to call after the collective, or None if nothing was marked.
        """
        stall = self.begin(self._collective)
        # The listener also gets the times of collectives that are not a stall.
        has_listener = self._session.clocks.collective_listener is not None
        mark = self._clock.mark() if stall is None and has_listener else stall
        return None if mark is None else partial(self._end_collective, mark, stall is not None)

    @guard("marking a collective")
    def _end_collective(self, begin: int, is_stall: bool) -> None:
        end, listener = (
            self.end() if is_stall else self._clock.mark(),
            self._session.clocks.collective_listener,
        )
        if listener is not None and end is not None:
            listener(begin, end)

    @guard("marking the end of a backward pass's computation")
    def begin_tail(self, name_id: int) -> int | None:
        """Begin a stall when a backward pass has computed its last gradient, on any thread.

        Returns the mark if a stall begins.
        """
        mark = self._begin_stall(name_id, _TAIL)
        if mark is not None:
            self._backward_end = None
        return mark

    def backward_ended(self, mark: int) -> None:
        """Use the mark of the backward pass's end as the end of its tail."""
        self._backward_end = mark

    @guard("marking the end of a backward pass")
    def end_tail(self, *, raised: bool = False, is_known: bool = True) -> None:
        """End the tail of a backward pass, on the thread that called the pass.

        is_known: True if the end of the computation is known, or no other rank needs the gradients.
        """
        if not is_known and not raised:
            self._clock.open_ended += 1
        if self._holder != _TAIL:
            return
        backward_end, end = self._backward_end, None
        try:
            if not raised:
                end = self._clock.mark(self.stream) if backward_end is None else backward_end
        finally:
            self._close(end)

    def phase_marked(self) -> None:
        if self.stream is not None and self._clock.marked_on != self.stream:
            self._phases_on.add(self._clock.marked_on)

    def step_ended(self) -> None:
        """Close a stall that was interrupted before its end mark, and count it as missing.

        At a step's end no wait is in progress.
        """
        clock = self._clock
        if not self._recorder.backwards:
            if self._holder != _NO_THREAD:
                self._close(None)
            # An exception interrupted begin() before it had set the holder.
            elif self._open.locked():
                self._open.release()
                clock.open_ended += 1
        if self._phases_on and not self._phases_on.isdisjoint(clock.passed_over):
            clock.aside += 1
        self._phases_on.clear()
        clock.passed_over.clear()

    def _close(self, mark: int | None) -> None:
        """End the stall in progress. mark: its end, or None if it is unknown."""
        begin, name_id, self._holder = self._begin, self._name_id, _NO_THREAD
        self._open.release()
        if mark is None:
            self._clock.open_ended += 1
        else:
            self._span_marked(_WAIT, name_id, begin, mark)
