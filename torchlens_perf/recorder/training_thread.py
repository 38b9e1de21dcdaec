"""Decide which thread a watch records if the user's program has several threads.

Reading `parameter.grad` while another thread's backward pass writes it crashes the process. Hooks
therefore query this module before they read a tensor, count a pass or end a step.
"""

from __future__ import annotations

import enum
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.run.processes import read_kernel_text

if TYPE_CHECKING:
    from torchlens_perf.recorder.recorder import Recorder

_MOVED = (
    "the steps run on another thread than the one that entered watch(): that thread is recorded"
    " after its first forward pass"
)
_REPLACED = (
    "the model runs on several threads, one after the other: the first forward pass on a new one is"
    " no part of its step"
)
_NOT_RECORDED = (
    "other threads run models, train or call w.step() too: a watch records one thread, and their"
    " steps are not counted"
)
_BUSY_INTERVAL_S = 0.01
# A thread that runs only code of these packages has no work: it waits or returns a result.
_POOLS = frozenset(
    {
        "threading",
        "queue",
        "concurrent",
        "multiprocessing",
        "asyncio",
        "selectors",
        "socket",
        "anyio",
    }
)

# torch/csrc/autograd/engine.cpp names these threads; pt_autograd_0 belongs to the first device.
_AUTOGRAD_NAMES_BEGIN_WITH = "pt_autograd_"
_known = threading.local()


class Work(enum.IntEnum):
    """Kinds of work of a thread, in ascending order of priority.

    The thread with the highest kind of work is the training thread.
    """

    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3


class TrainingThread:
    """Decides which thread is recorded: the thread that entered the watch, or a thread with more
    work.

    A thread with a higher kind of work replaces the recorded thread. If the recorded thread has
    ended or is idle in a thread pool, any thread with work replaces it. If two threads train at the
    same time, the first one is recorded.
    """

    def __init__(self, recorder: Recorder, note: Callable[[str], None]) -> None:
        self._recorder = recorder
        self._note = note
        self._ident = threading.get_ident()
        # The highest kind of work of the recorded thread.
        self._most = 0
        self._elsewhere = threading.local()
        # Time of the last check at which the recorded thread was working.
        self._busy_s = 0.0
        self.gradients = threading.RLock()
        """Lock held while gradients are read, and while another thread announces its
        first backward pass.
        """
        self.reads_gradients = True
        """True while no other thread has run a backward pass. Valid while `gradients` is held."""

    def is_current(self) -> bool:
        """Return True on the recorded thread, and on autograd's threads during its backward pass."""
        return threading.get_ident() == self._ident or (
            self._recorder.backwards > 0 and is_autograd_thread()
        )

    def note_work(self, work: Work) -> bool:
        """Note the work of the calling thread.

        Return True if the calling thread is recorded. This call may change the recorded thread.
        """
        if threading.get_ident() == self._ident:
            if work > self._most:
                self._most = work
            return True
        return self._recorder.backwards > 0 if is_autograd_thread() else bool(self._take_over(work))

    @property
    def trains_alone(self) -> bool:
        """True if the recorded thread steps an optimizer, and no other thread has run a backward
        pass.
        """
        return self._most == Work.OPTIMIZER and self.reads_gradients

    def may_end_step(self) -> bool:
        """Return True if w.step() on the calling thread ends a step.

        On threads that are not recorded, the call is noted and ends no step.
        """
        if threading.get_ident() == self._ident or not getattr(self._elsewhere, "works", False):
            return True
        self._note(_NOT_RECORDED)
        return False

    def stop_reading_gradients(self) -> None:
        """Stop reading gradients, because an unrecorded thread begins a backward pass."""
        if self.reads_gradients:
            with self.gradients:
                self.reads_gradients = False
                # C ends no step, and leaves a gradient alone that it has not looked at yet.
                self._recorder.settled = self._recorder.unseen = 0

    def find_running_backwards(self, engine: CodeType | None) -> None:
        """Find backward passes that other threads began before the hooks were attached, and note
        them.

        engine: code object of torch's function, or None if the function is not written in Python.
        """
        own = threading.get_ident()
        for ident, frame in sys._current_frames().items():
            if (
                ident != own
                and engine is not None
                and any(each.f_code is engine for each, _ in traceback.walk_stack(frame))
            ):
                self.stop_reading_gradients()

    @guard("finding the thread that trains")
    def _take_over(self, work: Work) -> bool:
        more = work > self._most
        if more or self._is_recorded_thread_idle():
            ended = self._ident not in sys._current_frames()
            if self._recorder.take_over(ended):
                self._ident, self._most = threading.get_ident(), max(int(work), self._most)
                self._elsewhere.works = False
                self._note(_MOVED if more else _REPLACED)
                return True
        self._elsewhere.works = True
        self._note(_NOT_RECORDED)
        return False

    def _is_recorded_thread_idle(self) -> bool:
        """Return True if the recorded thread has ended or is idle in a thread pool.

        The result False is reused for 10 ms.
        """
        now_s = time.monotonic()
        if now_s - self._busy_s < _BUSY_INTERVAL_S:
            return False
        frame = sys._current_frames().get(self._ident)
        for each, _ in traceback.walk_stack(frame) if frame is not None else ():
            if str(each.f_globals.get("__name__")).partition(".")[0] not in _POOLS:
                self._busy_s = now_s
                return False
        return True


def is_autograd_thread() -> bool:
    """Return True if the calling thread is an autograd thread, or False without /proc."""
    known: bool | None = getattr(_known, "is_autograds", None)
    if known is None:
        known = read_kernel_text("/proc/thread-self/comm").startswith(_AUTOGRAD_NAMES_BEGIN_WITH)
        _known.is_autograds = known
    return known
