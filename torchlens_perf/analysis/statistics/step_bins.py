"""Average steps in rows of one or several steps, the input of the straggler detector. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from torchlens_perf.run.records import OWN_COLUMNS, PARTS, StepTable
from torchlens_perf.run.ring import Flag

MIN_ROW_NS = 20_000_000
WIDEST_ROW = 1024
# Number of steps after which the width of the rows is chosen.
_WIDTH_AFTER = 8
_WAIT = PARTS.index("communication")
# Flags of steps that are not compared, because they do other work than training. If one rank has
# such a step, the step is excluded on all ranks.
OTHER_WORK = int(
    Flag.EVALUATION
    | Flag.SKIPPED
    | Flag.SAMPLED
    | Flag.CHECKPOINT
    | Flag.COMPILED
    | Flag.CAPTURED
    | Flag.STOPPED
)


@dataclasses.dataclass(frozen=True)
class BinBatch:
    """Consecutive steps of ranks, averaged in rows: arrays [ranks, rows].

    A row is the mean over `width` steps. Steps with OTHER_WORK are left out.
    """

    width: int
    ranks: npt.NDArray[np.int64]
    key: npt.NDArray[np.int64]
    """Row numbers: first step / width; -1 for a missing row."""
    flags: npt.NDArray[np.int64]
    """Flags of all steps in the row."""
    duration_ns: npt.NDArray[np.floating[Any]]
    wait_ns: npt.NDArray[np.floating[Any]]
    ready_ns: npt.NDArray[np.floating[Any]]
    """Time in which the thread was runnable but not scheduled. It is NaN if it was not measured,
    and `parts_ns` then includes this time.
    """
    workload: npt.NDArray[np.floating[Any]]
    """Tokens, or other units that the job counts; NaN if not counted."""
    parts_ns: npt.NDArray[np.floating[Any]]
    """[ranks, rows, len(OWN_PARTS)]: own time, without time runnable but not scheduled."""
    issue_ns: npt.NDArray[np.floating[Any]]
    """Shape of `parts_ns`: the host's issue time; 0 if the rank is judged by its host."""
    issue_ready_ns: npt.NDArray[np.floating[Any]]
    """`ready_ns` of the host of a rank judged by its device. This time may not delay the device."""
    lag_ns: npt.NDArray[np.floating[Any]]
    """Shape of `parts_ns`: the device's lag at the start of a part; 0 if judged by the host."""

    def __len__(self) -> int:
        """Return the number of rows of each rank."""
        return self.key.shape[1]

    def select_steps(self, low: int, high: int) -> BinBatch:
        """Return the batch with only those rows whose first step is in range(low, high)."""
        steps = self.key * self.width
        inside = (self.key >= 0) & (steps >= low) & (steps < high)
        return dataclasses.replace(self, key=np.where(inside, self.key, -1))

    def select_rows(self, chosen: slice) -> BinBatch:
        """Return the batch with only these rows of each rank."""
        values = {name: value[:, chosen] for name, value in vars(self).items() if name in _BY_ROW}
        return dataclasses.replace(self, **values)


_BY_ROW = frozenset(each.name for each in dataclasses.fields(BinBatch)) - {"width", "ranks"}


class StepBinner:
    """Builds rows from one rank's steps as they arrive."""

    def __init__(self, width: int = 0, min_row_ns: float = MIN_ROW_NS, rank: int = 0) -> None:
        """Set the width of rows.

        width: number of steps in a row, a power of two. If `width` is 0, the width is chosen from
        the first steps' durations. A row then covers at least `min_row_ns` of time.
        """
        self.width = width
        self._min_row_ns, self._rank = min_row_ns, rank
        self._tables: list[StepTable] = []

    def add_steps(self, table: StepTable) -> BinBatch | None:
        """Add finished steps, in order. Return the rows that these steps complete, if any."""
        if len(table):
            self._tables.append(table)
        count = sum(len(each) for each in self._tables)
        if not self.width:
            if count < _WIDTH_AFTER:
                return None
            durations = np.concatenate([each.duration_ns for each in self._tables])
            # A replay adds more steps at once, but must choose the width from the same first steps.
            self.width = choose_row_width(
                float(np.median(durations[2:_WIDTH_AFTER])), self._min_row_ns
            )
        if not count:
            return None
        steps = np.concatenate([each.step for each in self._tables])
        complete = steps // self.width < (int(steps[-1]) + 1) // self.width
        if not complete.any():
            return None
        merged = concatenate_tables(self._tables)
        self._tables = [merged.select_rows(~complete)] if not complete.all() else []
        return _average_rows(self._rank, merged.select_rows(complete), self.width)

    def pop_incomplete_row(self) -> BinBatch | None:
        """Return the last, incomplete row at the end of a run."""
        if not self._tables:
            return None
        merged = concatenate_tables(self._tables)
        self._tables = []
        return _average_rows(
            self._rank,
            merged,
            self.width or choose_row_width(float(np.median(merged.duration_ns)), self._min_row_ns),
        )


def choose_row_width(step_ns: float, min_row_ns: float = MIN_ROW_NS) -> int:
    """Return the number of steps in a row, a power of two, for steps of this duration."""
    width = 1
    while width < WIDEST_ROW and width * step_ns < min_row_ns:
        width *= 2
    return width


def concatenate_tables(tables: list[StepTable]) -> StepTable:
    """Concatenate at least one table."""
    fields = [field.name for field in dataclasses.fields(StepTable)]
    return StepTable(
        **{name: np.concatenate([getattr(table, name) for table in tables]) for name in fields}
    )


def _average_rows(rank: int, table: StepTable, width: int) -> BinBatch:
    keys = table.step // width * width
    if width > 1:
        # A single step with OTHER_WORK, such as one sampled step in 16, must not exclude its whole
        # row.
        kept = (table.flags & OTHER_WORK) == 0
        kept |= ~np.isin(keys, keys[kept])
        table, keys = table.select_rows(kept), keys[kept]
    steps, starts = np.unique(keys, return_index=True)
    counts = np.diff([*starts, len(keys)])
    measured = table.ready_ns[:, 0] >= 0
    work = table.work_by_part_ns.astype(np.float64)

    def mean(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        sums = np.add.reduceat(values, starts, axis=0)
        return (sums / (counts if values.ndim == 1 else counts[:, None]))[None]

    return BinBatch(
        width=width,
        ranks=np.array([rank]),
        key=(steps // width)[None],
        duration_ns=mean(table.duration_ns.astype(np.float64)),
        parts_ns=mean(work),
        issue_ns=mean(table.issue_ns[:, OWN_COLUMNS].astype(np.float64)),
        lag_ns=mean(table.lag_ns[:, OWN_COLUMNS].astype(np.float64)),
        wait_ns=mean(table.parts_ns[:, _WAIT].astype(np.float64)),
        ready_ns=mean(np.where(measured, table.own_ns - work.sum(axis=1), np.nan)),
        issue_ready_ns=mean(
            np.where(measured, table.issue_ready_ns[:, OWN_COLUMNS].sum(axis=1), np.nan)
        ),
        workload=mean(np.where(table.workload >= 0, table.workload, np.nan)),
        flags=np.bitwise_or.reduceat(table.flags, starts)[None],
    )
