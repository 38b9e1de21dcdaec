"""How much more work each rank had than the others, in windows over the whole run. Pure.

The judge (detector.py) has the newest rows only; this is what a picture of the run, and the history of a verdict, are
made of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.stragglers.excess import excess_over_others

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.analysis.statistics.run_windows import RunWindows
    from torchlens_perf.analysis.stragglers.placement import Placement


def window_excess(windows: RunWindows, places: Mapping[int, Placement]) -> npt.NDArray[np.float64]:
    """[ranks, columns]: a rank's work above the median of the other ranks that do the same, as a share of that median.

    NaN where it, or all others, have no work there that can be compared.
    """
    populations: dict[str, list[int]] = defaultdict(list)
    for row, rank in enumerate(windows.ranks):
        populations[places[rank].population if rank in places else ""].append(row)
    excess = np.full(windows.work_ns.shape, np.nan)
    for rows in populations.values():
        excess[rows] = _of_population(windows.work_ns[rows])
    return excess


def _of_population(work_ns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[ranks, columns] of ranks that do the same; NaN where there is no other rank."""
    relative = np.full(work_ns.shape, np.nan)
    for column, values in enumerate(work_ns.T):
        present = np.flatnonzero(np.isfinite(values))
        if len(present) > 1:
            above = excess_over_others(values[present, None])[:, 0]
            others = values[present] - above
            known = others > 0
            relative[present[known], column] = above[known] / others[known]
    return relative
