"""Implement the native extension in Python: the same names, and the same bytes in the ring file.

This module is used if the package was installed without a C compiler. native/recorder.h, section.c
and module_call.c explain the design. tests/recorder/test_recorder.py runs every test with both
implementations.

There are two differences. In the ring file, the stack of open spans contains only phases, because
writing every span would double the cost of a section. In addition, interleaved sections of one name
in asyncio tasks are not distinguished.
"""

from __future__ import annotations

import functools
import itertools
import os
import struct
import threading
import time
from collections.abc import Callable
from types import EllipsisType, TracebackType
from typing import Any

from torchlens_perf.errors import guard
from torchlens_perf.interruption import ours, suppress
from torchlens_perf.recorder.autograd_threads import is_autograd_thread
from torchlens_perf.recorder.budget import EVERY_STEP
from torchlens_perf.recorder.clocks import LONGEST_MARK_NS
from torchlens_perf.run.kept_file import KeptFile
from torchlens_perf.run.ring import (
    DEPTH,
    FRAMES,
    GROUP_WORDS,
    GROUPS,
    HEAD,
    MAX_FRAMES,
    MAX_GROUPS,
    MAX_RECENT,
    RECENT,
    RECORD_BYTES,
    RECORDS_OFFSET,
    STEP,
    TOO_DEEP,
    TOOL_NS,
    UNBALANCED,
    Flag,
    Kind,
)

_STEP, _FORWARD, _BACKWARD, _RECOMPUTE = (
    int(Kind.STEP),
    int(Kind.FORWARD),
    int(Kind.BACKWARD),
    int(Kind.RECOMPUTE),
)
_MODULE, _SECTION, _WAIT = int(Kind.MODULE), int(Kind.SECTION), int(Kind.WAIT)
_THREAD_TIME = int(Kind.THREAD_TIME)
_MAX_READS, _MIN_STEP_NS = 64, 10_000_000
_COLLECTIVE, _COMPLETED = int(Kind.COLLECTIVE), int(Flag.COMPLETED)
_END_BY_WAIT, _END_BY_RETURN = 1, 3  # recorder.End
_FIRST_PHASE, _LAST_PHASE = int(Kind.DATA), int(Kind.CLOSURE)
_ALWAYS_ON_DEVICE = (_FORWARD, _BACKWARD, int(Kind.OPTIMIZER), _RECOMPUTE)
_EXCEPTION, _OTHER_THREAD = int(Flag.EXCEPTION), int(Flag.OTHER_THREAD)
_WITHOUT_MODULES, _CAPTURED = int(Flag.WITHOUT_MODULES), int(Flag.CAPTURED)
_CALLS_BETWEEN = 61
_MAX_SECTIONS = 4096
_WORD = (1 << 64) - 1

# Record: stamp, kind, depth, flags, name_id, step, start, duration, nested, phase, value0, value1
_pack_record = struct.Struct("<IBBHIIqqqqQQ").pack_into
_pack_frame = struct.Struct("<qqqII").pack_into
_get_ident = threading.get_ident

_active: Recorder | None = None
_collecting: Recorder | None = None
_wait_name_id = 0
_generations = itertools.count(1)

Frame = list[int]  # An open span: start, nested time, time of phases, name id, kind.
_START, _NESTED, _PHASE, _NAME, _KIND = range(5)


