"""Use torch's profiler, flight recorder and memory history, by names that torch_private.py checks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from torchlens_perf.recorder.torch_private import FLIGHT_RECORDER, SNAPSHOT, is_usable

MAX_SNAPSHOT_ENTRIES = 200_000
"""Largest number of history entries in a snapshot. An entry with its stack takes about 1 KB."""


def attach_out_of_memory_observer(observer: Callable[[int, int, int, int], None]) -> None:
    """Call `observer` before each out-of-memory error of the device's allocator, until the process
    ends.

    Its arguments are the device and three byte counts: requested, limit of the process, and free.
    The observer runs on the allocating thread, which may be autograd's. torch releases the
    allocator's lock first, because observers may need the GIL (malloc() in
    c10/cuda/CUDACachingAllocator.cpp). An exception of the observer would replace torch's own
    error.
    """
    import torch

    torch._C._cuda_attach_out_of_memory_observer(observer)


class MemoryHistory:
    """Control of torch's memory history, of which each process has one.

    A history that the job has started is not changed.
    """

    def __init__(self) -> None:
        self.is_ours = False
        """True while a history is recorded that this package has started, and that
        is therefore bounded. False leaves it to the job, or to the parent of a forked child.
        """

    def start_recording(self, entries: int) -> None:
        """Record the Python stacks of live blocks, and the last `entries` allocations and frees."""
        _record_memory_history("all", "alloc", entries)
        self.is_ours = True

    def end_recording(self) -> None:
        if self.is_ours:
            self.is_ours = False
            _record_memory_history(None, None, 0)


memory_history = MemoryHistory()


def take_memory_snapshot() -> dict[str, Any]:
    """Return segments and blocks of torch's allocator, with the history if this package has started
    it.

    The form is that of torch.cuda.memory._snapshot(). A history that the job has started may have
    any length and is not copied; stacks of blocks are included. Nothing is allocated on the device,
    and it is not waited for.
    """
    import torch

    return torch._C._cuda_memorySnapshot((0, 0, memory_history.is_ours))


def is_recording_memory_history() -> bool:
    """Return True if a history of device memory is being recorded. CUDA must be initialized."""
    import torch

    return bool(torch._C._cuda_isHistoryEnabled())


def _record_memory_history(enabled: str | None, context: str | None, entries: int) -> None:
    import torch

    torch.cuda.memory._record_memory_history(
        enabled, context=context, stacks="python", max_entries=entries
    )


def is_profiler_on() -> bool:
    import torch
    from torch.autograd import profiler

    return bool(profiler._is_profiler_enabled or torch.autograd._profiler_enabled())


def remove_profiler_callbacks() -> None:
    """Remove the operator callbacks of a profiler that will not be ended, on all threads.

    The callbacks would otherwise record until the process ends. Callbacks of all profilers are
    removed."""
    import torch

    torch._C._autograd._clear_callbacks()
    reset_profiler_flag()


def reset_profiler_flag() -> None:
    """Reset torch's flag of an active profiler. A profiler that fails to start does not reset it."""
    from torch.autograd import profiler

    profiler._run_on_profiler_stop()


def add_trace_metadata(key: str, text: str) -> None:
    """Add JSON to the metadata of the trace in progress."""
    import torch

    torch.autograd._add_metadata_json(key, text)


def dump_flight_recorder() -> bytes | str:
    """Return the content of torch.distributed's flight recorder as JSON, or the reason why it is
    missing.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return "there is no process group"
    if not is_usable(FLIGHT_RECORDER):
        return "this torch has none"
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    dump: bytes = _dump_fr_trace_json()
    return (
        dump
        if b'"entries"' in dump
        else "it is off: TORCH_FR_BUFFER_SIZE says how many entries it keeps"
    )


def dump_memory_snapshot() -> bytes | str:
    """Return the CUDA allocator's state pickled for torch's memory viewer, or the reason why it is
    missing.
    """
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return "no GPU is in use"
    if not is_usable(SNAPSHOT):
        return "this torch has none"
    snapshot = take_memory_snapshot()
    entries = sum(len(each["blocks"]) for each in snapshot["segments"]) + sum(
        map(len, snapshot["device_traces"])
    )
    if entries > MAX_SNAPSHOT_ENTRIES:
        return f"{entries} blocks and entries of the history are more than {MAX_SNAPSHOT_ENTRIES}"
    return pickle.dumps(snapshot)
