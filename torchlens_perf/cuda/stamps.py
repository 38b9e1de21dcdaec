"""Time device sections by stamps: kernels that write the device's clock into device memory.

Each replay of a captured graph overwrites its CUDA events, so the host would have to wait for each
event before the next replay. A stamp is a one-thread kernel that appends the device's clock to a
ring in device memory. The graph replays it like any other kernel, without work on the host.

::

    stamp ─▶ ring of each slot ──reduce_window──▶ rows ──copy──▶ page-locked memory ─▶ result
    (the user's stream, also in a graph)          (the stream at the end of a step)

The job may replay a graph with stamps until the process ends, with or without a watch. The ring
therefore keeps its address for the life of the process, and later watches use it again.

All methods run on the training thread. Only the creation of the ring, which allocates memory, may
wait for the device.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchlens_perf.cuda.driver import CudaDriver, KernelArguments
from torchlens_perf.cuda.reduction import (
    ROW_WIDTHS,
    ReducedWindow,
    mantissa_bounds,
    view_tables,
)

SLOTS = 64
# Capacity of a section's ring between two reductions. Excess spans are counted as lost.
PLACES = 1024
REDUCE_THREADS = 256
NO_SLOT = -1


class ReusableMemory(NamedTuple):
    """Memory and events that a watch used for merging, and that the next watch uses again."""

    size: int
    """Size of the memory in bytes."""
    host: int
    """Address of page-locked memory."""
    arrived: int
    """Event after which no copy writes to the memory."""
    rows_read: int
    """Event after which a merge no longer reads the ring's rows."""


