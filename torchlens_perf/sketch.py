"""Sketches of durations, which merge by addition. Pure.

A sketch is count, sum, sum of squares, minimum, maximum and an OpenTelemetry-compatible exponential histogram:
base-2, scale 5, so 32 buckets an octave, each 2.2 % wide; a quantile is off by at most 1.1 %. Integers throughout, so
merging in any order gives the same bytes.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

SCALE = 5
_PER_OCTAVE = 1 << SCALE
LOWEST_OCTAVE, HIGHEST_OCTAVE = 6, 42  # 64 ns to 73 minutes; values outside count in the first and last bucket
BUCKETS = _PER_OCTAVE * (HIGHEST_OCTAVE - LOWEST_OCTAVE)


@functools.cache
def bucket_bounds() -> npt.NDArray[np.int64]:
    """Upper bounds of the buckets: bucket i holds (bound[i-1], bound[i]].

    The largest integer not above 2**(LOWEST_OCTAVE + (i + 1) / 32), exact: by integer roots, because floating-point
    powers are off by one at some bounds.
    """
    bounds = []
    for i in range(BUCKETS):
        octave, part = divmod(i + 1, _PER_OCTAVE)
        # floor(2**(octave + part/32)) is the integer 32nd root of 2**(32*octave + part).
        power = 1 << (_PER_OCTAVE * (LOWEST_OCTAVE + octave) + part)
        root = round(2.0 ** (LOWEST_OCTAVE + octave + part / _PER_OCTAVE))
        while root**_PER_OCTAVE > power:
            root -= 1
        while (root + 1) ** _PER_OCTAVE <= power:
            root += 1
        bounds.append(root)
    return np.array(bounds, np.int64)


class Sketch:
    """The distribution of durations in ns. Grows by add() and merge(); takes the space of its histogram."""

    __slots__ = ("counts", "largest", "smallest", "sum_ns", "sum_squares")

    def __init__(self) -> None:
        self.counts = np.zeros(BUCKETS, np.int64)
        self.sum_ns = 0
        self.sum_squares = 0
        self.smallest = 0
        self.largest = 0

    @property
    def count(self) -> int:
        """How many values."""
        return int(self.counts.sum())

    def add(self, values_ns: npt.NDArray[np.int64]) -> None:
        """Adds durations; negative ones count as zero."""
        if not len(values_ns):
            return
        values_ns = np.maximum(values_ns, 0)
        empty = not self.counts.any()
        smallest, largest = int(values_ns.min()), int(values_ns.max())
        self.smallest = smallest if empty else min(self.smallest, smallest)
        self.largest = largest if empty else max(self.largest, largest)
        self.sum_ns += int(values_ns.sum())
        self.sum_squares += _sum_of_squares(values_ns)
        buckets = np.minimum(np.searchsorted(bucket_bounds(), values_ns, side="left"), BUCKETS - 1)
        self.counts += np.bincount(buckets, minlength=BUCKETS)

    def merge(self, other: Sketch) -> None:
        """Adds another sketch's values."""
        if not other.counts.any():
            return
        empty = not self.counts.any()
        self.smallest = other.smallest if empty else min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)
        self.sum_ns += other.sum_ns
        self.sum_squares += other.sum_squares
        self.counts = self.counts + other.counts

    def quantile_ns(self, q: float) -> float:
        """The q-quantile, at most 1.1 % off; NaN for an empty sketch."""
        count = self.count
        if not count:
            return math.nan
        wanted = min(count, max(1, math.ceil(q * count)))
        bucket = int(np.searchsorted(np.cumsum(self.counts), wanted))
        upper = float(bucket_bounds()[bucket])
        lower = upper / 2 ** (1 / _PER_OCTAVE)
        return min(max(math.sqrt(lower * upper), self.smallest), self.largest)

    def mean_ns(self) -> float:
        """The mean; NaN for an empty sketch."""
        count = self.count
        return self.sum_ns / count if count else math.nan

    def to_json(self) -> dict[str, Any]:
        """A value for from_json(). Buckets as [first, counts ...]: most are empty."""
        used = np.flatnonzero(self.counts)
        first, last = (int(used[0]), int(used[-1])) if len(used) else (0, -1)
        return {
            "sum_ns": self.sum_ns,
            "sum_squares": self.sum_squares,
            "min_ns": self.smallest,
            "max_ns": self.largest,
            "buckets": [first, *self.counts[first : last + 1].tolist()],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Sketch:
        """The sketch that to_json() wrote."""
        sketch = cls()
        first, *counts = value["buckets"]
        sketch.counts[first : first + len(counts)] = counts
        sketch.sum_ns, sketch.sum_squares = int(value["sum_ns"]), int(value["sum_squares"])
        sketch.smallest, sketch.largest = int(value["min_ns"]), int(value["max_ns"])
        return sketch


def _sum_of_squares(values: npt.NDArray[np.int64]) -> int:
    """Exact: 64-bit squares of durations above 3 s would overflow."""
    high, low = values >> 20, values & 0xFFFFF
    return (int((high * high).sum()) << 40) + (int((high * low).sum()) << 21) + int((low * low).sum())
