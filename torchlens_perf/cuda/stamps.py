"""Spans in device memory: stamps of the device's clock, which a captured graph appends to at each replay.

A CUDA event inside a captured graph is one place that each replay overwrites; it would have to be read, and waited for,
before the next one. A stamp is a kernel of one thread that writes the device's clock into a ring in device memory: the
graph replays it with everything else, and nothing of it runs on the host.

::

    stamp ─▶ ring of each slot ──reduce_window──▶ rows ──copy──▶ page-locked memory ──collect()──▶ Reduced
    (on the user's stream, also in a graph)       (on the stream of the step's end)

A graph that holds stamps may be replayed for as long as the process lives, with or without a watch: so the ring stays
where it is until the process ends, and later watches use it again.

All methods on the training thread. None waits for the device, but for making the ring, where memory is allocated.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from torchlens_perf.cuda.driver import Arguments, Driver
from torchlens_perf.cuda.reduction import ROW_WIDTHS, Reduced, mantissa_bounds, tables_in

SLOTS = 64
PLACES = 1024  # of a slot's ring, between two reductions; the surplus is counted as lost
REDUCE_THREADS = 256
NO_SLOT = -1


class Leftover(NamedTuple):
    """What a watch that merged over ranks has had, for the next one."""

    size: int
    host: int
    """Page-locked memory, of so many bytes."""
    arrived: int
    """The event after which nothing is copied there."""
    rows_read: int
    """Another one."""


class DeviceRing:
    """The rings of SLOTS sections in device memory, 1.6 MB, and the reduction of what they hold."""

    def __init__(self, driver: Driver, functions: Mapping[str, int], slots: int = SLOTS, places: int = PLACES) -> None:
        """functions: the kernels' handles by name. places: of each slot's ring, a power of two, 4096 at most, as a
        window is sorted in shared memory; one of them is never read, as another stream may be stamping there.

        Waits until the memory is cleared. Raises DeviceError where it cannot be had.
        """
        self._driver = driver
        self._stamp, self._reduce = functions["stamp"], functions["reduce_window"]
        self.slots, self._places = slots, places
        self._names: dict[str, int] = {}
        self._on_the_way = False  # a reduction whose result has not been collected
        self.leftovers: list[Leftover] = []
        """Of merges over ranks by earlier watches; cuda/aggregate.py has them."""
        self._readers: int | None = None  # the event after which nobody else reads the rows
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
            with driver.own_stream() as stream:
                for name, size in sizes.items():
                    driver.clear(self._memory[name], size, stream)
                driver.copy_to_device(self._memory["bounds"], mantissa_bounds(), stream)
            self._rows_size = sizes["rows"]
            self._host_memory = driver.allocate_host(self._rows_size)
            self._arrived = driver.new_event()
        except BaseException:
            self._free()
            raise
        self.device_bytes = sum(sizes.values())
        buffer: Any = (ctypes.c_int64 * (self._rows_size // 8)).from_address(self._host_memory)
        *self._rows, _ = tables_in(np.ctypeslib.as_array(buffer), slots, ROW_WIDTHS)
        self._stamp_arguments: dict[tuple[int, int], Arguments] = {}
        self._reduce_arguments = self._pack_reduce()

    def slot(self, name: str) -> int:
        """The slot of a section; NO_SLOT once all are taken."""
        slot = self._names.get(name)
        if slot is None:
            if len(self._names) == self.slots:
                return NO_SLOT
            slot = self._names[name] = len(self._names)
        return slot

    @property
    def on_the_way(self) -> bool:
        """Whether there is a reduction whose result has not been collected."""
        return self._on_the_way

    @property
    def rows(self) -> tuple[int, int]:
        """Where the last reduction's rows lie in device memory, and how many words: sums, largest and exact."""
        return self._memory["rows"], self._rows_size // 8

    @property
    def bounds(self) -> int:
        """Where reduction.mantissa_bounds() lie in device memory."""
        return self._memory["bounds"]

    @property
    def names(self) -> list[str]:
        """The sections, by slot."""
        return list(self._names)

    def read_until(self, event: int) -> None:
        """Another stream reads the rows until that event: the next reduction waits for it, on the device."""
        self._readers = event

    def skip(self, stream: int) -> None:
        """Enqueues that what was stamped before is not counted, and a result on its way not collected."""
        if self._on_the_way:
            self._driver.wait(stream, self._arrived)  # it must not arrive over a later one
            self._on_the_way = False
        self._driver.copy_on_device(self._memory["tail"], self._memory["head"], 4 * self.slots, stream)

    def stamp(self, close: int, open_: int, stream: int) -> None:
        """Enqueues the end of a span and the beginning of another one, NO_SLOT for none; also into a capture.

        Raises DeviceError where the launch fails.
        """
        arguments = self._stamp_arguments.get((close, open_))
        if arguments is None:
            arguments = self._stamp_arguments[close, open_] = self._pack_stamp(close, open_)
        self._driver.launch(self._stamp, 1, 32, 0, stream, arguments)

    def reduce(self, stream: int) -> bool:
        """Enqueues the reduction of all that was stamped before it on this stream, and the copy of its result.

        False, and nothing is enqueued, while the last result has not been collected, or where the stream is being
        captured: the rings keep on filling. What other streams stamp meanwhile is in this result or in the next one.
        """
        if self._on_the_way or self._driver.is_capturing(stream):
            return False
        if self._readers is not None:
            self._driver.wait(stream, self._readers)
        self._driver.launch(self._reduce, self.slots, REDUCE_THREADS, 8 * self._places, stream, self._reduce_arguments)
        self._driver.copy_to_host(self._host_memory, self._memory["rows"], self._rows_size, stream)
        self._driver.record(self._arrived, stream)
        self._on_the_way = True
        return True

    def collect(self) -> Reduced | None:
        """The result of the last reduction, once; None while there is none, or it has not arrived.

        Asks the device one question. Not while anything is being captured, on any stream.
        """
        if not self._on_the_way or not self._driver.happened(self._arrived):
            return None
        self._on_the_way = False
        return Reduced(*(rows.copy() for rows in self._rows))

    def _free(self) -> None:
        for address in self._memory.values():
            self._driver.free(address)
        if self._host_memory:
            self._driver.free_host(self._host_memory)

    def _pack_stamp(self, close: int, open_: int) -> Arguments:
        addresses = [np.uint64(self._memory[name]) for name in ("opened", "start_ns", "duration_ns", "head")]
        return Arguments([*addresses, np.int32(close), np.int32(open_), np.uint32(self._places - 1)])

    def _pack_reduce(self) -> Arguments:
        inputs = [np.uint64(self._memory[name]) for name in ("start_ns", "duration_ns", "head", "tail", "bounds")]
        before = [0, *itertools.accumulate(8 * self.slots * width for width in ROW_WIDTHS[:-1])]
        rows = [np.uint64(self._memory["rows"] + offset) for offset in before]
        return Arguments([*inputs, *rows, np.uint32(self._places - 1)])