class DeviceRing:
    """The rings of SLOTS sections in device memory (1.6 MB), and their reduction."""

    def __init__(
        self,
        driver: CudaDriver,
        functions: Mapping[str, int],
        slots: int = SLOTS,
        places: int = PLACES,
    ) -> None:
        """Allocate and clear the memory, and wait for completion. Raises DeviceError on failure.

        functions: the kernels' handles by name.
        places: the capacity of each slot's ring, a power of two up to 4096, because a window is
        sorted in shared memory. One place is never read, because another stream may be writing
        there.
        """
        self._driver = driver
        self._stamp, self._reduce = functions["stamp"], functions["reduce_window"]
        self.slots, self._places = slots, places
        self._names: dict[str, int] = {}
        self.is_pending = False
        """True if there is a reduction whose result has not been collected."""
        self.leftovers: list[ReusableMemory] = []
        """Memory of earlier watches that cuda/aggregate.py can use again."""
        # Event after which no other stream reads the rows.
        self.readers_done: int | None = None
        sizes = {
            "opened": 8 * slots,
            "head": 4 * slots,
            "tail": 4 * slots,
            "start_ns": 8 * slots * places,
            "duration_ns": 8 * slots * places,
            "bounds": 8 * len(mantissa_bounds()),
            "rows": 8 * slots * sum(ROW_WIDTHS),
        }
        self._memory: dict[str, int] = {}
        self._host_memory = 0
        try:
            for name, size in sizes.items():
                self._memory[name] = driver.allocate(size)
            with driver.temporary_stream() as stream:
                for name, size in sizes.items():
                    driver.clear_memory(self._memory[name], size, stream)
                driver.copy_to_device(self._memory["bounds"], mantissa_bounds(), stream)
            self._rows_size = sizes["rows"]
            self._host_memory = driver.allocate_host(self._rows_size)
            self._arrived = driver.create_event()
        except BaseException:
            for address in self._memory.values():
                driver.free(address)
            if self._host_memory:
                driver.free_host(self._host_memory)
            raise
        self.device_bytes = sum(sizes.values())
        buffer: Any = (ctypes.c_int64 * (self._rows_size // 8)).from_address(self._host_memory)
        *self._rows, _ = view_tables(np.ctypeslib.as_array(buffer), slots, ROW_WIDTHS)
        self._stamp_arguments: dict[tuple[int, int], KernelArguments] = {}
        inputs = [
            self._memory[name] for name in ("start_ns", "duration_ns", "head", "tail", "bounds")
        ]
        self._reduce_arguments = pack_reduce_arguments(inputs, self._memory["rows"], slots, places)

    def assign_slot(self, name: str) -> int:
        """Return the slot of a section, or NO_SLOT if all slots are taken."""
        slot = self._names.get(name)
        if slot is None:
            if len(self._names) == self.slots:
                return NO_SLOT
            slot = self._names[name] = len(self._names)
        return slot

    @property
    def rows(self) -> tuple[int, int]:
        """Device address and number of words of the last reduction's rows."""
        return self._memory["rows"], self._rows_size // 8

    @property
    def bounds(self) -> int:
        """Device address of reduction.mantissa_bounds()."""
        return self._memory["bounds"]

    @property
    def names(self) -> list[str]:
        """Names of the sections by slot."""
        return list(self._names)

    def discard_earlier_stamps(self, stream: int) -> None:
        """Discard all earlier stamps, and the result of a reduction that has not been collected."""
        if self.is_pending:
            # The discarded result must not overwrite a later one.
            self._driver.wait_for_event(stream, self._arrived)
            self.is_pending = False
        self._driver.copy_on_device(
            self._memory["tail"], self._memory["head"], 4 * self.slots, stream
        )

    def enqueue_stamp(self, close: int, open_: int, stream: int) -> None:
        """Enqueue the end of a span, the begin of another span, or both. NO_SLOT means no span.

        The stamp may be captured into a graph. Raises DeviceError if the launch fails.
        """
        arguments = self._stamp_arguments.get((close, open_))
        if arguments is None:
            arguments = self._stamp_arguments[close, open_] = self._pack_stamp_arguments(
                close, open_
            )
        self._driver.launch_kernel(self._stamp, 1, 32, 0, stream, arguments)

    def enqueue_reduction(self, stream: int) -> bool:
        """Enqueue the reduction of all earlier stamps of this stream, and a copy of the result.

        Returns False without enqueueing anything if the last result has not been collected or the
        stream is being captured. The rings then continue to fill. Concurrent stamps of other
        streams are part of this result or of the next result.
        """
        if self.is_pending or self._driver.is_capturing(stream):
            return False
        if self.readers_done is not None:
            self._driver.wait_for_event(stream, self.readers_done)
        self._driver.launch_kernel(
            self._reduce,
            self.slots,
            REDUCE_THREADS,
            8 * self._places,
            stream,
            self._reduce_arguments,
        )
        self._driver.copy_to_host(self._host_memory, self._memory["rows"], self._rows_size, stream)
        self._driver.record_event(self._arrived, stream)
        self.is_pending = True
        return True

    def collect_result(self) -> ReducedWindow | None:
        """Return the last reduction's result once, or None until it has arrived.

        Queries the device once. Must not be called while any stream is being captured.
        """
        if not self.is_pending or not self._driver.has_event_passed(self._arrived):
            return None
        self.is_pending = False
        return ReducedWindow(*(rows.copy() for rows in self._rows))

    def _pack_stamp_arguments(self, close: int, open_: int) -> KernelArguments:
        addresses = [
            np.uint64(self._memory[name]) for name in ("opened", "start_ns", "duration_ns", "head")
        ]
        return KernelArguments(
            [*addresses, np.int32(close), np.int32(open_), np.uint32(self._places - 1)]
        )


def pack_reduce_arguments(
    inputs: Sequence[int], rows: int, slots: int, places: int
) -> KernelArguments:
    """Return the arguments of reduce_window. inputs, rows: device addresses."""
    offsets = itertools.accumulate((8 * slots * width for width in ROW_WIDTHS[:-1]), initial=0)
    addresses = [*inputs, *(rows + offset for offset in offsets)]
    return KernelArguments([*map(np.uint64, addresses), np.uint32(places - 1)])
