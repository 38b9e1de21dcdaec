"""torch.profiler over a few steps, and never beside another profiler: two of them end the process.

A second one of torch's makes Kineto forget the first one's session, and writing that is a segmentation fault (2.13). So
ours does not begin while another one is on or prepared, and ends before another one begins, on whatever thread.
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

# What Nsight Systems, Nsight Compute and dynolog leave in the environment of a process that they look at.
_TOOLS = {
    "NSYS_PROFILING_SESSION_ID": "Nsight Systems",
    "CUDA_INJECTION64_PATH": "a tool at CUDA_INJECTION64_PATH",
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE": "Nsight Compute",
    "KINETO_USE_DAEMON": "dynolog",
}
_STARTS = ("_prepare_profiler", "_enable_profiler")
_FOR_ANOTHER = guard("ending a capture for another profiler")


def another_profiler() -> str:
    """What else profiles this process, or is about to; "" if nothing does."""
    from torch.autograd import profiler

    tool = next((name for variable, name in _TOOLS.items() if os.environ.get(variable)), "")
    if tool:
        return tool
    if torch_instruments.profiler_is_on():
        return "torch.profiler"
    # One that warms up tells nobody. Looking at all objects takes some 60 ns each, once a capture.
    prepared = [each for each in gc.get_referrers(profiler.profile) if isinstance(each, profiler.profile)]
    return "torch.profiler" if any(torch_private.is_prepared(each) for each in prepared) else ""


class Trace:
    """One profile, from start() to stop(). Both are the training thread's; another profiler may end it anywhere."""

    def __init__(self, *, cuda: bool, python: bool) -> None:
        """python: Python frames and modules too."""
        self.cut_short = False
        """Whether another profiler has ended it."""
        self._cuda, self._python = cuda, python
        self._profile: Any = None
        self._results: Any = None
        self._step: Any = None
        self._patches = ExitStack()
        self._ending = threading.Lock()
        self._thread = threading.get_ident()

    def start(self, step: int, rank: int, world_size: int) -> None:
        """Begins with that step. Raises RuntimeError where torch refuses."""
        from torch.autograd import profiler

        profile = profiler.profile(
            use_kineto=True,
            use_device="cuda" if self._cuda else None,
            with_stack=self._python,
            # Else it belongs to this thread, and no other one could end it.
            experimental_config=torch_private.all_threads(),
        )
        with ExitStack() as patches:
            for name in _STARTS:
                patches.enter_context(patched(profiler, name, self._ending_ours(getattr(profiler, name))))
            try:
                profile.__enter__()
            except BaseException:
                torch_instruments.profiler_is_off()
                raise
            self._patches, self._profile = patches.pop_all(), profile
        # HTA and others look for the rank there.
        torch_instruments.add_to_trace("distributedInfo", json.dumps({"rank": rank, "world_size": world_size}))
        self._begin_step(step)

    def next_step(self, step: int) -> None:
        self._end_step()
        if not self.cut_short:
            self._begin_step(step)

    def stop(self) -> None:
        """Ends it, if it has not ended. On a GPU this waits for the device."""
        with self._patches:
            try:
                self._end_step()
            finally:
                self._end()

    def forget(self) -> None:
        """In a forked child: the profiler is the parent's, and here nobody would ever end it."""
        with self._patches:
            if self._profile is not None:  # else another one's is on
                torch_instruments.forget_profiler()
                if self._python:
                    sys.setprofile(None)

    def write(self, path: Path) -> None:
        """Writes the trace, once stopped, as uncompressed JSON. Raises OSError where that fails."""
        if self._results is None:
            raise OSError("torch's profiler could not be ended")
        self._results.save(str(path))
        self._results = None
        if not path.exists():  # Kineto tells nobody
            raise OSError("torch's profiler could not write it")

    def _begin_step(self, step: int) -> None:
        from torch.autograd.profiler import record_function

        self._step = record_function(f"ProfilerStep#{step}")  # as torch.profiler names them
        self._step.__enter__()

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def _end(self) -> None:
        with self._ending:  # who comes second waits until it has ended
            profile, self._profile = self._profile, None
            if profile is not None:
                try:
                    profile.__exit__(None, None, None)
                finally:
                    if profile.kineto_results is None:
                        torch_instruments.forget_profiler()  # else it records for life
                self._results = profile.kineto_results

    def _ending_ours(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def started(*args: Any, **kwargs: Any) -> Any:
            self.cut_short |= self._profile is not None
            with _FOR_ANOTHER:
                if threading.get_ident() == self._thread:
                    self._end_step()
            with _FOR_ANOTHER:
                self._end()
            return start(*args, **kwargs)

        return started


def python_is_traced() -> bool:
    """Whether somebody else has Python's profiling hook, which frames in a trace need too."""
    return sys.getprofile() is not None
