"""Capture a few steps on request of the sidecar: trace, flight recorder, device memory.

The training thread checks a few times a second whether a request file exists. A capture begins and
ends at the end of a step, on this thread. Captured steps are not compared between ranks.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import HookUnavailable, RunStoreError, guard
from torchlens_perf.hooks.capture_trace import (
    CuptiTeardown,
    ProfilerTrace,
    find_other_profiler,
)
from torchlens_perf.interruption import ours, suppress
from torchlens_perf.recorder import torch_instruments, torch_private
from torchlens_perf.recorder.folder_request import find_folder_problem
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
    """Hook that polls for a capture request, a file that the sidecar writes next to the ring."""

    name = "captures"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        captures = _CaptureRequests(session)
        with session.run_throttled(self.name, captures.poll_request):
            try:
                yield
            finally:
                captures.close()


class _CaptureRequests:
    """Poller of capture requests in one watch. It runs one capture at a time."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._request_path = str(capture_files.ring_request_path(session.ring_path))
        self._capture: _Capture | None = None
        self._teardown = CuptiTeardown()

    @_OURS
    def poll_request(self) -> None:
        # os.access() takes about a microsecond. os.path.exists() would drop what a signal handler raises.
        if self._capture is not None or not os.access(self._request_path, os.F_OK):
            return
        request, refused = None, ""
        try:
            request = capture_files.read_capture_file(Path(self._request_path), Request)
        except FileNotFoundError:
            return
        except ours(OSError, ValueError) as error:
            refused = f"the request cannot be read: {error}"
        try:
            # Accept the request by removing its file, unless the sidecar has withdrawn the request.
            os.unlink(self._request_path)
        except FileNotFoundError:
            return
        if request is None:
            outcome = Outcome(capture_files.UNREADABLE, self._session.identity.rank, ended=refused)
            capture_files.write_capture_file(
                capture_files.ring_outcome_path(self._session.ring_path), outcome
            )
            return
        self._capture = _Capture(self._session, request, self._teardown)
        self._session.step_callbacks.add(CaptureHook.name, self._continue_capture)
        self._continue_capture()

    def _continue_capture(self) -> None:
        if (
            self._capture is not None
            and self._run_guarded(self._capture.continue_at_step_end) is not False
        ):
            self._capture = None
            self._session.step_callbacks.remove(self._continue_capture)

    def close(self) -> None:
        """End the current capture at the end of the watch, and keep its complete steps."""
        if self._capture is not None:
            if self._session.recorder.closed:
                self._capture.abandon_in_fork()
            else:
                self._run_guarded(functools.partial(self._capture.finish, "the watch ended"))
        self._capture = None
        self._teardown.withdraw()

    @_OURS
    def _run_guarded(self, work: Callable[[], object]) -> object:
        """Call `work`. If `work` raises, stop the profiler and report the error to the sidecar.

        Later capture requests are still accepted.
        """
        try:
            return work()
        except ours(Exception) as error:
            if self._capture is not None:
                with _OURS:
                    self._capture.answer_with_error(error)
            raise


