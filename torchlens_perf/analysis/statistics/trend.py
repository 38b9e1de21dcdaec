"""The gradual change of a series, told apart from sudden changes and from noise. Pure.

The model is a level, changes of this level, and noise in which neighbouring values may resemble
each other: an autoregressive process. Changes are added one by one, the most likely one first, while
the likelihood rises by more than noise alone would raise it. A change is sudden, or it is a slope
over the whole series, up to a value, or from a value on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MIN_VALUES = 12
"""A trend of fewer values cannot be told from their noise."""
_MIN_CHANGE = 0.02
"""Smaller changes are not reported."""
_MIN_GAIN = 20.0
"""Smallest decrease of the deviance by a change. It was chosen in simulations of stationary noise,
where the best of all changes exceeds it in less than 5 % of the series."""
_MAX_CHANGES = 6
_CORRELATIONS = np.linspace(0.0, 0.95, 11)
_MIN_STEP_VALUES, _MIN_SLOPE_VALUES = 2, 4


class _Change(NamedTuple):
    """A change of the level. It happens in the values [begin, end]."""

    begin: int
    end: int

    def shape(self, count: int) -> Floats:
        """Return the share of the change that has happened at each of `count` values."""
        return np.clip((np.arange(count) - self.begin) / (self.end - self.begin), 0.0, 1.0)


def find_gradual_change(values: Floats) -> float:
    """Return the gradual change of the level of a series of logarithms, relative to its start.

    A slope that ends before the last third of the series is a warm-up and not a trend. Return 0.0
    if the level only jumps or wanders, or if the series is too short.
    """
    if len(values) < MIN_VALUES:
        return 0.0
    changes = find_changes(values)
    sizes = np.linalg.lstsq(_design(changes, len(values)), values, rcond=None)[0][1:]
    slopes = [each.end - each.begin > 1 and 3 * each.end >= 2 * len(values) for each in changes]
    change = float(np.expm1(sizes[slopes].sum()))
    return change if abs(change) >= _MIN_CHANGE else 0.0


def find_changes(values: Floats) -> list[_Change]:
    """Return the changes of the level of a series, the most likely one first."""
    count = len(values)
    candidates = [
        *(_Change(at - 1, at) for at in range(_MIN_STEP_VALUES, count - 1)),
        *(_Change(0, end) for end in (*range(_MIN_SLOPE_VALUES, count - 4), count - 1)),
        *(_Change(begin, count - 1) for begin in range(_MIN_SLOPE_VALUES, count - 4)),
    ]
    shapes = np.stack([each.shape(count) for each in candidates], axis=1)
    found: list[_Change] = []
    deviance = _deviances(values, _design([], count), np.zeros((count, 1)))[0]
    while len(found) < _MAX_CHANGES:
        each = _deviances(values, _design(found, count), shapes)
        best = int(np.argmin(each))
        if deviance - each[best] < _MIN_GAIN:
            break
        found.append(candidates[best])
        deviance = each[best]
        # Later changes may explain what an earlier one seemed to be.
        for change in found[:-1]:
            others = [other for other in found if other is not change]
            without = _deviances(values, _design(others, count), np.zeros((count, 1)))[0]
            if without - deviance < _MIN_GAIN:
                found, deviance = others, without
    return found


def _design(changes: Sequence[_Change], count: int) -> Floats:
    return np.stack([np.ones(count), *(each.shape(count) for each in changes)], axis=1)


def _deviances(values: Floats, design: Floats, candidates: Floats) -> Floats:
    """Return the deviance of the series with each candidate added to the design.

    values: [values]. design: [values, changes]. candidates: [values, candidates].
    """
    count, found = len(values), np.full(candidates.shape[1], np.inf)
    for correlation in _CORRELATIONS:
        all_columns = np.column_stack([values, design, candidates])
        white = np.concatenate(
            [
                np.sqrt(1 - correlation**2) * all_columns[:1],
                all_columns[1:] - correlation * all_columns[:-1],
            ]
        )
        basis = np.linalg.qr(white[:, 1 : 1 + design.shape[1]])[0]
        white -= basis @ (basis.T @ white)
        left, added = white[:, 0], white[:, 1 + design.shape[1] :]
        size = np.square(added).sum(axis=0)
        fits = np.square(added.T @ left) / np.maximum(size, 1e-9) * (size > 1e-6)
        errors = np.maximum(left @ left - fits, 1e-12 * count)
        found = np.minimum(found, count * np.log(errors) - np.log(1 - correlation**2))
    return found
