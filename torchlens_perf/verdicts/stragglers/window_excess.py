"""Relative excess of each rank in windows over the whole run, for the heat map and the periods of
verdicts. Pure.

The straggler detector (detector.py) keeps only the newest rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.run_windows import RunWindows
from torchlens_perf.run.grouping import group_values
from torchlens_perf.verdicts.stragglers.excess import relative_excess
from torchlens_perf.verdicts.stragglers.placement import Placement


def compute_window_excess(
    windows: RunWindows, places: Mapping[int, Placement]
) -> npt.NDArray[np.float64]:
    """Return each rank's excess as a share of the median work of the other ranks: [ranks, windows].

    The excess is NaN in windows in which the rank cannot be compared with another rank.
    """
    excess = np.full(windows.work_ns.shape, np.nan)
    for rows in group_rows_by_population(windows.ranks, places).values():
        excess[rows] = relative_excess(windows.work_ns[rows])
    return excess


def group_rows_by_population(
    ranks: Sequence[int], places: Mapping[int, Placement]
) -> dict[str, list[int]]:
    """Return the rows of each population. ranks: rank of each row. "" is of ranks without a place."""
    return group_values(
        (places[rank].population if rank in places else "", row) for row, rank in enumerate(ranks)
    )
