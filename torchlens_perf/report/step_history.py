"""How long steps took over the run: for pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.run_windows import grid

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.analysis.statistics.rank import Windows
    from torchlens_perf.verdicts.words.report import StepHistory


def step_history(windows: Mapping[int, Windows]) -> StepHistory | None:
    """The report's `history`: windows as those of `heat`. None where no step but the warm-up is known."""
    of_ranks = [each for each in windows.values() if _warm(each).any()]
    if not of_ranks:
        return None
    width, first, columns = grid(of_ranks)
    step_s = np.stack([_means_s(each, width, first, columns) for each in of_ranks])
    known = np.isfinite(step_s).any(axis=0)
    step_s = step_s[:, known]
    return {
        "width": width,
        "first_steps": [first + column * width for column in np.flatnonzero(known).tolist()],
        "median_s": np.nanmedian(step_s, axis=0).tolist(),
        "fastest_s": np.nanmin(step_s, axis=0).tolist(),
        "slowest_s": np.nanmax(step_s, axis=0).tolist(),
    }


def _warm(windows: Windows) -> npt.NDArray[np.bool_]:
    """Which rows have no warm-up in them."""
    found: npt.NDArray[np.bool_] = windows.first_step >= (windows.warm_from or 0)
    return found


def _means_s(windows: Windows, width: int, first: int, columns: int) -> npt.NDArray[np.float64]:
    """By column, the mean of the windows' usual steps; NaN where there is none."""
    warm = _warm(windows)
    at = (windows.first_step[warm] - first) // width
    rows, sums_ns = np.bincount(at, minlength=columns), np.bincount(at, windows.duration_ns[warm], columns)
    means: npt.NDArray[np.float64] = np.divide(sums_ns, rows, out=np.full(columns, np.nan), where=rows > 0) / 1e9
    return means
