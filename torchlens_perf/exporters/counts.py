"""How many values lie in which bucket: what a series of a histogram holds, and what nodes add up. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

NO_SCALE = -20  # of histograms with bounds
SCALE = 5  # 2**5 buckets an octave: a value is off by at most 1.1 %
MAX_BUCKETS = 160  # of a point, as the SDK's default is; more are merged in pairs


@dataclasses.dataclass
class Counts:
    """How values are distributed. Bucket numbers are the exponential histogram's, or of the bounds."""

    scale: int = SCALE
    """2**scale buckets an octave; NO_SCALE: buckets are those of the bounds."""
    zeros: int = 0
    total: float = 0.0
    smallest: float = float("inf")
    largest: float = float("-inf")
    buckets: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.zeros + sum(self.buckets.values())

    def add(self, values: npt.NDArray[np.float64], buckets: npt.NDArray[np.int64], zeros: int) -> None:
        """buckets: of the values, as many as an octave has with SCALE, or of the bounds."""
        if self.scale not in (SCALE, NO_SCALE):
            buckets = buckets >> (SCALE - self.scale)
        for bucket, count in zip(*(each.tolist() for each in np.unique(buckets, return_counts=True)), strict=True):
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count
        self.zeros += zeros
        self.total += float(values.sum())
        self.smallest = min(self.smallest, float(values.min()))
        self.largest = max(self.largest, float(values.max()))

    def merge(self, other: Counts) -> None:
        """Adds another's, with as many buckets an octave as the one that has fewer. Both have a scale, or none."""
        if other.scale > self.scale:
            other = other.lowered(self.scale)
        elif other.scale < self.scale:
            self.buckets, self.scale = self.lowered(other.scale).buckets, other.scale
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count
        self.zeros += other.zeros
        self.total += other.total
        self.smallest, self.largest = min(self.smallest, other.smallest), max(self.largest, other.largest)

    def lowered(self, scale: int) -> Counts:
        """The same with fewer buckets an octave."""
        merged: dict[int, int] = {}
        for bucket, count in self.buckets.items():
            merged[bucket >> (self.scale - scale)] = merged.get(bucket >> (self.scale - scale), 0) + count
        return dataclasses.replace(self, scale=scale, buckets=merged)

    def since(self, before: Counts) -> Counts:
        """What has come since then. The extremes stay those of all."""
        scale = min(self.scale, before.scale)
        now, then = self.lowered(scale), before.lowered(scale)
        buckets = {bucket: count - then.buckets.get(bucket, 0) for bucket, count in now.buckets.items()}
        grown = {bucket: count for bucket, count in buckets.items() if count > 0}
        return dataclasses.replace(
            now, zeros=max(0, now.zeros - then.zeros), total=max(0.0, now.total - then.total), buckets=grown
        )

    def dense(self) -> tuple[int, list[int]]:
        """The first bucket, and the counts of all from there to the last."""
        if not self.buckets:
            return 0, []
        first = min(self.buckets)
        return first, [self.buckets.get(bucket, 0) for bucket in range(first, max(self.buckets) + 1)]


def exponential_bucket(values: npt.NDArray[np.float64], scale: int = SCALE) -> npt.NDArray[np.int64]:
    """Of positive values: i where 2**(i / 2**scale) < value <= 2**((i + 1) / 2**scale).

    https://opentelemetry.io/docs/specs/otel/metrics/data-model/#exponentialhistogram
    """
    found: npt.NDArray[np.int64] = np.ceil(np.log2(values) * 2.0**scale).astype(np.int64) - 1
    return found


def dense(counts: Mapping[int, int], scale: int = SCALE) -> tuple[int, int, list[int]]:
    """Buckets as a point has them: scale, the first bucket, and all counts from there, at most MAX_BUCKETS."""
    if not counts:
        return scale, 0, []
    while max(counts) - min(counts) >= MAX_BUCKETS:
        merged: dict[int, int] = {}
        for bucket, count in counts.items():
            merged[bucket >> 1] = merged.get(bucket >> 1, 0) + count
        counts, scale = merged, scale - 1
    first = min(counts)
    return scale, first, [counts.get(bucket, 0) for bucket in range(first, max(counts) + 1)]
