"""Which steps are slow beside those before them. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.records import StepTable

WINDOW, MIN_STEPS = 512, 64
QUANTILE = 0.99
MIN_EXCESS = 0.1  # of the median: where all steps last equally long, the longest is not slow


class SlowSteps:
    """The steps of one rank, as they come: in synchronous training all ranks' last equally long."""

    def __init__(self) -> None:
        self._recent_ns: deque[int] = deque(maxlen=WINDOW)

    def add(self, steps: StepTable) -> npt.NDArray[np.bool_]:
        """Which of these are slow: beyond the 99th percentile of the last 512 steps before them, and a tenth beyond
        their median. None are until there are 64."""
        above_ns = self._limit_ns()
        self._recent_ns.extend(steps.duration_ns.tolist())
        slow: npt.NDArray[np.bool_] = steps.duration_ns > above_ns
        return slow

    def _limit_ns(self) -> float:
        if len(self._recent_ns) < MIN_STEPS:
            return float("inf")
        median, high = np.quantile(np.fromiter(self._recent_ns, np.int64), [0.5, QUANTILE])
        return max(float(high), (1 + MIN_EXCESS) * float(median))
