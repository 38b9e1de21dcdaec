"""The device's steps of one window, reduced on the device: a row for each part, beside the sections' rows.

The parts of a step are known on the host, some steps late: they are differences of events (hooks/on_device/clock.py).
Once a window they go to the device, by one copy of 8 KB, and there through the kernel that reduces the sections' rings:

::

    host: steps of a window ─▶ page-locked block ──copy──▶ block in the device's memory ──reduce_window──▶ rows

All of it is enqueued on the stream of the merge. The block is free again when its copy has been made. Where it has not
been by the next window, as the device is far behind, the steps wait for the window after that.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchlens_perf.cuda.driver import Arguments, Driver
from torchlens_perf.cuda.reduction import ROW_WIDTHS, tables_in
from torchlens_perf.cuda.stamps import REDUCE_THREADS, Leftover
from torchlens_perf.run.device.step_parts import Row

ROWS = len(Row)
PLACES = 128  # of which one is never read, see reduce_window
_HEADS = ROWS // 2  # in words: how many steps each row has, in 32 bits; then how many of them were read before: none
BLOCK_WORDS = ROWS * PLACES + 2 * _HEADS
BLOCK_BYTES = 8 * BLOCK_WORDS


class KnownSteps:
    """Steps whose device times are known, until they are merged: the newest that fit into a window's block."""

    def __init__(self) -> None:
        self.steps: deque[list[int]] = deque()
        self.merged = 0
        """That have been taken away for a merge."""

    def add(self, rows: list[int]) -> None:
        """rows: of step_parts.rows_of()."""
        if len(self.steps) == PLACES - 1:
            self.steps.popleft()
        self.steps.append(rows)


class StepReduction:
    """The block, and the rows that are made of it. On the thread that trains."""

    def __init__(
        self,
        driver: Driver,
        functions: Mapping[str, int],
        bounds: int,
        things: Leftover,
        memory: tuple[Any, Any],
    ) -> None:
        """bounds: where reduction.mantissa_bounds() lie on the device. things: BLOCK_BYTES of page-locked memory.

        memory: tensors on the device, of 64-bit words: BLOCK_WORDS, and ROWS times the widths of a window's tables.
        """
        self.things = things
        self._driver, self._reduce = driver, functions["reduce_window"]
        self._block, self._rows = memory
        buffer: Any = (ctypes.c_uint8 * BLOCK_BYTES).from_address(things.host)
        self._host = np.ctypeslib.as_array(buffer)
        words = self._host.view(np.int64)
        self._durations = words[: ROWS * PLACES].reshape(ROWS, PLACES)
        self._heads = words[ROWS * PLACES :].view(np.uint32)
        self.tables = tables_in(self._rows, ROWS, ROW_WIDTHS)[:3]
        """Sums, largest and exact, on the device."""
        self._arguments = self._packed(bounds)

    def reduce(self, known: KnownSteps, stream: int) -> bool:
        """Enqueues the reduction of all steps that are known, and takes them away; False where there is none, or the
        last window's are still being copied. Raises DeviceError."""
        count = len(known.steps)
        if not count or not self._driver.happened(self.things.arrived):
            return False
        self._durations[:, :count] = np.array(known.steps, np.int64).T
        self._heads[:ROWS], self._heads[ROWS:] = count, 0
        known.steps.clear()
        known.merged += count
        self._driver.copy_to_device(self._block.data_ptr(), self._host, stream)
        self._driver.record(self.things.arrived, stream)
        self._driver.launch(self._reduce, ROWS, REDUCE_THREADS, 8 * PLACES, stream, self._arguments)
        return True

    def _packed(self, bounds: int) -> Arguments:
        durations, rows = self._block.data_ptr(), self._rows.data_ptr()
        heads = durations + 8 * ROWS * PLACES
        tails = heads + 8 * _HEADS
        # When a step began is not copied: the durations stand in its place, and what is made of it is not read.
        inputs = [durations, durations, heads, tails, bounds]
        before = [0, *itertools.accumulate(8 * ROWS * width for width in ROW_WIDTHS[:-1])]
        addresses = [*inputs, *(rows + offset for offset in before)]
        return Arguments([*(np.uint64(each) for each in addresses), np.uint32(PLACES - 1)])
