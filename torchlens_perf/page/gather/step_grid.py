"""Sums of step times by rank and window of steps, from which the page's matrices are made.

Steps arrive in batches and are not kept, so memory depends only on the number of ranks and windows.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.step_bins import OTHER_WORK
from torchlens_perf.run.records import PARTS
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE, HOST

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Steps = Mapping[str, Integers]
"""Steps of any ranks, in any order, as columns of equal length with the names in step files.

`row` is the index of the rank's row in the grid, `start_ns` the time since the start of the
run's first step, and `ready_ns` is -1 where it was not measured.
"""


MAX_COLUMNS = 4096
# A cell is a rank in a column.
MAX_CELLS = 1_500_000
QUANTILES = {"p5_s": 0.05, "p50_s": 0.5, "p95_s": 0.95}
# Quantiles are computed from a histogram of logarithmic durations with bins of this width.
_BIN_WIDTH = 0.01
_SMALLEST_NS = 1e3
# The bins cover durations up to 1e16 ns.
_BINS = 3000
# For the newest steps, the grid also keeps each step's duration on its slowest rank.
_MAX_SINGLE_STEPS = 1 << 22


class StepGrid:
    """Sums of step times over windows of `width` steps, a power of two. Row i is the i-th rank.

    The last axis of each array is the column, except for the arrays of single steps.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        warm_from: Integers,
        first: int,
        last: int,
        by_device: Collection[int] = (),
    ) -> None:
        """warm_from: each rank's first step after the warm-up.

        first, last: range of all ranks' steps. by_device: ranks that are judged by their devices'
        clocks.
        """
        self._first, self._last = first, last
        self.row_of = {rank: row for row, rank in enumerate(ranks)}
        self._is_by_device = np.isin(ranks, list(by_device))
        self.warm_from = warm_from
        most = max(1, min(MAX_COLUMNS, MAX_CELLS // max(1, len(ranks))))
        self.width = 1
        while last // self.width - first // self.width >= most:
            self.width *= 2
        self.first = first // self.width * self.width
        columns = last // self.width - first // self.width + 1
        self._sums: dict[str, Floats] = {}
        self.memory_bytes = np.full((len(ranks), columns), -1, np.int64)
        self.start_ns = np.full((len(ranks), columns), np.inf)
        self.flags = np.zeros(columns, np.int64)
        self.longest_ns = np.full(columns, np.nan)
        self._counts = np.zeros((_BINS, columns), np.int32)
        self.first_single = max(first, last - _MAX_SINGLE_STEPS + 1)
        self.single_ns = np.zeros(last - self.first_single + 1)
        """Each step's duration on its slowest rank, from step `first_single` on; 0 if the step is
        missing.
        """
        self.single_flags = np.zeros(len(self.single_ns), np.int64)

    @property
    def first_steps(self) -> Integers:
        """The first step of each column."""
        return self.first + np.arange(len(self.flags)) * self.width

    def sum_of(self, quantity: str) -> Floats:
        """Return the sums of a quantity by rank and column. The quantities are:

        - "host steps", "device steps": the number of steps by this clock.
        - "host forward", "device forward" and so on: the time of each part by this clock.
        - "step_ns": the time of steps by the hosts' clocks.
        - "compared", "work_ns": number and work of comparable steps, by the clock that judges the
          rank.
        - "ready_ns", "ready_of_ns": CPU contention, and the time of the steps that measured it.
        """
        return self._sums.get(quantity, np.zeros(self.start_ns.shape))

    def add(self, steps: Steps, clock: str = HOST) -> None:
        """Add steps. Steps outside the grid's range are ignored.

        Steps by the devices' clocks have the columns row, step, work_ns, flags and those of parts.
        """
        inside = (steps["step"] >= self._first) & (steps["step"] <= self._last)
        steps = {name: values[inside] for name, values in steps.items()}
        row, step = steps["row"], steps["step"]
        column = (step - self.first) // self.width
        is_compared = ((steps["flags"] & OTHER_WORK) == 0) & (step >= self.warm_from[row])
        is_compared &= self._is_by_device[row] == (clock == DEVICE)
        sums = {f"{clock} {part}": steps[f"{part}_ns"] for part in PARTS}
        sums[f"{clock} steps"] = np.ones(len(step), np.int64)
        sums["compared"] = is_compared.astype(np.int64)
        sums["work_ns"] = steps["work_ns"] * is_compared
        if clock == HOST:
            is_measured = steps["ready_ns"] >= 0
            sums["step_ns"] = steps["duration_ns"]
            sums["ready_ns"] = steps["ready_ns"] * is_measured
            sums["ready_of_ns"] = steps["duration_ns"] * is_measured
            self._add_extremes(steps, column)
        cell = row * len(self.flags) + column
        for quantity, values in sums.items():
            if values.any():
                if quantity not in self._sums:
                    self._sums[quantity] = np.zeros(self.start_ns.shape)
                np.add.at(self._sums[quantity].reshape(-1), cell, values.astype(np.float64))

    def _add_extremes(self, steps: Steps, column: Integers) -> None:
        step, duration_ns, at = steps["step"], steps["duration_ns"], (steps["row"], column)
        np.maximum.at(self.memory_bytes, at, steps["memory_bytes"])
        np.minimum.at(self.start_ns, at, steps["start_ns"])
        np.bitwise_or.at(self.flags, column, steps["flags"])
        np.fmax.at(self.longest_ns, column, duration_ns)
        bins = np.log(np.maximum(duration_ns, _SMALLEST_NS) / _SMALLEST_NS) / _BIN_WIDTH
        np.add.at(self._counts, (np.minimum(bins.astype(np.int64), _BINS - 1), column), 1)
        newest = step >= self.first_single
        at_step = step[newest] - self.first_single
        np.maximum.at(self.single_ns, at_step, duration_ns[newest])
        np.bitwise_or.at(self.single_flags, at_step, steps["flags"][newest])

    def quantile_s(self, share: float) -> Floats:
        """Return a quantile of each column's step durations, to within 0.5 %; NaN without steps."""
        reached = self._counts.cumsum(axis=0)
        total = reached[-1]
        found = (reached >= np.maximum(1, np.ceil(share * total))).argmax(axis=0)
        seconds = _SMALLEST_NS * np.exp((found + 0.5) * _BIN_WIDTH) / 1e9
        return np.where(
            total > 0, np.minimum(seconds, np.nan_to_num(self.longest_ns, nan=np.inf) / 1e9), np.nan
        )

    def mean(self, quantity: str, count: str) -> Floats:
        """Return the mean of a quantity by rank and column; NaN where the count is 0."""
        counts = self.sum_of(count)
        means = np.full(counts.shape, np.nan)
        np.divide(self.sum_of(quantity), counts, out=means, where=counts > 0)
        return means

    def mean_parts_s(self, clock: str) -> dict[str, Floats]:
        """Return the mean seconds of each part that occurs, by rank and column."""
        return {
            part: self.mean(f"{clock} {part}", f"{clock} steps") / 1e9
            for part in PARTS
            if f"{clock} {part}" in self._sums
        }

    def widened(self) -> StepGrid:
        """Return a copy of the grid with windows twice as wide."""
        wider = copy.copy(self)
        wider.width = 2 * self.width
        wider.first = self.first // wider.width * wider.width
        before = (self.first - wider.first) // self.width
        after = (len(self.flags) + before) % 2

        def merge(
            values: npt.NDArray[Any], function: np.ufunc = np.add, empty: float = 0
        ) -> npt.NDArray[Any]:
            padding = [(0, 0)] * (values.ndim - 1) + [(before, after)]
            padded = np.pad(values, padding, constant_values=empty)
            return function(padded[..., ::2], padded[..., 1::2])

        wider._sums = {quantity: merge(sums) for quantity, sums in self._sums.items()}
        wider.memory_bytes = merge(self.memory_bytes, np.maximum, -1)
        wider.start_ns = merge(self.start_ns, np.minimum, np.inf)
        wider.flags = merge(self.flags, np.bitwise_or)
        wider.longest_ns = merge(self.longest_ns, np.fmax, np.nan)
        wider._counts = merge(self._counts)
        return wider
