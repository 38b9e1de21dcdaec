"""Put the windows of all ranks on one grid of steps, to compare ranks. Pure.

Ranks may have windows of different widths. A column of the grid covers whole windows of every rank.
The grid has at most MAX_COLUMNS columns, however long the run is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.rank import Windows, expand_lack_ns
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Flag
from torchlens_perf.run.verdicts import range_end

MAX_COLUMNS = 64
TAG_NAMES = {
    "checkpoint": Flag.CHECKPOINT, "evaluation": Flag.EVALUATION, "compile": Flag.COMPILED, "capture": Flag.CAPTURED,
    "stopped": Flag.STOPPED,
}  # fmt: skip
"""Names of the flags in RunWindows.tags."""

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class RunWindows:
    """Windows of all ranks. Column i covers steps [first_steps[i], first_steps[i] + width).

    A value is NaN if the rank has no window in the column.
    """

    ranks: tuple[int, ...]
    """Ranks of the rows, sorted."""
    width: int
    first_steps: npt.NDArray[np.int64]
    work_ns: Floats
    """Shape [ranks, columns]: mean of a step's work, see Windows.work_sum_ns."""
    parts_ns: Floats
    """Shape [ranks, columns, parts]: mean over the column's windows of Windows.parts_ns."""
    lack_ns: Floats
    """Shape [ranks, columns, parts]: time runnable but not scheduled; NaN if not measured."""
    duration_ns: Floats
    """Shape [ranks, columns]: mean over the column's windows of Windows.duration_ns."""
    tags: tuple[int, ...]
    """For each column, flags of rank.TAGS of all ranks' steps."""

    last_step: int
    """The newest step of all ranks."""

    def __len__(self) -> int:
        return len(self.first_steps)

    def columns_between(self, since: int, until: int | None) -> npt.NDArray[np.bool_]:
        """Return for each column whether its middle is in [since, until), or after `since` if
        `until` is None.

        The last column's middle is computed from its finished steps only.
        """
        ends = np.minimum(self.first_steps + self.width, self.last_step + 1)
        middle = (self.first_steps + ends) / 2
        return (middle >= since) & (middle < range_end(until))


def align_windows(windows: Mapping[int, Windows], last_step: int) -> RunWindows | None:
    """Put the windows of all ranks on one grid. Return None if there are no windows.

    last_step: the newest step of all ranks.
    """
    ranks = tuple(rank for rank in sorted(windows) if len(windows[rank].first_step))
    if not ranks:
        return None
    each = [windows[rank] for rank in ranks]
    width, first, columns = choose_grid(each)
    return RunWindows(
        ranks=ranks,
        width=width,
        first_steps=first + width * np.arange(columns),
        work_ns=np.stack([_mean_work_by_column(of, width, first, columns) for of in each]),
        parts_ns=np.stack(
            [_means_by_column(of.parts_ns, of, width, first, columns) for of in each]
        ),
        lack_ns=np.stack([_mean_lack_by_column(of, width, first, columns) for of in each]),
        duration_ns=np.stack(
            [
                _means_by_column(of.duration_ns[:, None], of, width, first, columns)[:, 0]
                for of in each
            ]
        ),
        tags=_tags_by_column(each, width, first, columns),
        last_step=last_step,
    )


def choose_grid(windows: list[Windows]) -> tuple[int, int, int]:
    """Choose the grid's columns: return their width, first step and number.

    Each window of any rank lies completely in one column.
    """
    width = max(each.width for each in windows)
    low = min(int(each.first_step[0]) for each in windows)
    high = max(int(each.first_step[-1]) + each.width for each in windows)
    while (high - 1) // width - low // width >= MAX_COLUMNS:
        width *= 2
    return width, low // width * width, (high - 1) // width - low // width + 1


def _mean_work_by_column(windows: Windows, width: int, first: int, columns: int) -> Floats:
    at = (windows.first_step - first) // width
    steps = np.bincount(at, windows.work_steps, columns)
    sums = np.bincount(at, windows.work_sum_ns, columns)
    return np.divide(sums, steps, out=np.full(columns, np.nan), where=steps > 0)


def _means_by_column(
    values: Floats, windows: Windows, width: int, first: int, columns: int
) -> Floats:
    """Return means over each column's windows, shape [columns, values]; NaN without a window."""
    return column_means(values, (windows.first_step - first) // width, columns)


def column_means(values: Floats, at: npt.NDArray[np.int64], columns: int) -> Floats:
    """Return the mean of all rows of `values` with the same index in `at`; NaN without rows."""
    count = np.bincount(at, minlength=columns)[:, None]
    sums = np.zeros((columns, values.shape[1]))
    np.add.at(sums, at, values)
    return np.divide(sums, count, out=np.full(sums.shape, np.nan), where=count > 0)


def _mean_lack_by_column(windows: Windows, width: int, first: int, columns: int) -> Floats:
    measured = [
        (step, parts)
        for step, lack in windows.lack_ns.items()
        if (parts := expand_lack_ns(lack)) is not None
    ]
    at = (np.array([step for step, _ in measured], np.int64) - first) // width
    return column_means(
        np.array([parts for _, parts in measured]).reshape(-1, len(PARTS)), at, columns
    )


def _tags_by_column(
    windows: list[Windows], width: int, first: int, columns: int
) -> tuple[int, ...]:
    flags = [0] * columns
    for each in windows:
        for step, found in each.tags.items():
            column = (step - first) // width
            if 0 <= column < columns:
                flags[column] |= found
    return tuple(flags)