class Recorder:
    """Writes marks into a ring file's buffer."""

    def __init__(
        self, buffer: Any, intern: Callable[[str], int], clock: Callable[[], int] | None = None
    ) -> None:
        self.intern = intern
        self.now_ns = clock if clock is not None else time.monotonic_ns
        self.sampled = 0
        # Number of open BACKWARD spans of the owner thread.
        self.backwards = 0
        # Number of open BACKWARD spans of the user's other threads.
        self._backwards_elsewhere = 0
        self.closed = False
        self.generation = next(_generations)
        self._buffer = buffer
        self._words: Any = memoryview(buffer).cast("B").cast("q")
        capacity = self._words[2]
        if (
            self._words[1] >> 32 != RECORD_BYTES
            or self._words[7] != RECORDS_OFFSET
            or capacity & (capacity - 1)
            or RECORDS_OFFSET + capacity * RECORD_BYTES > len(self._words) * 8
        ):
            raise ValueError("the buffer does not hold a ring file of this layout")
        self._mask = capacity - 1
        self.step = int(self._words[STEP])
        self._recent = itertools.count()
        self._next_sequence = itertools.count().__next__
        self._owner = _get_ident()
        self._frames: list[Frame] = []
        self._threads = threading.local()
        # Collectives that end with the issuing thread's next wait, by the id of the issued list.
        self._waited_for: dict[int, list[int]] = {}
        self.waited_ns = 0
        self._thread_time: ThreadTime | None = None
        self._ordinals = [0, 0]
        self._nvtx_push: Callable[[Any], Any] | None = None
        self._nvtx_pop: Callable[[], Any] = lambda: None
        self._nvtx_attributes: list[Any] = []
        self._marks_elsewhere = False  # True if spans are also NVTX ranges.
        self.device_waits_ns = self.late_ns = self.phases_ns = self.phase_steps = 0
        self.phase_mask = EVERY_STEP
        # Counts of the step in progress, see StepMarks in native/recorder.h.
        self.settled = self.busy = self.without_gradient = self.due_ns = self.due_step = 0
        self.forward_passes = self.backward_passes = self.step_flags = self.memory_bytes = 0
        self.workload = -1  # Elements of the step's batches, or -1 without a tensor in a batch.
        self.training_steps = self.optimizer_steps = self.returned_steps = self.quiet_steps = 0
        # See ModuleBudget in native/recorder.h.
        self.module_mask = EVERY_STEP
        self.module_calls = self.module_steps = self.measured_calls = self.measured_ns = 0
        self._leaves_out = self._has_left_out = False
        self._until_measured = 0
        self._open_span(self._frames, _STEP, 0)

    # Only the native recorder ends steps itself, so `settled` stays 0 here.

    def use_torch(self, *objects: Any) -> None: ...

    def settle(self, *state: Any) -> None: ...

    def show_open_step(self) -> None: ...

    def leave_gradients(self) -> None: ...

    def compare_gradient(self, ended: bool) -> None: ...

    def unsettle(self) -> tuple[tuple[int, int, int], int]:
        return (0, 0, 0), 0

    def begin(self, kind: int, name_id: int) -> None:
        if not self.closed:
            self._open_span(self._open_spans(), kind, name_id)

    def end(
        self, kind: int, name_id: int, flags: int = 0, value0: int = 0, value1: int = 0
    ) -> None:
        end_ns = self.now_ns()
        if self.closed:
            return
        frames = self._open_spans()
        for depth in range(len(frames) - 1, -1, -1):
            if frames[depth][_NAME] == name_id and frames[depth][_KIND] == kind:
                self._close_span(frames, depth, end_ns, flags, value0, value1)
                return

    def drop(self, kind: int, name_id: int) -> None:
        if self.closed:
            return
        frames = self._open_spans()
        for depth in range(len(frames) - 1, 0, -1):
            if frames[depth][_NAME] == name_id and frames[depth][_KIND] == kind:
                self._words[UNBALANCED] += len(frames) - depth
                self._discard_spans(frames, depth)
                return

    def record_span(
        self,
        kind: int,
        name_id: int,
        start_ns: int,
        duration_ns: int,
        flags: int = 0,
        value0: int = 0,
        value1: int = 0,
    ) -> None:
        if self.closed:
            return
        frames = self._open_spans()
        if _FIRST_PHASE <= kind <= _LAST_PHASE:
            frames[-1][_NESTED] += duration_ns
            frames[-1][_PHASE] += duration_ns
        if frames is not self._frames:
            flags |= _OTHER_THREAD
        self._write_record(
            [start_ns, 0, 0, name_id, kind], len(frames), duration_ns, flags, value0, value1
        )

    def record_completed(
        self,
        kind: int,
        name_id: int,
        step: int,
        start_ns: int,
        duration_ns: int,
        flags: int = 0,
        value0: int = 0,
        value1: int = 0,
        nested_ns: int = 0,
        phase_ns: int = 0,
    ) -> None:
        if not self.closed:
            frame = [start_ns, nested_ns, phase_ns, name_id, kind]
            self._write_record(frame, 1, duration_ns, flags, value0 & _WORD, value1 & _WORD, step)

    def end_device_step(self) -> None:
        """Do nothing: only the native recorder times a device."""

    def start_thread_time(self) -> bool:
        if self.closed or _get_ident() != self._owner:
            return False
        try:
            self._thread_time = ThreadTime(threading.get_native_id())
        except ours(OSError):
            return False
        if not self._thread_time.available:
            self._stop_thread_time()
        return self._thread_time is not None

    def computes_backward(self) -> None:
        """Also measure the calling thread, which computes the owner's backward pass."""
        if not self.closed and self._thread_time is not None:
            self._thread_time.computes_backward(threading.get_native_id())

    def take_over(self, owner_ended: bool) -> bool:
        if self.closed:
            return False
        here, there = self._frames, self._open_spans()
        if here is there:
            return True
        if (len(here) > 1 and not owner_ended) or any(
            frame[_KIND] != _SECTION for frame in there[1:]
        ):
            return False
        if len(here) > 1:
            self._words[UNBALANCED] += len(here) - 1
            self._discard_spans(here, 1)
            if self.closed:
                return False
        here += there[1:]
        del there[1:]
        self._owner = _get_ident()
        if self._thread_time is not None:
            self._stop_thread_time()
            self.start_thread_time()
        return True

    def own_work_paused(self) -> None:
        times = self._thread_time
        if times is not None and times.measured and _get_ident() == self._owner:
            times.charge_to_phase(self._current_phase(self._frames))
            times.paused = True

    def own_work_resumed(self) -> None:
        times = self._thread_time
        if times is not None and times.measured and times.paused and _get_ident() == self._owner:
            times.charge_to_phase(_WAIT)
            times.paused = False

    def _current_phase(self, frames: list[Frame]) -> int:
        return next(
            (frame[_KIND] for frame in reversed(frames[1:]) if frame[_KIND] < _MODULE), _STEP
        )

    def start_collectives(self, wait_name_id: int) -> None:
        global _collecting, _wait_name_id
        if not self.closed:
            _collecting, _wait_name_id = self, wait_name_id

    def issue(
        self, name_id: int, group: int, sequence: int, flags: int, size: int
    ) -> list[int] | None:
        if self is not _collecting or self.closed:
            return None
        self._end_awaited_collective(0)
        frames = self._open_spans()
        if frames is not self._frames:
            flags |= _OTHER_THREAD
        if self._ordinals[0] != self.step:
            self._ordinals = [self.step, 0]
        self._ordinals[1] += 1
        start_ns = self.now_ns()
        if group < MAX_GROUPS:
            self._words[GROUPS + GROUP_WORDS * group + 1] = sequence + 1
            at = RECENT + 2 * (next(self._recent) % MAX_RECENT)
            self._words[at + 1] = size
            self._words[at] = sequence | (name_id & 0xFFFFFF) << 32 | group + 1 << 56
        within = frames[-1][_NAME]
        return [
            name_id, group, sequence, flags, size, start_ns, 0, self.step, len(frames), within, self._ordinals[1] - 1,
        ]  # fmt: skip

    def returned(self, issued: list[int], end: int, flags: int = 0) -> None:
        if self is not _collecting or self.closed:
            return
        issued[3] |= flags
        issued[6] = call_ns = self.now_ns() - issued[5]
        if end == _END_BY_WAIT:
            self._threads.waited_for = self._waited_for[id(issued)] = issued
        elif end == _END_BY_RETURN:
            self._write_collective(issued, call_ns, _COMPLETED)
            self.record_span(_WAIT, issued[0], issued[5], call_ns)
            if _get_ident() == self._owner:
                self.waited_ns += call_ns
        else:
            self._write_collective(issued, call_ns, 0)

    def begin_wait(self) -> bool:
        if self is not _collecting or self.closed:
            return False
        frames = self._open_spans()
        if _is_waiting(frames):
            return False
        self._open_span(frames, _WAIT, _wait_name_id)
        return True

    def end_wait(self, raised: bool = False) -> None:
        if self is not _collecting or self.closed:
            return
        frames = self._open_spans()
        if frames is self._frames and _is_waiting(frames):
            self.waited_ns += self.now_ns() - frames[-1][_START]
        self.end(_WAIT, _wait_name_id, _EXCEPTION if raised else 0)
        self._end_awaited_collective(_EXCEPTION if raised else _COMPLETED)

    def _end_awaited_collective(self, flags: int) -> None:
        issued = self._waited_for.pop(id(getattr(self._threads, "waited_for", None)), None)
        if issued is not None:
            self._threads.waited_for = None
            self._write_collective(
                issued, self.now_ns() - issued[5] if flags & _COMPLETED else issued[6], flags
            )

    def _write_collective(self, issued: list[int], duration_ns: int, more_flags: int) -> None:
        name_id, group, sequence, flags, size, start_ns, call_ns, step, depth, within, ordinal = (
            issued
        )
        at = self._next_sequence()
        _pack_record(
            self._buffer, RECORDS_OFFSET + ((at & self._mask) << 6), (at + 1) & 0xFFFFFFFF, _COLLECTIVE, depth & 0xFF,
            flags | more_flags, name_id, step, start_ns, duration_ns, call_ns, ordinal, size, sequence | within << 32,
        )  # fmt: skip
        self._words[HEAD] = at + 1
        if group < MAX_GROUPS:
            word = GROUPS + GROUP_WORDS * group + 2
            self._words[word] = max(self._words[word], sequence + 1)

    def next_step(self, flags: int = 0, value0: int = 0, value1: int = 0) -> int:
        if self.closed:
            return 0
        end_ns = self.now_ns()
        frame = self._frames[0]
        if self._thread_time is not None:
            if self._thread_time.measured:
                self._thread_time.charge_to_phase(self._current_phase(self._frames))
            for kind, (cpu_ns, ready_ns) in sorted(
                self._thread_time.end_step(end_ns - frame[_START]).items()
            ):
                if cpu_ns > 0 or ready_ns > 0:
                    record = [frame[_START], 0, 0, 0, _THREAD_TIME]
                    self._write_record(record, 1, end_ns - frame[_START], kind, cpu_ns, ready_ns)
        self.module_steps += not self._has_left_out
        flags |= _WITHOUT_MODULES if self._has_left_out else 0
        self._write_record(frame, 0, end_ns - frame[_START], flags, value0, value1)
        frame[:3] = end_ns, 0, 0
        self.step += 1
        self._has_left_out = False
        self._leaves_out = self.module_mask != EVERY_STEP and not _has_modules(
            self.step, self.module_mask
        )
        self._words[STEP] = self.step
        self._publish_open_span(0, frame)
        return self.step

    def add_overhead(self, tool_ns: int) -> None:
        if not self.closed:
            frame = self._open_spans()[-1]
            frame[_NESTED] += tool_ns
            frame[_PHASE] += tool_ns
            self._words[TOOL_NS] += tool_ns

    def _leaves_call_out(self) -> bool:
        """Return True if a call is not timed in this step: one inside of a forward pass."""
        if (
            not self._leaves_out
            or self.sampled
            or self._nvtx_push is not None
            or self.step_flags & _CAPTURED
            or _kind_of_module_call(self, self._open_spans()) != _MODULE
        ):
            return False
        self._has_left_out = True
        return True

    def _measure_call(self) -> int:
        """Return when a call began whose cost is to be measured, or 0."""
        self._until_measured -= 1
        if self._until_measured >= 0:
            return 0
        self._until_measured = _CALLS_BETWEEN
        return self.now_ns()

    def _add_measured_call(self, cost_ns: int) -> None:
        if 0 <= cost_ns < LONGEST_MARK_NS:
            self.measured_calls += 1
            self.measured_ns += cost_ns

    def activate(self) -> None:
        global _active
        _active = None if self.closed else self

    def deactivate(self) -> None:
        global _active
        if _active is self:
            _active = None

    def close(self) -> None:
        if self.closed:
            return
        self.deactivate()
        if _get_ident() == self._owner:
            self._discard_spans(self._frames, 1)
        while self._waited_for:
            _, issued = self._waited_for.popitem()
            self._write_collective(issued, issued[6], 0)
        self._stop_thread_time()
        self.closed = True
        self._words.release()

    def abandon(self) -> None:
        if not self.closed:
            self.deactivate()
            self._stop_thread_time()
            self.closed = True
            self._words.release()

    def _stop_thread_time(self) -> None:
        if self._thread_time is not None:
            self._thread_time.close()
            self._thread_time = None

    def set_nvtx(
        self, push: Callable[[Any], Any], pop: Callable[[], Any], attributes: list[Any]
    ) -> None:
        if not attributes:
            raise ValueError("the attributes of name 0 are missing")
        self._nvtx_push, self._nvtx_pop, self._nvtx_attributes = push, pop, attributes
        self._marks_elsewhere = True

    @property
    def written(self) -> int:
        return 0 if self.closed else int(self._words[HEAD])

    @property
    def tool_ns(self) -> int:
        return 0 if self.closed else int(self._words[TOOL_NS])

    def _open_spans(self) -> list[Frame]:
        if _get_ident() == self._owner:
            return self._frames
        frames: list[Frame] | None = getattr(self._threads, "frames", None)
        if frames is None:
            frames = self._threads.frames = [[0, 0, 0, 0, 0]]
        return frames

    def _open_span(self, frames: list[Frame], kind: int, name_id: int) -> int:
        if self._nvtx_push is not None and len(frames) < MAX_FRAMES:
            known = name_id < len(self._nvtx_attributes)
            self._nvtx_push(self._nvtx_attributes[name_id if known else 0])
        depth = len(frames)
        if self.closed:  # The called function, or another thread, may have closed the recorder.
            return depth
        if (
            kind < _MODULE
            and frames is self._frames
            and self._thread_time is not None
            and self._thread_time.measured
        ):
            self._thread_time.charge_to_phase(self._current_phase(frames))
        frame = [0, 0, 0, name_id, kind]
        frames.append(frame)
        if kind == _BACKWARD:
            self._count_backward(frames, 1)
        frame[_START] = self.now_ns()
        if kind < _MODULE and frames is self._frames:
            self._publish_open_span(depth, frame)
        return depth

    def _publish_open_span(self, depth: int, frame: Frame) -> None:
        """Write an open span to the stack in the ring file, which readers see."""
        shown = self._words[DEPTH]
        if shown < MAX_FRAMES:
            position = 0 if depth == 0 else shown
            _pack_frame(self._buffer, (FRAMES + 4 * position) * 8, *frame)
            self._words[DEPTH] = position + 1

    def _discard_spans(self, frames: list[Frame], depth: int) -> None:
        while len(frames) > depth:
            kind = frames.pop()[_KIND]
            if kind < _MODULE:
                if kind == _BACKWARD:
                    self._count_backward(frames, -1)
                if frames is self._frames:
                    self._words[DEPTH] -= 1
            if self._nvtx_push is not None and len(frames) < MAX_FRAMES:
                self._nvtx_pop()
                if self.closed:
                    return

    def _close_span(
        self,
        frames: list[Frame],
        depth: int,
        end_ns: int,
        flags: int,
        value0: int = 0,
        value1: int = 0,
    ) -> None:
        if len(frames) <= depth:
            return
        if len(frames) > depth + 1:
            self._words[UNBALANCED] += len(frames) - depth - 1
        frame = frames[depth]
        kind = frame[_KIND]
        if (
            kind < _MODULE
            and frames is self._frames
            and self._thread_time is not None
            and self._thread_time.measured
        ):
            self._thread_time.charge_to_phase(kind)
        if kind < _MODULE or self._nvtx_push is not None or len(frames) > depth + 1:
            self._discard_spans(frames, depth)
        else:
            frames.pop()
        if self.closed:
            return
        if depth >= MAX_FRAMES:
            self._words[TOO_DEEP] += 1
            return
        duration_ns = end_ns - frame[_START]
        if frames is not self._frames:
            flags |= self._charge_to_backward(frame, end_ns)
        if frames:
            parent = frames[-1]
            parent[_NESTED] += duration_ns
            parent[_PHASE] += duration_ns if _FIRST_PHASE <= kind <= _LAST_PHASE else frame[_PHASE]
        self._write_record(frame, depth, duration_ns, flags, value0, value1)

    def _count_backward(self, frames: list[Frame], change: int) -> None:
        if frames is self._frames:
            self.backwards += change
        elif not is_autograd_thread():
            self._backwards_elsewhere += change

    def _charge_to_backward(self, frame: Frame, end_ns: int) -> int:
        if (
            self.backwards == 0
            or frame[_KIND] not in (_RECOMPUTE, _WAIT)
            or not is_autograd_thread()
        ):
            return _OTHER_THREAD
        if self._backwards_elsewhere > 0:
            return _OTHER_THREAD  # Autograd may be computing another thread's backward pass.
        phase = next(
            (each for each in reversed(self._frames[1:]) if each[_KIND] < _MODULE), self._frames[0]
        )
        if phase[_KIND] != _BACKWARD or frame[_START] < phase[_START]:
            return _OTHER_THREAD
        own_ns = end_ns - frame[_START] - frame[_PHASE]
        counted_ns = min(own_ns, max(0, end_ns - phase[_START] - phase[_PHASE]))
        phase[_NESTED] += counted_ns
        phase[_PHASE] += counted_ns
        frame[_PHASE] += own_ns - counted_ns
        return 0

    def _write_record(
        self,
        frame: Frame,
        depth: int,
        duration_ns: int,
        flags: int,
        value0: int,
        value1: int,
        step: int | None = None,
    ) -> None:
        sequence = self._next_sequence()
        start_ns, nested_ns, phase_ns, name_id, kind = frame
        _pack_record(
            self._buffer, RECORDS_OFFSET + ((sequence & self._mask) << 6), (sequence + 1) & 0xFFFFFFFF, kind,
            depth & 0xFF, flags, name_id, self.step if step is None else step, start_ns, duration_ns, nested_ns,
            phase_ns, value0, value1,
        )  # fmt: skip
        self._words[HEAD] = sequence + 1


