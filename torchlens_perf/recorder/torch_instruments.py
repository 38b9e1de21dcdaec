"""torch's own instruments, by private names that torch_private.py probes: profiler, flight recorder, memory history."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from torchlens_perf.recorder.torch_private import FLIGHT_RECORDER, SNAPSHOT, works

MAX_SNAPSHOT_ENTRIES = 200_000
"""That are pickled: about 1 KB each, with a stack."""


def attach_out_of_memory_observer(observer: Callable[[int, int, int, int], None]) -> None:
    """Calls `observer` before each out-of-memory error of the device's allocator, for as long as the process lives.

    It gets the device, and bytes: asked for, that the process may take, and free. It runs on the thread that asked,
    which may be autograd's, and without the allocator's lock: malloc() in c10/cuda/CUDACachingAllocator.cpp lets go of
    it first, for observers that need the GIL. What it raises would take the place of torch's own error.
    """
    import torch

    torch._C._cuda_attach_out_of_memory_observer(observer)


class MemoryHistory:
    """The history of device memory that we have torch record. One a process, as torch's."""

    def __init__(self) -> None:
        self.is_ours = False
        """Whether one is recorded, and is ours and so bounded."""

    def start(self, entries: int) -> None:
        """Keep the Python stack of each live block, and the last so many allocations and frees."""
        _record_memory_history("all", "alloc", entries)
        self.is_ours = True

    def end(self) -> None:
        if self.is_ours:
            self.is_ours = False
            _record_memory_history(None, None, 0)

    def release(self) -> None:
        """Leave torch's history to the job, or to the parent of this process."""
        self.is_ours = False


memory_history = MemoryHistory()


def memory_snapshot() -> dict[str, Any]:
    """Return the segments and blocks of torch's allocator, with the history if it is ours.

    The form is that of torch.cuda.memory._snapshot(). The job's own history may be of any length, and is not copied;
    the stacks of blocks are there all the same. Allocates nothing on the device and does not wait for it.
    """
    import torch

    snapshot: dict[str, Any] = torch._C._cuda_memorySnapshot((0, 0, memory_history.is_ours))
    return snapshot


def records_memory_history() -> bool:
    """Whether somebody records where device memory is allocated. CUDA must be initialized."""
    import torch

    return bool(torch._C._cuda_isHistoryEnabled())


def _record_memory_history(enabled: str | None, context: str | None, entries: int) -> None:
    import torch

    torch.cuda.memory._record_memory_history(enabled, context=context, stacks="python", max_entries=entries)


def profiler_is_on() -> bool:
    import torch
    from torch.autograd import profiler

    return bool(profiler._is_profiler_enabled or torch.autograd._profiler_enabled())


def forget_profiler() -> None:
    """Takes away what a profiler that will not be ended leaves in this process: its callbacks on each operator, of all
    threads, would record for as long as the process lives. Another profiler's go too."""
    import torch

    torch._C._autograd._clear_callbacks()
    profiler_is_off()


def profiler_is_off() -> None:
    """Says so to those who ask torch: one that fails while it begins has said the contrary."""
    from torch.autograd import profiler

    profiler._run_on_profiler_stop()


def add_to_trace(key: str, text: str) -> None:
    """Adds JSON to the head of the trace in progress."""
    import torch

    torch.autograd._add_metadata_json(key, text)


def flight_recorder() -> bytes | str:
    """What torch.distributed's flight recorder holds, as JSON; or why there is nothing."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return "there is no process group"
    if not works(FLIGHT_RECORDER):
        return "this torch has none"
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    dump: bytes = _dump_fr_trace_json()
    return dump if b'"entries"' in dump else "it is off: TORCH_FR_BUFFER_SIZE says how many entries it keeps"


def pickled_memory() -> bytes | str:
    """The CUDA allocator's segments and blocks, pickled for torch's memory viewer; or why there is nothing."""
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return "no GPU is in use"
    if not works(SNAPSHOT):
        return "this torch has none"
    snapshot = memory_snapshot()
    entries = sum(len(each["blocks"]) for each in snapshot["segments"]) + sum(map(len, snapshot["device_traces"]))
    if entries > MAX_SNAPSHOT_ENTRIES:
        return f"{entries} blocks and entries of the history are more than {MAX_SNAPSHOT_ENTRIES}"
    return pickle.dumps(snapshot)
