"""A deep look at a few steps, when the sidecar asks for one: a trace, the flight recorder, the device's memory.

Until then the process looks once in 50 ms at most whether one file is there. Asked, it begins and ends at a step's end:
no thread, no signal. The steps are flagged, so that nobody is judged by them.
"""

from __future__ import annotations

import functools
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import HookUnavailable, RunStoreError, guard
from torchlens_perf.hooks.capture_trace import Trace, another_profiler, python_is_traced
from torchlens_perf.recorder import torch_instruments, torch_private
from torchlens_perf.recorder.folder_request import problem_with
from torchlens_perf.run import captures as capture_files
from torchlens_perf.run import ownership
from torchlens_perf.run.captures import (
    FLIGHT_RECORDER,
    LONGEST_S,
    MAX_SNAPSHOT_BYTES,
    RAW_TRACE,
    SNAPSHOT,
    TRACE,
    Outcome,
    Request,
)
from torchlens_perf.run.ring import CAPTURING, Flag, Kind

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

_SECTION = int(Kind.SECTION)
_OURS = guard("a capture")


class CaptureHook:
    """Looks for what the rank is asked, beside its ring file."""

    name = "captures"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        captures = _Captures(session)
        with session.throttled(self.name, captures.check):
            try:
                yield
            finally:
                captures.close()


