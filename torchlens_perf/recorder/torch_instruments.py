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


def memory_snapshot(*, with_history: bool) -> dict[str, Any]:
    """The segments and blocks of torch's allocator, and the history where it is asked for and recorded.

    As torch.cuda.memory._snapshot() documents it; allocates nothing on the device and does not wait for it.
    """
    import torch

    snapshot: dict[str, Any] = torch._C._cuda_memorySnapshot((0, 0, with_history))
    return snapshot


def records_memory_history() -> bool:
    """Whether somebody records where device memory is allocated. CUDA must be initialized."""
    import torch

    return bool(torch._C._cuda_isHistoryEnabled())


def record_memory_history(entries: int) -> None:
    """Keeps the Python stack of each live block, and the last so many allocations and frees; 0 ends it."""
    import torch

    torch.cuda.memory._record_memory_history(
        "all" if entries else None, context="alloc" if entries else None, stacks="python", max_entries=entries
    )


def profiler_is_on() -> bool:
    """Whether one of torch's profilers is on in this process."""
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


def pickled_memory(*, with_history: bool) -> bytes | str:
    """The CUDA allocator's segments and blocks, pickled for torch's memory viewer; or why there is nothing.

    with_history: the history too, which must be a bounded one.
    """
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return "no GPU is in use"
    if not works(SNAPSHOT):
        return "this torch has none"
    snapshot = memory_snapshot(with_history=with_history)
    entries = sum(len(each["blocks"]) for each in snapshot["segments"]) + sum(map(len, snapshot["device_traces"]))
    if entries > MAX_SNAPSHOT_ENTRIES:
        return f"{entries} blocks and entries of the history are more than {MAX_SNAPSHOT_ENTRIES}"
    return pickle.dumps(snapshot)
