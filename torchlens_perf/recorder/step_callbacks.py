"""Run callbacks of hooks at the end of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from torchlens_perf.errors import guard

if TYPE_CHECKING:
    from torchlens_perf.recorder.recorder import Recorder

_GUARD = guard("work at a step's end")
_THROTTLE_NS = 50_000_000
# The pause grows to this multiple in the first ten seconds. A round takes about 0.1 ms, which would
# be a third of the cost of a watch on steps of a few milliseconds.
_LONGEST, _GROWTH = 10.0, 1.05


class StepCallbacks:
    """Callbacks that run on the training thread before the step's record is written.

    A callback that fails is switched off.
    """

    def __init__(self, note: Callable[[str], None], recorder: Recorder) -> None:
        self._note = note
        self._recorder = recorder
        self._each_step: dict[Callable[[], object], str] = {}
        self._compiled: dict[Callable[[], object], str] = {}
        self._throttled: dict[Callable[[], object], str] = {}
        self._pauses = 1.0

    def add(self, name: str, work: Callable[[], object]) -> None:
        """Run `work` at the end of each step until it fails or is removed."""
        self._each_step[work] = name
        self._recorder.busy = len(self._each_step)

    def remove(self, work: Callable[[], object]) -> None:
        for works in (self._each_step, self._compiled, self._throttled):
            works.pop(work, None)
        self._recorder.busy = len(self._each_step)

    def running_each_step(
        self, name: str, work: Callable[[], object]
    ) -> AbstractContextManager[None]:
        """Run `work` at the end of each step while the context is active."""
        return self._running(self._each_step, name, work)

    def running_if_compiled(
        self, name: str, work: Callable[[], object]
    ) -> AbstractContextManager[None]:
        """Run `work` at the end of a step in which Dynamo was imported or compiled a frame.

        `work` may also run at the end of other steps.
        """
        return self._running(self._compiled, name, work)

    def run_throttled(self, name: str, work: Callable[[], object]) -> AbstractContextManager[None]:
        """Run `work` at the ends of steps while the context is active, at most every 50 ms and later every 0.5 s.

        Use this method for slow callbacks.
        """
        return self._running(self._throttled, name, work)

    @contextmanager
    def _running(
        self, works: dict[Callable[[], object], str], name: str, work: Callable[[], object]
    ) -> Iterator[None]:
        works[work] = name
        self._recorder.busy = len(self._each_step)
        try:
            yield
        finally:
            self.remove(work)

    def run_due(self, now_ns: int) -> None:
        if self._each_step:
            self._run_callbacks(self._each_step)
        self._run_callbacks(self._compiled)
        if now_ns >= self._recorder.due_ns:
            self._recorder.due_ns = now_ns + int(self._pauses * _THROTTLE_NS)
            self._pauses = min(_LONGEST, self._pauses * _GROWTH)
            self._run_callbacks(self._throttled)

    def _run_callbacks(self, works: dict[Callable[[], object], str]) -> None:
        for failed in _GUARD.run(tuple(works)):
            name = works.pop(failed, "work at a step's end")
            self._recorder.busy = len(self._each_step)
            self._note(f"{name} failed and was switched off: see the job's log")
