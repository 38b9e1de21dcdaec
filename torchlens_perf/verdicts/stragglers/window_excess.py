"""How much more work each rank had than the others, in windows over the whole run. Pure.

The judge (detector.py) has the newest rows only; this is what a picture of the run, and the history of a verdict, are
made of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.verdicts.stragglers.excess import relative_excess

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.analysis.statistics.run_windows import RunWindows
    from torchlens_perf.verdicts.stragglers.placement import Placement


def window_excess(windows: RunWindows, places: Mapping[int, Placement]) -> npt.NDArray[np.float64]:
    """[ranks, columns]: a rank's work above the median of the other ranks that do the same, as a share of that median.

    NaN where it, or all others, have no work there that can be compared.
    """
    populations: dict[str, list[int]] = defaultdict(list)
    for row, rank in enumerate(windows.ranks):
        populations[places[rank].population if rank in places else ""].append(row)
    excess = np.full(windows.work_ns.shape, np.nan)
    for rows in populations.values():
        excess[rows] = relative_excess(windows.work_ns[rows])
    return excess