class ThreadTime:
    """Measures CPU time and run-queue wait of the training thread per phase (see
    native/thread_time.c)."""

    def __init__(self, thread: int) -> None:
        """thread: the thread's native id. Raises OSError if the kernel reports no times."""
        self._thread, self._file = thread, _open_schedstat(thread)
        # Autograd's thread, and the file with its times.
        self._autograd: tuple[int, KeptFile] | None = None
        self._autograd_ready_ns = 0
        self.measured = self.paused = False
        self._reads = 0
        self._last = _read_schedstat(self._file) or (0, 0)
        self._phases: dict[int, list[int]] = {}

    def close(self) -> None:
        self._stop_measuring_autograd()
        self._file.close()

    @property
    def available(self) -> bool:
        """Return True if the kernel reports the times.

        Without scheduling statistics all times are zero.
        """
        return self._last[0] > 0

    def computes_backward(self, thread: int) -> None:
        """Also measure this thread's run-queue wait from now on."""
        if thread == self._thread or (self._autograd is not None and self._autograd[0] == thread):
            return
        self._stop_measuring_autograd()
        with suppress(OSError):
            self._autograd = thread, _open_schedstat(thread)
            self._read_autograd_wait_ns()

    def _stop_measuring_autograd(self) -> None:
        autograd, self._autograd = self._autograd, None
        if autograd is not None:
            autograd[1].close()

    def _read_autograd_wait_ns(self) -> int:
        """Return the run-queue wait of autograd's thread since the last call in ns, or 0."""
        if self._autograd is None:
            return 0
        now, last_ns = _read_schedstat(self._autograd[1]), self._autograd_ready_ns
        if now is None:  # The thread has ended.
            self._stop_measuring_autograd()
            return 0
        self._autograd_ready_ns = now[1]
        return now[1] - last_ns

    def charge_to_phase(self, kind: int) -> None:
        self._reads += 1
        now, last = (
            _read_schedstat(self._file) if self._reads <= _MAX_READS else None,
            self._last,
        )
        if now is None:
            self.measured = False
            return
        phase = self._phases.setdefault(_WAIT if self.paused else kind, [0, 0])
        phase[0] += now[0] - last[0]
        phase[1] += now[1] - last[1]
        if kind == _BACKWARD and not self.paused:
            phase[1] += self._read_autograd_wait_ns()
        self._last = now

    def end_step(self, duration_ns: int) -> dict[int, list[int]]:
        phases = self._phases if self.measured else {}
        wanted = duration_ns >= _MIN_STEP_NS
        if wanted and not self.measured:
            if self._file.stat() is None:
                self._file = _open_schedstat(self._thread)
            now = _read_schedstat(self._file)
            wanted, self._last = now is not None, now or self._last
            self._read_autograd_wait_ns()
        self.measured, self.paused, self._reads, self._phases = wanted, False, 0, {}
        return phases