class _Captures:
    """One after the other."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ask = str(capture_files.ask_path(session.ring_path))
        self._capture: _Capture | None = None

    @_OURS
    def check(self) -> None:
        if self._capture is not None or not os.path.exists(self._ask):  # a microsecond
            return
        request, refused = None, ""
        try:
            request = capture_files.read(Path(self._ask), Request)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            refused = f"the request cannot be read: {error}"
        try:
            os.unlink(self._ask)  # from here on it is ours; before, the sidecar may take it back
        except FileNotFoundError:
            return
        if request is None:
            outcome = Outcome(capture_files.UNREADABLE, self._session.identity.rank, ended=refused)
            capture_files.write(capture_files.answer_path(self._session.ring_path), outcome)
            return
        self._capture = _Capture(self._session, request)
        self._session.step_callbacks.add(CaptureHook.name, self._step_ends)
        self._step_ends()

    def _step_ends(self) -> None:
        if self._capture is not None and self._works(self._capture.step_ends) is not False:
            self._capture = None
            self._session.step_callbacks.remove(self._step_ends)

    def close(self) -> None:
        """The watch ends. What is captured of whole steps is kept."""
        if self._capture is not None:
            if self._session.recorder.closed:
                self._capture.forget()
            else:
                self._works(functools.partial(self._capture.finish, "the watch ended"))
        self._capture = None

    @_OURS
    def _works(self, work: Callable[[], object]) -> object:
        """Whatever fails in it, nothing profiles afterwards, the failure is reported to the sidecar if possible, and
        later requests are taken up."""
        try:
            return work()
        except Exception as error:
            if self._capture is not None:
                with _OURS:
                    self._capture.fail(error)
            raise


class _Capture:
    """One request."""

    def __init__(self, session: Session, request: Request) -> None:
        self._session = session
        self._request = request
        self._folder = Path(request.folder)
        self._since_s = time.monotonic()
        self._trace: Trace | None = None
        self._first_step: int | None = None
        self._steps = 0
        self._paused_s = 0.0
        self._files: dict[str, int] = {}
        self._left_out: dict[str, str] = {}
        self._problem: str | None = None  # with its folder; None: not asked yet

    def step_ends(self) -> bool:
        """At each step's end. Returns whether the request is done with."""
        step, waited_s = self._session.recorder.step, time.monotonic() - self._since_s
        if self._trace is None:
            early = step + 1 < self._request.from_step and waited_s < LONGEST_S
            return not early and not _graph_is_captured() and not self._begins(step + 1)
        self._session.step.tag(Flag.CAPTURED)
        self._steps += not self._trace.cut_short
        ended = None
        if self._trace.cut_short:
            ended = "another profiler began"
        elif self._steps >= self._request.steps:
            ended = ""
        elif waited_s > LONGEST_S:
            ended = f"it took longer than {LONGEST_S:g} s"
        if ended is None or _graph_is_captured():
            self._trace.next_step(step + 1)
            return False
        self.finish(ended)
        return True

    def _begins(self, step: int) -> bool:
        import torch

        python = self._request.python and not python_is_traced()
        if self._request.python and not python:
            self._left_out["Python frames"] = "a profiler or debugger has Python's profiling hook"
        trace, refused = Trace(cuda=_cuda_is_used(torch), python=python), ""
        self._trace = trace  # whatever fails, fail() ends it
        with self._pause():
            try:
                torch_private.require(torch_private.PROFILER)
                other = another_profiler()
                if other:
                    refused = f"{other} is on in this process"
                else:
                    trace.start(step, self._session.identity.rank, self._session.identity.world_size)
            except (HookUnavailable, RuntimeError) as error:
                refused = f"torch.profiler did not begin: {error}"
        if refused:
            self._trace = None
            trace.stop()
            self._answer(refused)
            return False
        self._first_step, self._since_s = step, time.monotonic()
        return True

    def fail(self, error: Exception) -> None:
        """After an error of ours: the profiler goes off, and the answer says why."""
        trace, self._trace = self._trace, None
        try:
            if trace is not None:
                with self._pause():
                    trace.stop()
        finally:
            if TRACE not in self._files:
                self._steps = 0
            if TRACE not in self._files and self._problem == "":
                with suppress(OSError):
                    (self._folder / RAW_TRACE).unlink(missing_ok=True)
            self._answer(f"it failed: {type(error).__name__}: {error}")

    def finish(self, ended: str) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            self._answer(ended)
            return
        with self._pause():
            trace.stop()
            if self._steps:
                self._keep(TRACE, RAW_TRACE, trace.write, capture_files.MAX_TRACE_BYTES)
            else:
                self._left_out[TRACE] = "no step was whole"
            self._keep_dump(FLIGHT_RECORDER, torch_instruments.flight_recorder())
            self._keep_dump(SNAPSHOT, torch_instruments.pickled_memory())
        self._answer(ended)

    def forget(self) -> None:
        """In a forked child: all of it is the parent's."""
        if self._trace is not None:
            self._trace.forget()

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Around what training waits for."""
        recorder, name_id = self._session.recorder, self._session.intern(CAPTURING)
        self._session.step.tag(Flag.CAPTURED)
        recorder.begin(_SECTION, name_id)
        start_ns = recorder.now_ns()
        try:
            yield
        finally:
            took_ns = recorder.now_ns() - start_ns
            self._session.add_overhead(took_ns)
            recorder.end(_SECTION, name_id)
            self._paused_s += took_ns / 1e9

    def _keep(self, name: str, file: str, make: Callable[[Path], object], max_bytes: int) -> None:
        """Writes a file, and takes it away again if it is too large. name: what it is called in the end."""
        path, problem = self._folder / file, self._disk_problem()
        if problem:
            self._left_out[name] = f"it could not be written: {problem}"
            return
        try:
            make(path)
            path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o640)  # the profiler's is as the umask has it
            size = path.stat().st_size
        except (OSError, RuntimeError) as error:
            self._left_out[name] = f"it could not be written: {error}"
            size = 0
        if 0 < size <= max_bytes:
            self._files[name] = size
            return
        with suppress(OSError):
            path.unlink()
        if size:
            self._left_out[name] = f"{size >> 20} MB are more than {max_bytes >> 20}: ask for fewer steps"

    def _disk_problem(self) -> str:
        """Why its folder cannot be written; "" if it can. Asked once: training waits for the answer."""
        if self._problem is None:
            try:
                self._problem = problem_with(self._folder)
            except RunStoreError as error:
                self._problem = str(error)
        return self._problem

    def _keep_dump(self, name: str, dump: bytes | str) -> None:
        """dump: the file, or why there is none."""
        if isinstance(dump, str):
            self._left_out[name] = dump
        else:
            self._keep(name, name, lambda path: ownership.write(path, dump), MAX_SNAPSHOT_BYTES)

    def _answer(self, ended: str) -> None:
        import torch

        request, session = self._request, self._session
        outcome = Outcome(
            id=request.id,
            rank=session.identity.rank,
            first_step=self._first_step,
            steps=self._steps,
            ended=ended,
            files=self._files,
            left_out=self._left_out,
            paused_s=self._paused_s,
            torch=torch.__version__,
        )
        capture_files.write(capture_files.answer_path(session.ring_path), outcome)


def _cuda_is_used(torch: Any) -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())


def _graph_is_captured() -> bool:
    """Whether the step is inside of a CUDA graph's capture, which a synchronization would end."""
    import torch

    return _cuda_is_used(torch) and torch.cuda.is_current_stream_capturing()