class _Capture:
    """One capture, from its request to the answer."""

    def __init__(self, session: Session, request: Request, teardown: CuptiTeardown) -> None:
        self._session = session
        self._request = request
        self._teardown = teardown
        self._folder = Path(request.folder)
        self._since_s = time.monotonic()
        self._trace: ProfilerTrace | None = None
        self._first_step: int | None = None
        self._steps = 0
        self._paused_s = 0.0
        self._files: dict[str, int] = {}
        self._left_out: dict[str, str] = {}
        self._folder_problem: str | None = None  # None until the folder has been checked.

    def continue_at_step_end(self) -> bool:
        """Continue the capture at the end of a step. Return True if the capture has ended."""
        step, waited_s = self._session.recorder.step, time.monotonic() - self._since_s
        if self._trace is None:
            early = step + 1 < self._request.from_step and waited_s < LONGEST_S
            return not early and not _is_capturing_graph() and not self._start_trace(step + 1)
        self._session.step.add_flag(Flag.CAPTURED)
        self._steps += not self._trace.cut_short
        ended = None
        if self._trace.cut_short:
            ended = "another profiler began"
        elif self._steps >= self._request.steps:
            ended = ""
        elif waited_s > LONGEST_S:
            ended = f"it took longer than {LONGEST_S:g} s"
        if ended is None or _is_capturing_graph():
            self._trace.begin_next_step(step + 1)
            return False
        self.finish(ended)
        return True

    def _start_trace(self, step: int) -> bool:
        import torch

        python = self._request.python and sys.getprofile() is None
        if self._request.python and not python:
            self._left_out["Python frames"] = "a profiler or debugger has Python's profiling hook"
        cuda = _is_cuda_used(torch)
        trace, refused = ProfilerTrace(cuda=cuda, python=python), ""
        self._trace = trace  # If an error occurs, answer_with_error() stops this trace.
        with self._time_pause():
            try:
                torch_private.require(torch_private.PROFILER)
                other = find_other_profiler()
                if other:
                    refused = f"{other} is on in this process"
                else:
                    if cuda:
                        self._teardown.request()
                    trace.start(
                        step, self._session.identity.rank, self._session.identity.world_size
                    )
            except ours(HookUnavailable, RuntimeError) as error:
                refused = f"torch.profiler did not begin: {error}"
        if refused:
            self._trace = None
            trace.stop()
            self._write_answer(refused)
            return False
        self._first_step, self._since_s = step, time.monotonic()
        return True

    def answer_with_error(self, error: Exception) -> None:
        """Stop the profiler after an error in this package, and report the error in the answer."""
        trace, self._trace = self._trace, None
        try:
            if trace is not None:
                with self._time_pause():
                    trace.stop()
        finally:
            if TRACE not in self._files:
                self._steps = 0
            if TRACE not in self._files and self._folder_problem == "":
                with suppress(OSError):
                    (self._folder / RAW_TRACE).unlink(missing_ok=True)
            self._write_answer(f"it failed: {type(error).__name__}: {error}")

    def finish(self, ended: str) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            self._write_answer(ended)
            return
        with self._time_pause():
            trace.stop()
            if self._steps:
                self._write_if_small(TRACE, RAW_TRACE, trace.write, capture_files.MAX_TRACE_BYTES)
            else:
                self._left_out[TRACE] = "no step was complete"
            self._write_dump(FLIGHT_RECORDER, torch_instruments.dump_flight_recorder())
            self._write_dump(SNAPSHOT, torch_instruments.dump_memory_snapshot())
        self._write_answer(ended)

    def abandon_in_fork(self) -> None:
        """Drop the trace in a forked child, where the profiler belongs to the parent process."""
        if self._trace is not None:
            self._trace.abandon_in_fork()

    @contextmanager
    def _time_pause(self) -> Iterator[None]:
        """Record the context's time, in which training waits, as a section and as overhead."""
        recorder, name_id = self._session.recorder, self._session.intern(CAPTURING)
        self._session.step.add_flag(Flag.CAPTURED)
        recorder.begin(_SECTION, name_id)
        start_ns = recorder.now_ns()
        try:
            yield
        finally:
            took_ns = recorder.now_ns() - start_ns
            self._session.add_overhead(took_ns)
            recorder.end(_SECTION, name_id)
            self._paused_s += took_ns / 1e9

    def _write_if_small(
        self, name: str, file: str, make: Callable[[Path], object], max_bytes: int
    ) -> None:
        """Write a file, and remove it again if it is too large.

        name: the name in the finished capture. file: the name in the capture's folder.
        """
        path, problem = self._folder / file, self._find_disk_problem()
        if problem:
            self._left_out[name] = f"it could not be written: {problem}"
            return
        try:
            make(path)
            # The profiler creates the file with the umask's permissions.
            path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o640)
            size = path.stat().st_size
        except ours(OSError, RuntimeError) as error:
            self._left_out[name] = f"it could not be written: {error}"
            size = 0
        if 0 < size <= max_bytes:
            self._files[name] = size
            return
        with suppress(OSError):
            path.unlink()
        if size:
            self._left_out[name] = (
                f"{size >> 20} MB exceed the limit of {max_bytes >> 20} MB: request fewer steps"
            )

    def _find_disk_problem(self) -> str:
        """Return the reason if the capture's folder cannot be written, or "".

        The folder is checked once per capture, because training waits for the check.
        """
        if self._folder_problem is None:
            try:
                self._folder_problem = find_folder_problem(self._folder)
            except RunStoreError as error:
                self._folder_problem = str(error)
        return self._folder_problem

    def _write_dump(self, name: str, dump: bytes | str) -> None:
        """Write a dump. dump: the content as bytes, or the reason for its absence as text."""
        if isinstance(dump, str):
            self._left_out[name] = dump
        else:
            self._write_if_small(
                name,
                name,
                lambda path: ownership.write_private_file(path, dump),
                MAX_SNAPSHOT_BYTES,
            )

    def _write_answer(self, ended: str) -> None:
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
        capture_files.write_capture_file(
            capture_files.ring_outcome_path(session.ring_path), outcome
        )


def _is_cuda_used(torch: Any) -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())


def _is_capturing_graph() -> bool:
    """Return True during a CUDA graph capture, which a synchronization would abort."""
    import torch

    return _is_cuda_used(torch) and torch.cuda.is_current_stream_capturing()
