"""Reduce a window of steps on the device to one row for each part of a step.

The host knows the parts of a step a few steps later, as differences of events
(cuda/clock.py). Once per window, the parts are copied to the device (8 KB). The kernel
that reduces the sections' rings also reduces the parts:

::

    steps of a window ─▶ page-locked block ──copy──▶ block in device memory ──reduce_window──▶ rows

All work is enqueued on the stream of the merge. The block is used again once it has been copied. If
the block has not been copied by the next window, the steps become part of the window after that.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchlens_perf.cuda.driver import CudaDriver
from torchlens_perf.cuda.reduction import ROW_WIDTHS, view_tables
from torchlens_perf.cuda.stamps import REDUCE_THREADS, ReusableMemory, pack_reduce_arguments
from torchlens_perf.run.device.step_parts import StepPart

ROWS = len(StepPart)
PLACES = 128  # One place is never read, see reduce_window in kernels.cu.
# Words of the array with the number of steps in each row, 32 bits each. An equal array follows with
# the number of steps read before, which is always 0.
_HEADS = ROWS // 2
BLOCK_WORDS = ROWS * PLACES + 2 * _HEADS
BLOCK_BYTES = 8 * BLOCK_WORDS


class PendingSteps:
    """Queue of steps with known device times that have not been merged.

    Its capacity is one window. The oldest steps are dropped.
    """

    def __init__(self) -> None:
        self.steps: deque[list[int]] = deque()
        self.merged = 0
        """Number of steps that have been removed for a merge."""

    def add_step(self, rows: list[int]) -> None:
        """Add a step. rows: the result of step_parts.compute_part_durations_ns()."""
        if len(self.steps) == PLACES - 1:
            self.steps.popleft()
        self.steps.append(rows)


class StepReduction:
    """Reduces a block of steps to rows on the device. Used on the training thread."""

    def __init__(
        self,
        driver: CudaDriver,
        functions: Mapping[str, int],
        bounds: int,
        host_memory: ReusableMemory,
        memory: tuple[Any, Any],
    ) -> None:
        """bounds: the device address of reduction.mantissa_bounds().

        host_memory: BLOCK_BYTES of page-locked memory.
        memory: device tensors of 64-bit words: one of BLOCK_WORDS, and one for the tables of ROWS
        rows.
        """
        self.host_memory = host_memory
        self._driver, self._reduce = driver, functions["reduce_window"]
        self._block, self._rows = memory
        buffer: Any = (ctypes.c_uint8 * BLOCK_BYTES).from_address(host_memory.host)
        self._host = np.ctypeslib.as_array(buffer)
        words = self._host.view(np.int64)
        self._durations = words[: ROWS * PLACES].reshape(ROWS, PLACES)
        self._heads = words[ROWS * PLACES :].view(np.uint32)
        self.tables = view_tables(self._rows, ROWS, ROW_WIDTHS)[:3]
        """The tables of sums, largest and exact rows on the device."""
        durations = self._block.data_ptr()
        heads = durations + 8 * ROWS * PLACES
        # The starts of steps are not copied. The kernel receives the durations instead, and results
        # computed from starts are not read.
        inputs = [durations, durations, heads, heads + 8 * _HEADS, bounds]
        self._arguments = pack_reduce_arguments(inputs, self._rows.data_ptr(), ROWS, PLACES)

    def enqueue_reduction(self, known: PendingSteps, stream: int) -> bool:
        """Enqueue the reduction of all known steps, and remove the steps. Raises DeviceError.

        Return False if there are no steps, or while the steps of the last window are being copied.
        """
        count = len(known.steps)
        if not count or not self._driver.has_event_passed(self.host_memory.arrived):
            return False
        self._durations[:, :count] = np.array(known.steps, np.int64).T
        self._heads[:ROWS], self._heads[ROWS:] = count, 0
        known.steps.clear()
        known.merged += count
        self._driver.copy_to_device(self._block.data_ptr(), self._host, stream)
        self._driver.record_event(self.host_memory.arrived, stream)
        self._driver.launch_kernel(
            self._reduce, ROWS, REDUCE_THREADS, 8 * PLACES, stream, self._arguments
        )
        return True
