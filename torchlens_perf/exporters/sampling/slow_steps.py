"""Detect steps that are slower than the steps before them. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.records import StepTable

WINDOW, MIN_STEPS = 512, 64
QUANTILE = 0.99
# Smallest excess over the median, for jobs in which all steps take about the same time.
MIN_EXCESS = 0.1


class SlowStepDetector:
    """Detects slow steps from the durations on one rank, which are similar on all ranks."""

    def __init__(self) -> None:
        self._recent_ns: deque[int] = deque(maxlen=WINDOW)

    def find_slow_steps(self, steps: StepTable) -> npt.NDArray[np.bool_]:
        """Add steps, and return a mask of the slow steps.

        A step is slow if its duration is above the 99th percentile of the last 512 steps and 10%
        above their median. No step is slow until MIN_STEPS steps were added.
        """
        above_ns = self._slow_step_limit_ns()
        self._recent_ns.extend(steps.duration_ns.tolist())
        slow: npt.NDArray[np.bool_] = steps.duration_ns > above_ns
        return slow

    def _slow_step_limit_ns(self) -> float:
        if len(self._recent_ns) < MIN_STEPS:
            return float("inf")
        median, high = np.quantile(np.fromiter(self._recent_ns, np.int64), [0.5, QUANTILE])
        return max(float(high), (1 + MIN_EXCESS) * float(median))
