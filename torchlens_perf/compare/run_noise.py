"""The uncertainty of a run's typical step from the variation of its own steps.

Neighbouring steps are alike, so single steps are no independent samples. A moving-block bootstrap
(Kuensch 1989) resamples blocks of consecutive steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.analysis.statistics.run_windows import TAG_NAMES
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.records import PARTS
from torchlens_perf.store.reader import ParquetFile, ParquetFolder, UnreadableFileError

Floats = npt.NDArray[np.float64]


_RESAMPLES = 200
_MIN_BLOCK_STEPS = 8
# Longer runs are averaged to this many rows first, which keeps blocks longer than the correlation.
_MAX_ROWS = 4096
_UNUSUAL = int(np.bitwise_or.reduce([int(flag) for flag in TAG_NAMES.values()]))


def read_step_series(run: RunDirectory, unreadable: list[UnreadableFileError]) -> Floats:
    """Return the step and its parts in seconds, as means over the ranks: (steps, 1 + parts).

    The last column is CPU contention. Warm-up, evaluations, checkpoints and other unusual steps are
    left out. unreadable: receives the error of each file that is left out.
    """
    columns = ("step", "duration_ns", *(f"{part}_ns" for part in PARTS), "ready_ns")

    def sums(file: ParquetFile) -> tuple[npt.NDArray[np.int64], Floats]:
        table = file.read_table(("flags", *columns))
        usual = (table.column("flags").to_numpy() & _UNUSUAL) == 0
        values = [table.column(name).to_numpy().astype(float) for name in columns[1:]]
        rows = np.nan_to_num(np.stack(values, axis=1)[usual]) / 1e9
        numbers, places = np.unique(table.column("step").to_numpy()[usual], return_inverse=True)
        added = np.zeros((len(numbers), rows.shape[1] + 1))
        np.add.at(added, places, np.column_stack([rows, np.ones(len(rows))]))
        return numbers, added

    found = list(ParquetFolder(run.steps, unreadable=unreadable.append).read_each(sums))
    if not found:
        return np.zeros((0, len(columns) - 1))
    numbers, places = np.unique(np.concatenate([each for each, _ in found]), return_inverse=True)
    total = np.zeros((len(numbers), len(columns)))
    np.add.at(total, places, np.concatenate([added for _, added in found]))
    means: Floats = total[:, :-1] / total[:, -1:]
    return means[numbers >= WARM_UP_STEPS]


def bootstrap_standard_errors(series: Floats, seed: int = 0) -> Floats:
    """Return the standard error of each column's mean over the middle half of the steps.

    The middle half is by the first column, as for the report's typical step. NaN for fewer than two
    blocks of steps.
    """
    rows = len(series)
    if rows < 2 * _MIN_BLOCK_STEPS:
        return np.full(series.shape[1], np.nan)
    if rows > _MAX_ROWS:
        width = -(-rows // _MAX_ROWS)
        series = series[: rows // width * width].reshape(-1, width, series.shape[1]).mean(axis=1)
        rows = len(series)
    block = max(_MIN_BLOCK_STEPS, round(rows**0.5))
    blocks = -(-rows // block)
    generator = np.random.default_rng(seed)
    means = np.empty((_RESAMPLES, series.shape[1]))
    for at in range(_RESAMPLES):
        starts = generator.integers(0, rows - block + 1, blocks)
        chosen = (starts[:, None] + np.arange(block)).ravel()[:rows]
        means[at] = mean_of_middle_half(series[chosen])
    return means.std(axis=0, ddof=1)


def mean_of_middle_half(series: Floats) -> Floats:
    """Return the mean of the middle half of the rows, ordered by the first column."""
    order = np.argsort(series[:, 0], kind="stable")
    quarter = len(series) // 4
    return series[order[quarter : len(series) - quarter]].mean(axis=0)
