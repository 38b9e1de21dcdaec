"""Stalls: for how long the compute stream waited for communication, between two marks on it.

On a device the host only issues work, so the host's times of all ranks become the same whoever is slow. What a rank's
device did itself is its step without these waits. A stall counts only on the compute stream, the one that the steps'
boundaries are marked on: what waits on another stream, as FSDP2's own do, holds up nobody here. Where a phase computes
on another stream, waits there do, and such a step is not known. A stall counts once, at the outermost wait.
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
_NOBODY, _TAIL = 0, -1  # instead of a thread

SpanMarked = Callable[[int, int, int, int], None]
"""Called with a kind, a name's id, and the marks of its begin and its end."""


class Stalls:
    """Marks waits of the training thread, and of autograd's thread in a backward pass. Called with the GIL."""

    def __init__(self, session: Session, clock: EventClock, span_marked: SpanMarked) -> None:
        """On the training thread."""
        self._session, self._recorder = session, session.recorder
        self._clock = clock
        self._span_marked = span_marked
        self._wait, self._collective = session.intern("wait"), session.intern("synchronous collective")
        self._open = threading.Lock()  # never waited for: who has it is inside of a stall
        self._holder = _NOBODY  # the thread that has it
        self._depth = 0
        self._begin = self._name_id = 0
        self._backward_end: int | None = None
        self.stream: Hashable | None = None
        """The compute stream, as of the last step's end."""
        self._phases_on: set[Hashable] = set()  # other streams that a phase of this step has ended on

    @guard("marking a stall")
    def begin(self, name_id: int) -> int | None:
        """Before a wait of the calling thread; end() follows. The mark, if a stall begins here."""
        start_ns, thread = self._recorder.now_ns(), threading.get_ident()
        if self._holder == thread:
            self._depth += 1
            return None
        if not self._session.thread.is_current():  # another thread of the user's may wait while the device computes
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
        """After the wait. The mark, if it ended a stall."""
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
        """Before a wait for an operation of c10d, or for a functional one's tensor."""
        self.begin(self._wait)

    def begin_collective(self) -> Callable[[], None] | None:
        """Before an operation that runs in the current stream's order, which thus waits
        for the other ranks, and is busy with the transfer."""
        stall = self.begin(self._collective)
        heard = self._session.clocks.collective_listener is not None  # also on another stream
        mark = self._clock.mark() if stall is None and heard else stall
        return None if mark is None else partial(self._end_collective, mark, stall is not None)

    @guard("marking a collective")
    def _end_collective(self, begin: int, is_stall: bool) -> None:
        end, listener = self.end() if is_stall else self._clock.mark(), self._session.clocks.collective_listener
        if listener is not None and end is not None:
            listener(begin, end)

    @guard("marking the end of a backward pass's computation")
    def begin_tail(self, name_id: int) -> int | None:
        """When a backward pass has computed its last gradient, on whichever thread. The mark, if a stall begins."""
        mark = self._begin_stall(name_id, _TAIL)
        if mark is not None:
            self._backward_end = None
        return mark

    def backward_ended(self, mark: int) -> None:
        """The backward pass's own end has been marked: the same as its tail's."""
        self._backward_end = mark

    @guard("marking the end of a backward pass")
    def end_tail(self, *, raised: bool = False, is_known: bool = True) -> None:
        """When a backward pass has ended, on the thread that called it. is_known: it said when its computation ended,
        or nobody waits for its gradients."""
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
        """Nothing is waited for now: what was interrupted between its marks is forgotten, and the step lacks it."""
        clock = self._clock
        if not self._recorder.backwards:
            if self._holder != _NOBODY:
                self._close(None)
            elif self._open.locked():  # interrupted before it was anybody's
                self._open.release()
                clock.open_ended += 1
        if self._phases_on and not self._phases_on.isdisjoint(clock.passed_over):
            clock.aside += 1
        self._phases_on.clear()
        clock.passed_over.clear()

    def _close(self, mark: int | None) -> None:
        """mark: its end; None: that is not known."""
        begin, name_id, self._holder = self._begin, self._name_id, _NOBODY
        self._open.release()
        if mark is None:
            self._clock.open_ended += 1
        else:
            self._span_marked(_WAIT, name_id, begin, mark)
