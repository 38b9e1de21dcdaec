"""Track the current step: its content, the overhead charged to it, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from torchlens_perf.errors import guard
from torchlens_perf.recorder.sampling import SamplingSchedule, StepBoundary
from torchlens_perf.run.ring import MICRO_STEPS_MASK, WORKLOAD_SHIFT, Flag

if TYPE_CHECKING:
    from torchlens_perf.recorder.attached_hooks import AttachedHooks
    from torchlens_perf.recorder.rank_metadata import RankMetadata
    from torchlens_perf.recorder.recorder import Recorder
    from torchlens_perf.recorder.step_callbacks import StepCallbacks
    from torchlens_perf.recorder.training_thread import TrainingThread

_COMPILED = int(Flag.COMPILED)
_SAMPLED, _MANUAL, _INFERENCE = (int(flag) for flag in (Flag.SAMPLED, Flag.MANUAL, Flag.INFERENCE))


class UserLoop(Protocol):
    """The user's training loop, as observed by hooks."""

    def on_manual_step(self) -> bool:
        """Note that the user has called w.step(). Return True if the call ends a step."""

    def finish_step(self, *, inference: bool) -> tuple[int, int]:
        """Return the flags and the number of micro-steps of the step that ends now."""


class StepObserver(Protocol):
    """Observes sampled steps on the training thread."""

    def begin_step(self, step: int) -> None:
        """Called at the start of the step."""

    def end_step(self, samples: int, *, are_tokens: bool) -> None:
        """Called before the step's record is written. See CurrentStep.add_batch()."""


# Shorter callbacks are not worth a call of the recorder of their own.
_LONG_CALLBACKS_NS = 1_000_000


class CurrentStep:
    """The current step of one watch.

    Used on the training thread, unless a method states otherwise.
    """

    def __init__(
        self,
        recorder: Recorder,
        thread: TrainingThread,
        hooks: AttachedHooks,
        callbacks: StepCallbacks,
        metadata: RankMetadata,
        sampling: SamplingSchedule,
    ) -> None:
        self._recorder = recorder
        self._thread = thread
        self._hooks = hooks
        self._callbacks = callbacks
        self._metadata = metadata
        self._sampling = sampling
        self._loop: UserLoop | None = None
        self._overhead_ns = self._late_ns = 0
        self._observer: StepObserver | None = None
        # Samples in the batches of a sampled step, and True if the workload is in tokens.
        self._samples, self._are_tokens = 0, False

    def begin(self, loop: UserLoop) -> None:
        """Start recording marks. loop: object that reports the content of each step."""
        self._loop = loop
        recorder = self._recorder
        recorder.start_thread_time()
        recorder.sampled = int(self._sampling.is_sampled(recorder.step))
        self._begin_sampled_step(recorder.step)
        self._sampling.start_recording(self._read_boundary())
        recorder.activate()

    def add_flag(self, flag: Flag) -> None:
        self._recorder.step_flags |= int(flag)

    def add_workload(self, elements: int) -> None:
        self._recorder.workload = max(0, self._recorder.workload) + elements

    def set_observer(self, observer: StepObserver | None) -> None:
        """Set the observer of sampled steps, or remove it."""
        self._observer = observer

    def set_memory(self, memory_bytes: int) -> None:
        """Set the memory of this and later steps in bytes. 0 means unknown."""
        self._recorder.memory_bytes = memory_bytes

    def add_batch(self, samples: int, *, are_tokens: bool) -> None:
        """Add a batch of a sampled step. are_tokens: True if its elements are tokens."""
        self._samples += samples
        self._are_tokens = are_tokens

    def add_overhead(self, duration_ns: int, *, ours: bool = True) -> None:
        """Charge to this step overhead that only some steps have. ours: True for overhead of this
        package."""
        self._overhead_ns += duration_ns
        if ours:
            self._recorder.add_overhead(duration_ns)

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Charge the time of this package's code to the step in which the code ends.

        What the code itself charges is not charged twice.
        """
        start_ns = self._uncharged_ns()
        try:
            yield
        finally:
            self._recorder.add_overhead(self._uncharged_ns() - start_ns)

    def _uncharged_ns(self) -> int:
        # A wait for room in the device's queue is no overhead.
        recorder = self._recorder
        return recorder.now_ns() - recorder.tool_ns - recorder.device_waits_ns

    @property
    def _charged_apart_ns(self) -> int:
        """Overhead that only some steps have, which the recorder has been charged with already."""
        return self._overhead_ns + self._recorder.late_ns

    @guard("step boundary")
    def end_by_user(self, tokens: int | None = None) -> None:
        if not self._thread.may_end_step() or (
            self._loop is not None and not self._loop.on_manual_step()
        ):
            return
        if tokens is not None:
            self._recorder.workload, self._are_tokens = tokens, True
        self.end(_MANUAL)

    def end(self, flags: int = 0) -> None:
        """End the step, and decide whether the next step is sampled. Callers catch exceptions."""
        if self._loop is not None and not self._recorder.closed:
            with self._hooks.lock:
                if not self._hooks.detached:
                    self._end_step(self._loop, flags)

    def _end_step(self, loop: UserLoop, flags: int) -> None:
        recorder = self._recorder
        start_ns, charged_ns = recorder.now_ns(), self._charged_apart_ns
        recorder.training_steps += not flags & _INFERENCE
        recorder.end_device_step()
        self._callbacks.run_due(start_ns)
        now_ns = recorder.now_ns()
        if now_ns - start_ns > _LONG_CALLBACKS_NS:
            # This time is in the step that ends. Below, the rest is added to the next step.
            recorder.add_overhead(now_ns - start_ns - self._charged_apart_ns + charged_ns)
            start_ns, charged_ns = now_ns, self._charged_apart_ns
        sampled = recorder.sampled
        if sampled:
            flags |= _SAMPLED
            if self._observer is not None:
                self._observer.end_step(self._samples, are_tokens=self._are_tokens)
            self._samples = 0
        found, passes = loop.finish_step(inference=bool(flags & _INFERENCE))
        tags = recorder.step_flags | found
        content = min(passes, MICRO_STEPS_MASK) | (recorder.workload + 1) << WORKLOAD_SHIFT
        step = recorder.next_step(flags | tags, recorder.memory_bytes, content)
        if tags & _COMPILED:
            # Publish early, because the process may be killed before the watch ends.
            self._metadata.publish()
        recorder.workload, recorder.step_flags = -1, 0
        recorder.sampled = int(self._sampling.is_sampled(step))
        recorder.add_overhead(recorder.now_ns() - start_ns - self._charged_apart_ns + charged_ns)
        if sampled:
            self._sampling.later_ns += recorder.late_ns - self._late_ns
            self._late_ns = recorder.late_ns
            self._sampling.end_sampled_step(self._read_boundary())
        recorder.due_step = self._sampling.next_sampled_step(step)
        if recorder.sampled:
            self._sampling.begun = self._read_boundary()
            self._begin_sampled_step(step)

    def _begin_sampled_step(self, step: int) -> None:
        if self._recorder.sampled and self._observer is not None:
            self._observer.begin_step(step)

    def _read_boundary(self) -> StepBoundary:
        """Return the current step, time, and time in hooks.

        Overhead that only some steps have is excluded.
        """
        tool_ns = self._recorder.tool_ns - self._charged_apart_ns
        return StepBoundary(self._recorder.step, self._recorder.now_ns(), tool_ns)
