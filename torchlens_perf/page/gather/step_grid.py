"""Sums of step times by rank and window of steps, from which the page's matrices are made.

Steps arrive in batches and are not kept, so memory depends only on the number of ranks and windows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.analysis.statistics.step_bins import OTHER_WORK

if TYPE_CHECKING:
    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]

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


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """Steps of any ranks, in any order, as columns of equal length. Times are in ns."""

    row: Integers
    """Index of the rank's row in the grid."""
    step: Integers
    start_ns: Integers
    """Time since the start of the run's first step, by the wall clock."""
    duration_ns: Integers
    work_ns: Integers
    parts_ns: Integers
    """Shape [steps, parts]."""
    ready_ns: Integers
    """Time runnable but not scheduled; -1 where it was not measured."""
    memory_bytes: Integers
    flags: Integers


class StepGrid:
    """Sums of step times over windows of `width` steps, a power of two. Row i is the i-th rank."""

    def __init__(
        self, ranks: Sequence[int], warm_from: Integers, first: int, last: int, parts: int
    ) -> None:
        """warm_from: each rank's first step after the warm-up.

        first, last: range of all ranks' steps.
        """
        self._range = ranks, warm_from, first, last, parts
        self.row_of = {rank: row for row, rank in enumerate(ranks)}
        most = max(1, min(MAX_COLUMNS, MAX_CELLS // max(1, len(ranks))))
        self.width = 1
        while last // self.width - first // self.width >= most:
            self.width *= 2
        self.first = first // self.width * self.width
        columns = last // self.width - first // self.width + 1
        self.warm_from = warm_from
        shape = (len(ranks), columns)
        self.steps = np.zeros(shape, np.int32)
        self.compared = np.zeros(shape, np.int32)
        self.step_ns, self.work_ns = np.zeros(shape), np.zeros(shape)
        self.parts_ns = np.zeros((parts, *shape))
        self.ready_ns, self.ready_of_ns = np.zeros(shape), np.zeros(shape)
        self.memory_bytes = np.full(shape, -1, np.int64)
        self.start_ns = np.full(shape, np.inf)
        self.flags = np.zeros(columns, np.int64)
        self.longest_ns = np.full(columns, np.nan)
        self._counts = np.zeros((columns, _BINS), np.int32)
        self.first_single = max(first, last - _MAX_SINGLE_STEPS + 1)
        self.single_ns = np.zeros(last - self.first_single + 1)
        """Each step's duration on its slowest rank, from step `first_single` on; 0 if the step is
        missing.
        """
        self.single_flags = np.zeros(len(self.single_ns), np.int64)
        self.device: StepGrid | None = None
        """Steps by the devices' clocks, of the ranks that are judged by these; None if no rank is.
        """

    def empty_copy(self) -> StepGrid:
        """Return an empty grid for the same ranks and steps, with the original window width."""
        return StepGrid(*self._range)

    @property
    def first_steps(self) -> Integers:
        """The first step of each column."""
        return self.first + np.arange(len(self.flags)) * self.width

    def add(self, batch: StepBatch) -> None:
        """Add steps. Steps outside the grid's range are ignored."""
        _, _, first, last, _ = self._range
        inside = (batch.step >= first) & (batch.step <= last)
        if not inside.all():
            batch = StepBatch(
                **{
                    field.name: getattr(batch, field.name)[inside]
                    for field in dataclasses.fields(StepBatch)
                }
            )
        column = (batch.step - self.first) // self.width
        at = (batch.row, column)
        np.add.at(self.steps, at, 1)
        np.add.at(self.step_ns, at, batch.duration_ns)
        for part in range(len(self.parts_ns)):
            np.add.at(self.parts_ns[part], at, batch.parts_ns[:, part])
        measured = batch.ready_ns >= 0
        np.add.at(self.ready_ns, (batch.row[measured], column[measured]), batch.ready_ns[measured])
        np.add.at(
            self.ready_of_ns, (batch.row[measured], column[measured]), batch.duration_ns[measured]
        )
        np.maximum.at(self.memory_bytes, at, batch.memory_bytes)
        np.minimum.at(self.start_ns, at, batch.start_ns)
        compared = ((batch.flags & OTHER_WORK) == 0) & (batch.step >= self.warm_from[batch.row])
        at = (batch.row[compared], column[compared])
        np.add.at(self.compared, at, 1)
        np.add.at(self.work_ns, at, batch.work_ns[compared])
        np.bitwise_or.at(self.flags, column, batch.flags)
        np.fmax.at(self.longest_ns, column, batch.duration_ns)
        single = batch.step >= self.first_single
        at_step = batch.step[single] - self.first_single
        np.maximum.at(self.single_ns, at_step, batch.duration_ns[single])
        np.bitwise_or.at(self.single_flags, at_step, batch.flags[single])
        bins = np.log(np.maximum(batch.duration_ns, _SMALLEST_NS) / _SMALLEST_NS) / _BIN_WIDTH
        np.add.at(self._counts, (column, np.minimum(bins.astype(np.int64), _BINS - 1)), 1)

    def quantile_s(self, share: float) -> Floats:
        """Return a quantile of each column's step durations, to within 0.5 %; NaN without steps."""
        reached = self._counts.cumsum(axis=1)
        total = reached[:, -1]
        found = (reached >= np.maximum(1, np.ceil(share * total))[:, None]).argmax(axis=1)
        seconds = _SMALLEST_NS * np.exp((found + 0.5) * _BIN_WIDTH) / 1e9
        return np.where(
            total > 0, np.minimum(seconds, np.nan_to_num(self.longest_ns, nan=np.inf) / 1e9), np.nan
        )

    def contention_share(self, row: int) -> Floats:
        """Return the share of CPU contention in a rank's time, by column; NaN if not measured."""
        of_ns = self.ready_of_ns[row]
        share: Floats = np.divide(
            self.ready_ns[row], of_ns, out=np.full(len(of_ns), np.nan), where=of_ns > 0
        )
        return share

    def widened(self) -> StepGrid:
        """Return a copy of the grid with windows twice as wide."""
        wider = StepGrid.__new__(StepGrid)
        wider.width = 2 * self.width
        wider.first = self.first // wider.width * wider.width
        before = (self.first - wider.first) // self.width
        after = (len(self.flags) + before) % 2
        for name in ("_range", "row_of", "warm_from", "first_single", "single_ns", "single_flags"):
            setattr(wider, name, getattr(self, name))

        def combine_pairs(values: npt.NDArray[Any], empty: float, axis: int) -> npt.NDArray[Any]:
            padding = [(0, 0)] * values.ndim
            padding[axis] = (before, after)
            padded = np.pad(values, padding, constant_values=empty)
            return padded.reshape(*values.shape[:axis], -1, 2, *values.shape[axis + 1 :])

        for name in ("steps", "compared", "step_ns", "work_ns", "ready_ns", "ready_of_ns"):
            setattr(wider, name, combine_pairs(getattr(self, name), 0, 1).sum(axis=2))
        wider.parts_ns = combine_pairs(self.parts_ns, 0, 2).sum(axis=3)
        wider.memory_bytes = combine_pairs(self.memory_bytes, -1, 1).max(axis=2)
        wider.start_ns = combine_pairs(self.start_ns, np.inf, 1).min(axis=2)
        wider.flags = np.bitwise_or.reduce(combine_pairs(self.flags, 0, 0), axis=1)
        wider.longest_ns = np.fmax.reduce(combine_pairs(self.longest_ns, np.nan, 0), axis=1)
        wider._counts = combine_pairs(self._counts, 0, 0).sum(axis=1)
        wider.device = None if self.device is None else self.device.widened()
        return wider
