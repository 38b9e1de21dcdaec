"""An asynchronous device whose driver runs the kernels' NumPy twins in stream order.

The device has the methods of cuda/device.py that merging needs.

Rings, buffers and merges are those of the product.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.device import device
from tests.support.device import twins
from torchlens_perf.cuda.aggregate import WindowMerger
from torchlens_perf.cuda.driver import KernelArguments
from torchlens_perf.cuda.reduction import ROW_WIDTHS, SUM_ROW
from torchlens_perf.cuda.stamps import DeviceRing

NAMES = ("stamp", "reduce_window", "merged_quantiles", "rank_scores")
# Keep the driver as long as the process runs.
_ring: list[DeviceRing] = []
_aside: list[torch.Stream] = []


def array(address: Any, kind: Any, *shape: int) -> np.ndarray[Any, Any]:
    """Return the device memory at an address, which is host memory here, as an array."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    buffer: Any = (ctypes.c_uint8 * size).from_address(int(address))
    return np.frombuffer(buffer, kind).reshape(shape)


class TwinDriver:
    """Implements the methods of cuda/driver.py on the CPU.

    Streams are torch's streams, identified by number. Threads of the streams run enqueued work.
    """

    def __init__(self) -> None:
        self.streams: dict[int, Any] = {}
        self._events: dict[int, Any] = {}
        self._handles = itertools.count(1)
        self._memory: dict[int, Any] = {}
        self.functions = dict(zip(NAMES, itertools.count(1), strict=False))
        self.launches = 0

    def current(self) -> int:
        """Return the current stream."""
        return self._known(torch.accelerator.current_stream())

    def _known(self, stream: Any) -> int:
        return int(self.streams.setdefault(stream.stream_id, stream).stream_id)

    def tensor(self, address: int, words: int) -> torch.Tensor:
        """Return the memory at an address that allocate() has returned."""
        return self._memory[address][:words]

    def allocate(self, size: int) -> int:
        made = torch.zeros(-(-size // 8), dtype=torch.int64, device=device.NAME)
        self._memory[made.data_ptr()] = made
        return made.data_ptr()

    def allocate_host(self, size: int) -> int:
        made = np.zeros(size, np.uint8)
        self._memory[made.ctypes.data] = made
        return int(made.ctypes.data)

    def free(self, address: int) -> None:
        del self._memory[address]

    free_host = free

    def _copy(self, to: int, source: int, size: int, stream: int) -> None:
        device.call(stream, lambda _: ctypes.memmove(to, source, size))

    def copy_to_host(self, to: int, address: int, size: int, stream: int) -> None:
        self._copy(to, address, size, stream)

    def copy_on_device(self, to: int, address: int, size: int, stream: int) -> None:
        self._copy(to, address, size, stream)

    def copy_to_device(self, address: int, values: np.ndarray[Any, Any], stream: int) -> None:
        pinned = any(
            each <= values.ctypes.data < each + made.nbytes
            for each, made in list(self._memory.items())
        )
        # The caller may change unpinned memory as soon as this call has returned.
        kept = values if pinned else values.copy()
        device.call(stream, lambda _: ctypes.memmove(address, kept.ctypes.data, kept.nbytes))

    def clear_memory(self, address: int, size: int, stream: int) -> None:
        device.call(stream, lambda _: ctypes.memset(address, 0, size))

    def create_stream(self) -> int:
        return self._known(torch.Stream(device=device.NAME))

    @contextmanager
    def temporary_stream(self) -> Iterator[int]:
        stream = self.create_stream()
        yield stream
        self.streams[stream].synchronize()

    def allow_during_captures(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait_for_event(self, stream: int, event: int) -> None:
        if self._events[event] is not None:
            self.streams[stream].wait_event(self._events[event])

    def is_capturing(self, stream: int) -> bool:
        return False

    def create_event(self) -> int:
        handle = next(self._handles)
        self._events[handle] = None
        return handle

    def record_event(self, event: int, stream: int) -> None:
        self._events[event] = torch.Event(device.NAME)
        self._events[event].record(self.streams[stream])

    def has_event_passed(self, event: int) -> bool:
        return self._events[event] is None or bool(self._events[event].query())

    def launch_kernel(
        self,
        function: int,
        grid: int,
        threads: int,
        shared: int,
        stream: int,
        arguments: KernelArguments,
    ) -> None:
        values = [each.value for each in arguments._values]
        kernel = KERNELS[NAMES[function - 1]]
        self.launches += 1
        device.call(stream, lambda now_ns: kernel(now_ns, grid, *values))


def _stamp(now_ns: int, grid: int, *values: Any) -> None:
    opened, start, duration, heads, close, open_, mask = values
    slots = max(close, open_) + 1
    begun, head = array(opened, np.uint64, slots), array(heads, np.uint32, slots)
    if close >= 0 and begun[close]:
        at = close * (mask + 1) + (int(head[close]) & mask)
        array(start, np.uint64, at + 1)[at] = begun[close]
        array(duration, np.uint64, at + 1)[at] = now_ns - int(begun[close])
        head[close] += 1
        begun[close] = 0
    if open_ >= 0:
        begun[open_] = now_ns


def _reduce_window(now_ns: int, grid: int, *values: Any) -> None:
    start, duration, heads, tails, _, *rows, mask = values
    head, tail = (array(each, np.uint32, grid) for each in (heads, tails))
    made = twins.reduce_window(
        *(array(each, np.uint64, grid, mask + 1) for each in (start, duration)), head, tail
    )
    for address, width, table in zip(rows, ROW_WIDTHS, made, strict=True):
        array(address, np.int64, grid, width)[:] = table
    tail[:] = head


def _merged_quantiles(now_ns: int, grid: int, *values: Any) -> None:
    sums, slots, parts, quantiles, buckets = values
    found = twins.merged_quantiles(
        array(sums, np.int64, slots, SUM_ROW), array(parts, np.uint32, quantiles)
    )
    array(buckets, np.int32, slots, quantiles)[:] = found


def _rank_scores(now_ns: int, grid: int, *values: Any) -> None:
    """Compute the scores of `grid` slots, starting with the first one."""
    times, ranks, slots, min_spread, middle, worst = values
    flat = array(times, np.int64, (ranks - 1) * slots + grid)
    table = np.stack([flat[rank * slots : rank * slots + grid] for rank in range(ranks)])
    scores = twins.rank_scores(table, min_spread)
    array(middle, np.float32, grid, 2)[:] = scores.middle
    highest = array(worst, np.uint64, ranks)
    highest[:] = np.maximum(highest, scores.worst)


KERNELS: Mapping[str, Callable[..., None]] = {
    "stamp": _stamp, "reduce_window": _reduce_window, "merged_quantiles": _merged_quantiles,
    "rank_scores": _rank_scores,
}  # fmt: skip
_driver: list[TwinDriver] = []


def driver() -> TwinDriver:
    """Return the only driver of this process."""
    if not _driver:
        _driver.append(TwinDriver())
    return _driver[0]


class AsyncDevice:
    """Replaces cuda_device.CudaDevice."""

    def stream_handle(self) -> int:
        return driver().current()

    def is_capturing(self) -> bool:
        return False

    def is_in_use(self) -> bool:
        return True

    def current_index(self) -> int:
        return 0

    def get_or_create_ring(self) -> DeviceRing:
        if not _ring:
            _ring.append(DeviceRing(driver(), driver().functions))  # type: ignore[arg-type]
        return _ring[0]

    def earlier_ring(self) -> DeviceRing | None:
        return _ring[0] if _ring else None

    def create_process_group(self) -> Any:
        return dist.new_group(backend=device.NAME)

    def create_merger(self, ring: DeviceRing, group: Any) -> WindowMerger:
        if not _aside:
            _aside.append(torch.Stream(device=device.NAME))
        return WindowMerger(self, driver(), driver().functions, ring, group)  # type: ignore[arg-type]

    def all_ranks_agree(self, group: Any, *, able: bool) -> bool:
        flag = torch.full((1,), int(able), dtype=torch.int64, device=device.NAME)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group)
        return bool(flag.item())

    @contextmanager
    def merge_stream(self) -> Iterator[int]:
        stream = _aside[0]
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            yield driver().current()

    def allocate_zeros(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int64, device=device.NAME)

    def view_words(self, address: int, count: int) -> torch.Tensor:
        return driver().tensor(address, count)
