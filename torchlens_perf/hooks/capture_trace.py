"""Trace a few steps by torch.profiler, but never while another profiler runs.

With torch 2.13, starting a second torch profiler makes Kineto discard the first one's session.
Writing the discarded session then causes a segmentation fault. A trace therefore does not begin
while another profiler is on or prepared, and ends before another profiler begins on any thread.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torchlens_perf.errors import guard
from torchlens_perf.recorder import torch_instruments, torch_private
from torchlens_perf.recorder.patch import patched

# Environment variables that profilers set in the processes that they profile.
_TOOLS = {
    "NSYS_PROFILING_SESSION_ID": "Nsight Systems",
    "CUDA_INJECTION64_PATH": "a tool at CUDA_INJECTION64_PATH",
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE": "Nsight Compute",
    "KINETO_USE_DAEMON": "dynolog",
}
_TEARDOWN = "TEARDOWN_CUPTI"
# With older CUDA, replaying a CUDA graph after CUPTI was detached and attached again may crash.
_TEARDOWN_CUDA = (12, 6)
_STARTS = ("_prepare_profiler", "_enable_profiler")
_YIELD_TO_OTHER = guard("ending a capture for another profiler")


def find_other_profiler() -> str:
    """Return the name of another profiler that is on or prepared in this process, or ""."""
    from torch.autograd import profiler

    tool = next((name for variable, name in _TOOLS.items() if os.environ.get(variable)), "")
    if tool:
        return tool
    if torch_instruments.is_profiler_on():
        return "torch.profiler"
    # torch has no list of profilers that are warming up, so search all objects. The search takes
    # about 60 ns per object, once per capture.
    prepared = [
        each for each in gc.get_referrers(profiler.profile) if isinstance(each, profiler.profile)
    ]
    return "torch.profiler" if any(map(torch_private.is_profile_prepared, prepared)) else ""


class CuptiTeardown:
    """Setting that makes Kineto detach CUPTI after a trace. Attached, CUPTI slows every launch.

    Kineto reads the setting at the end of a trace, and again during the next call of CUDA, in which
    it detaches CUPTI. The setting is therefore kept until the watch ends.
    """

    def __init__(self) -> None:
        self._requested = False

    def request(self) -> None:
        """Request the teardown, unless the job or torch has chosen a setting."""
        import torch

        cuda = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
        if cuda >= _TEARDOWN_CUDA and _TEARDOWN not in os.environ:
            os.environ[_TEARDOWN] = "1"
            self._requested = True

    def withdraw(self) -> None:
        """Remove our setting. A setting that torch made since is kept."""
        if self._requested and os.environ.get(_TEARDOWN) == "1":
            del os.environ[_TEARDOWN]
        self._requested = False


class ProfilerTrace:
    """One profile of torch.profiler. The training thread calls start() and stop().

    Another profiler may end the profile earlier, on any thread.
    """

    def __init__(self, *, cuda: bool, python: bool) -> None:
        """cuda: also trace the GPU. python: also trace Python frames and modules."""
        self.cut_short = False
        """True after another profiler has ended this profile."""
        self._cuda, self._python = cuda, python
        self._profile: Any = None
        self._results: Any = None
        self._step: Any = None
        self._patches = ExitStack()
        self._end_lock = threading.Lock()
        self._thread = threading.get_ident()

    def start(self, step: int, rank: int, world_size: int) -> None:
        """Start profiling with this step. Raises RuntimeError if torch refuses."""
        from torch.autograd import profiler

        profile = profiler.profile(
            use_kineto=True,
            use_device="cuda" if self._cuda else None,
            with_stack=self._python,
            # Only a profiler of all threads can be ended by another thread.
            experimental_config=torch_private.create_all_threads_config(),
        )
        with ExitStack() as patches:
            for name in _STARTS:
                patches.enter_context(
                    patched(profiler, name, self._wrap_profiler_start(getattr(profiler, name)))
                )
            try:
                profile.__enter__()
            except BaseException:
                torch_instruments.reset_profiler_flag()
                raise
            self._patches, self._profile = patches.pop_all(), profile
        # Holistic Trace Analysis and other tools read the rank from this entry.
        torch_instruments.add_trace_metadata(
            "distributedInfo", json.dumps({"rank": rank, "world_size": world_size})
        )
        self._begin_step(step)

    def begin_next_step(self, step: int) -> None:
        self._end_step()
        if not self.cut_short:
            self._begin_step(step)

    def stop(self) -> None:
        """End the profile if it has not ended. If the GPU is traced, this waits for the GPU."""
        with self._patches:
            try:
                self._end_step()
            finally:
                self._end_profile()

    def abandon_in_fork(self) -> None:
        """Switch the inherited profiler off in a forked child, which cannot end it."""
        with self._patches:
            # If we have no profile, an active profiler belongs to other code.
            if self._profile is not None:
                torch_instruments.remove_profiler_callbacks()
                if self._python:
                    sys.setprofile(None)

    def write(self, path: Path) -> None:
        """Write the stopped trace as uncompressed JSON. Raises OSError if that fails."""
        if self._results is None:
            raise OSError("torch's profiler could not be ended")
        self._results.save(str(path))
        self._results = None
        # Kineto does not report a failed write.
        if not path.exists():
            raise OSError("torch's profiler could not write it")

    def _begin_step(self, step: int) -> None:
        from torch.autograd.profiler import record_function

        # Tools recognize steps by this name, which torch.profiler uses too.
        self._step = record_function(f"ProfilerStep#{step}")
        self._step.__enter__()

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def _end_profile(self) -> None:
        # The training thread and another profiler's thread may both end the profile.
        with self._end_lock:
            profile, self._profile = self._profile, None
            if profile is not None:
                try:
                    profile.__exit__(None, None, None)
                finally:
                    # A profiler that failed to stop would record until the process ends.
                    if profile.kineto_results is None:
                        torch_instruments.remove_profiler_callbacks()
                self._results = profile.kineto_results

    def _wrap_profiler_start(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def start_after_ours_ended(*args: Any, **kwargs: Any) -> Any:
            self.cut_short |= self._profile is not None
            with _YIELD_TO_OTHER:
                if threading.get_ident() == self._thread:
                    self._end_step()
            with _YIELD_TO_OTHER:
                self._end_profile()
            return start(*args, **kwargs)

        return start_after_ours_ended
