"""Statistics that are insensitive to outliers. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

# Ratio of the standard deviation to the median absolute deviation of a normal distribution.
TO_SIGMA = 1.4826


def fast_median(values: npt.NDArray[Any], axis: int) -> npt.NDArray[Any]:
    """Compute np.median() of few values without NaN, several times faster."""
    count = values.shape[axis]
    lower, upper = (count - 1) // 2, count // 2
    parted = np.partition(values, (lower, upper), axis=axis)
    return (parted.take(lower, axis) + parted.take(upper, axis)) / 2


def robust_standard_deviation(values: npt.NDArray[np.floating[Any]]) -> float:
    """Estimate the standard deviation from the median absolute deviation."""
    return TO_SIGMA * float(np.median(np.abs(values - np.median(values))))