def _open_schedstat(thread: int) -> KeptFile:
    path = f"/proc/self/task/{thread}/schedstat"
    return KeptFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def _read_schedstat(file: KeptFile) -> tuple[int, int] | None:
    """Return (CPU time, run-queue wait) in ns, or None if the thread or the file is gone."""
    try:
        cpu_ns, ready_ns, *_ = file.read(96).split()
    except ours(OSError, ValueError):
        return None
    return int(cpu_ns), int(ready_ns)


class Section:
    """A named part of the step: a context manager, nestable and re-entrant, and a decorator."""

    __slots__ = ("_generation", "_name_id", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._generation = 0
        self._name_id = 0

    def __enter__(self) -> Section:
        recorder = _active
        if recorder is not None:
            if self._generation != recorder.generation:
                _intern_section_name(self, recorder)
            if recorder.closed:
                return self
            if recorder._marks_elsewhere:
                recorder._open_span(recorder._open_spans(), _SECTION, self._name_id)
            else:
                frames = (
                    recorder._frames if _get_ident() == recorder._owner else recorder._open_spans()
                )
                frames.append([recorder.now_ns(), 0, 0, self._name_id, _SECTION])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        recorder = _active
        if recorder is None or self._generation != recorder.generation:
            return
        end_ns = recorder.now_ns()
        flags = 0 if kind is None else _EXCEPTION
        frames = recorder._frames if _get_ident() == recorder._owner else recorder._open_spans()
        frame = frames[-1]
        if frame[_NAME] != self._name_id or frame[_KIND] != _SECTION or len(frames) > MAX_FRAMES:
            recorder.end(_SECTION, self._name_id, flags)
        elif recorder._marks_elsewhere or frames is not recorder._frames:
            recorder._close_span(frames, len(frames) - 1, end_ns, flags)
        else:
            # _close_span() and _write_record() are inlined, because a call costs 60 ns.
            frames.pop()
            start_ns, nested_ns, phase_ns, name_id, _ = frame
            duration_ns = end_ns - start_ns
            parent = frames[-1]
            parent[_NESTED] += duration_ns
            if phase_ns:
                parent[_PHASE] += phase_ns
            sequence = recorder._next_sequence()
            _pack_record(
                recorder._buffer, RECORDS_OFFSET + ((sequence & recorder._mask) << 6), (sequence + 1) & 0xFFFFFFFF,
                _SECTION, len(frames), flags, name_id, recorder.step, start_ns, duration_ns, nested_ns, phase_ns, 0, 0,
            )  # fmt: skip
            recorder._words[HEAD] = sequence + 1

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _decorator(self, function)

    def __repr__(self) -> str:
        return f"section({self.name!r})"


def _intern_section_name(section: Section, recorder: Recorder) -> None:
    """Set the section's name id, or 0 on failure. Another thread may end the watch."""
    name_id = 0
    with guard("naming a section"):
        name_id = recorder.intern(section.name)
    section._name_id, section._generation = name_id, recorder.generation


class ModuleCall:
    """Timed call of one nn.Module.

    `function` receives the module as its first argument, as nn.Module.__call__ does.
    """

    __slots__ = ("_after", "_before", "_forward", "_function", "_name_id", "_recorder")

    def __init__(
        self,
        recorder: Recorder,
        name_id: int,
        function: Callable[..., Any],
        before: Callable[..., None] | None = None,
        after: Callable[[Any], None] | None = None,
        forward: Callable[[Any], object] | None = None,
    ) -> None:
        self._recorder = recorder
        self._name_id = name_id
        self._function = function
        self._before = before
        self._after = after
        self._forward = forward

    def _run_observer(self, observer: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        recorder = self._recorder
        start_ns = recorder.now_ns()
        observer(*args, **kwargs)  # hooks/module.py guards against exceptions.
        recorder.add_overhead(recorder.now_ns() - start_ns)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        if recorder.closed or recorder._leaves_call_out():
            return self._function(*args, **kwargs)
        entered_ns = recorder._measure_call()
        observed = recorder.sampled
        if observed and self._before is not None:
            self._run_observer(self._before, *args[1:], **kwargs)
            if recorder.closed:  # Another thread ended the watch while the observer ran.
                return self._function(*args, **kwargs)
        frames = recorder._open_spans()
        kind = _kind_of_module_call(recorder, frames)
        depth = recorder._open_span(frames, kind, self._name_id)
        opened_ns = frames[-1][_START] if entered_ns and not observed else 0
        recorder.module_calls += kind == _MODULE
        try:
            result = self._function(*args, **kwargs)
        except BaseException:
            end_ns = recorder.now_ns()
            if not recorder.closed:
                recorder._close_span(frames, depth, end_ns, _EXCEPTION)
            raise
        end_ns = recorder.now_ns()
        if recorder.closed:
            return result
        recorder._close_span(frames, depth, end_ns, 0)
        if opened_ns:
            recorder._add_measured_call(opened_ns - entered_ns + recorder.now_ns() - end_ns)
        if observed and self._after is not None:
            self._run_observer(self._after, result)
        if kind == _FORWARD and self._forward is not None:
            self._run_observer(self._forward, result)
        return result


def _kind_of_module_call(recorder: Recorder, frames: list[Frame]) -> int:
    for frame in reversed(frames):
        if frame[_KIND] == _FORWARD or frame[_KIND] == _RECOMPUTE:
            return _MODULE
        if frame[_KIND] == _BACKWARD:
            return _RECOMPUTE
    inside_backward = recorder.backwards > 0 and (
        frames is recorder._frames or is_autograd_thread()
    )
    return _RECOMPUTE if inside_backward else _FORWARD


def _has_modules(step: int, mask: int) -> bool:
    """Return True if modules are timed in a step, see has_modules() in native/recorder.c."""
    mixed = step & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    mixed ^= mixed >> 16
    return mixed % 64 != 63 if mask == 0 else mixed & mask == 0


def _is_waiting(frames: list[Frame]) -> bool:
    return frames[-1][_KIND] == _WAIT and frames[-1][_NAME] == _wait_name_id


def timed_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method for the class `Work` that times `wait`."""

    @functools.wraps(wait)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _collecting
        if recorder is None or not recorder.begin_wait():
            return wait(self, *args, **kwargs)
        raised = True
        try:
            result = wait(self, *args, **kwargs)
            raised = False
            return result
        finally:
            recorder.end_wait(raised)

    return timed


_sections: dict[str, Section] = {}
_overflow = Section("(other sections)")


# Set by recorder.py during its import.
_decorator: Callable[[Section, Callable[..., Any]], Callable[..., Any]]


def section(name: str) -> Section:
    """Return the section of that name: a context manager and a decorator."""
    if not isinstance(name, str):
        raise TypeError(f"section() takes a name, got {type(name).__name__}")
    try:
        return _sections[name]
    except ours(KeyError):
        if len(_sections) >= _MAX_SECTIONS:
            return _overflow
        return _sections.setdefault(name, Section(name))


def set_section_decorator(
    decorator: Callable[[Section, Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Set the function that makes the result of `section(name)(function)`."""
    global _decorator
    _decorator = decorator


def set_module_call(address: int, call: ModuleCall | EllipsisType | None) -> None:
    """Do nothing.

    Only the native recorder has a table of modules. hooks/module.py has a table otherwise.
    """


def observe_calls(observer: Callable[[Any], object] | None) -> None:
    """Do nothing. hooks/module.py calls its observer itself without the native recorder."""


def route_calls(function: Callable[..., Any]) -> bool:
    """Return False: only native code can replace the code that a call of `function` runs."""
    return False


def unroute_calls(function: Callable[..., Any]) -> None:
    """Do nothing, because route_calls() routes nothing."""


def native_hook(event: str, hook: Callable[..., Any], *parts: Any) -> Callable[..., Any]:
    """Return the hook: only native code can stand in for it."""
    return hook
