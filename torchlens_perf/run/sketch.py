"""Sketches of durations, which merge by addition. Pure.

A sketch is count, sum, sum of squares, minimum, maximum and a histogram: OpenTelemetry's exponential one of scale 5 in
seconds. It has 32 buckets an octave, each 2.2 % wide, so a quantile is off by at most 1.1 %. Durations are integers of
nanoseconds, and so is everything that is added up: merging in any order gives the same bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

SCALE = 5
PER_OCTAVE = 1 << SCALE
LOWEST_OCTAVE, HIGHEST_OCTAVE = -24, 34
"""The buckets go from 2**-24 s (60 ns) to 2**34 s: 64 bits of nanoseconds end before that."""
LOWEST_BUCKET = PER_OCTAVE * LOWEST_OCTAVE
"""The number that OpenTelemetry gives the first bucket. It also holds all shorter durations."""
BUCKETS = PER_OCTAVE * (HIGHEST_OCTAVE - LOWEST_OCTAVE)
_MAX_NS = (1 << 63) - 1


def octave_bounds() -> list[int]:
    """Return floor(10**9 * 2**(34 + i / 32)) for i < 32, from which shifts to the right make all bounds.

    Exact, which floating-point powers are not at some bounds: the 32nd root is five integer square roots. Each of them,
    and each shift, may be rounded down.
    """
    bounds = []
    for part in range(PER_OCTAVE):
        root = 10 ** (9 * PER_OCTAVE) << (PER_OCTAVE * HIGHEST_OCTAVE + part)
        for _ in range(SCALE):
            root = math.isqrt(root)
        bounds.append(root)
    return bounds


@functools.cache
def bucket_bounds() -> npt.NDArray[np.int64]:
    """Return the buckets' upper bounds in ns: bucket i holds (bound[i - 1], bound[i]].

    Bound i is the largest integer not above 10**9 * 2**((LOWEST_BUCKET + i + 1) / 32). The last ones are the largest
    integer of 64 bits.
    """
    octave, bounds = octave_bounds(), []
    for index in range(LOWEST_BUCKET + 1, LOWEST_BUCKET + 1 + BUCKETS):
        above, part = divmod(index, PER_OCTAVE)
        bounds.append(min(octave[part] >> (HIGHEST_OCTAVE - above), _MAX_NS))
    return np.array(bounds, np.int64)


class Sketch:
    """The distribution of durations in ns. Grows by add() and merge().

    Takes the space of the buckets between the smallest and the largest duration: a report on thousands of ranks holds a
    hundred for each, and one with all buckets is 9 KB.
    """

    __slots__ = ("_first", "_used", "max_ns", "min_ns", "sum_ns", "sum_squares")

    def __init__(self) -> None:
        self._first = 0  # bucket, the first of _used
        self._used = np.zeros(0, np.int64)
        self.sum_ns = 0
        self.sum_squares = 0
        self.min_ns = 0
        self.max_ns = 0

    @property
    def count(self) -> int:
        return int(self._used.sum())

    @property
    def used(self) -> tuple[int, npt.NDArray[np.int64]]:
        """The first bucket that is not empty, and the counts from there to the last such one. Must not be changed."""
        return self._first, self._used

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """(BUCKETS,), how many durations are in each bucket. A copy."""
        counts = np.zeros(BUCKETS, np.int64)
        counts[self._first : self._first + len(self._used)] = self._used
        return counts

    def add(self, values_ns: npt.NDArray[np.int64], bounds: npt.NDArray[np.int64] | None = None) -> None:
        """Add durations; negative ones count as zero. bounds: see add_to_each()."""
        if len(values_ns):
            add_to_each([self], values_ns, [0], bounds)

    def _add_summed(
        self, smallest: int, largest: int, sum_ns: int, sum_squares: int, buckets: npt.NDArray[np.int64]
    ) -> None:
        """Add values of which all this is known."""
        empty = not len(self._used)
        self.min_ns = smallest if empty else min(self.min_ns, smallest)
        self.max_ns = largest if empty else max(self.max_ns, largest)
        self.sum_ns += sum_ns
        self.sum_squares += sum_squares
        first = int(buckets.min())
        self._add_counts(first, np.bincount(buckets - first))

    def _add_counts(self, first: int, counts: npt.NDArray[np.int64]) -> None:
        """counts: of the buckets from `first` on."""
        used, end = self._used, self._first + len(self._used)
        if not len(used):
            self._first, self._used = first, counts.astype(np.int64)
            return
        if first < self._first or first + len(counts) > end:
            start = min(first, self._first)
            self._used = np.zeros(max(end, first + len(counts)) - start, np.int64)
            self._used[self._first - start : end - start] = used
            self._first = start
        self._used[first - self._first : first - self._first + len(counts)] += counts

    def merge(self, other: Sketch) -> None:
        if not len(other._used):
            return
        empty = not len(self._used)
        self.min_ns = other.min_ns if empty else min(self.min_ns, other.min_ns)
        self.max_ns = max(self.max_ns, other.max_ns)
        self.sum_ns += other.sum_ns
        self.sum_squares += other.sum_squares
        self._add_counts(other._first, other._used)

    def quantile_ns(self, q: float) -> float:
        """The q-quantile, at most 1.1 % off; NaN for an empty sketch."""
        count = self.count
        if not count:
            return math.nan
        wanted = min(count, max(1, math.ceil(q * count)))
        bucket = self._first + int(np.searchsorted(np.cumsum(self._used), wanted))
        upper = float(bucket_bounds()[bucket])
        lower = upper / 2 ** (1 / PER_OCTAVE)
        return min(max(math.sqrt(lower * upper), self.min_ns), self.max_ns)

    def mean_ns(self) -> float:
        """The mean; NaN for an empty sketch."""
        count = self.count
        return self.sum_ns / count if count else math.nan

    def usual_mean_ns(self) -> float:
        """Return the mean without outliers: the few durations above twice the 90th percentile. NaN if empty."""
        bounds = bucket_bounds()[self._first : self._first + len(self._used)]
        usual = bounds <= 2 * self.quantile_ns(0.9) if len(bounds) else np.zeros(0, np.bool_)
        if usual.all() or not (self._used * usual).sum():
            return self.mean_ns()
        middles = bounds / 2 ** (0.5 / PER_OCTAVE)
        return float((self._used * middles)[usual].sum() / self._used[usual].sum())

    def numbers(self) -> list[int]:
        """Return sum, squares, smallest, largest, the first used bucket, counts from there: for from_numbers()."""
        return [self.sum_ns, self.sum_squares, self.min_ns, self.max_ns, self._first, *self._used.tolist()]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Sketch:
        """Return the sketch that numbers() was called on. Raises ValueError if there is no such sketch."""
        sketch = cls()
        sketch.sum_ns, sketch.sum_squares, sketch.min_ns, sketch.max_ns, first, *counts = numbers
        sketch._first, sketch._used = first, np.array(counts, np.int64)
        if not 0 <= first <= BUCKETS - len(counts):
            raise ValueError(f"{len(counts)} buckets from number {first} on: there are {BUCKETS}")
        return sketch


def merged(sketches: Iterable[Sketch]) -> Sketch:
    """Return the sum of the sketches."""
    whole = Sketch()
    for each in sketches:
        whole.merge(each)
    return whole


def add_to_each(
    sketches: Sequence[Sketch],
    values_ns: npt.NDArray[np.int64],
    starts: Sequence[int],
    bounds: npt.NDArray[np.int64] | None = None,
) -> None:
    """Add the durations from starts[i] until starts[i + 1], at least one, to sketch i.

    Same as Sketch.add() for each, at a fraction of the calls: a rank has a hundred modules and few new values of each.
    bounds: of buckets other than bucket_bounds(), in ns, fewer than BUCKETS. Longer durations than the last one count
    in a bucket after it. Sketches of such buckets have no quantiles, and merge with their like only.
    """
    if not len(starts):
        return
    values_ns = np.maximum(values_ns, 0)
    high, low = values_ns >> 20, values_ns & 0xFFFFF  # exact: 64-bit squares of durations above 3 s would overflow
    smallest, largest = (each.reduceat(values_ns, starts).tolist() for each in (np.minimum, np.maximum))
    sums, high_squares, products, low_squares = (
        np.add.reduceat(each, starts).tolist() for each in (values_ns, high * high, high * low, low * low)
    )
    buckets = np.searchsorted(bucket_bounds() if bounds is None else bounds, values_ns, side="left")
    for i, (sketch, start, end) in enumerate(zip(sketches, starts, [*starts[1:], len(values_ns)], strict=True)):
        squares = (high_squares[i] << 40) + (products[i] << 21) + low_squares[i]
        sketch._add_summed(smallest[i], largest[i], sums[i], squares, buckets[start:end])


# -- as records of a ring file

# A window that was reduced on the device comes through the ring file as a run of records of kind SKETCH. Such a record
# holds six words of 64 bits where others hold times and values, and its place in the run in its flags. The words: how
# many there are, count, sum, squares (low, high), smallest, largest, lost, median, median absolute deviation, then a
# word for each bucket that is not empty: its index above 48 bits of count.
WORDS = 6  # of a record
_COLUMNS = ("start_ns", "duration_ns", "nested_ns", "phase_ns", "value0", "value1")
_HEAD = 10
_COUNT_BITS = 48
_MARK = 1 << 32  # missing in records of earlier versions, whose buckets were octaves of nanoseconds: they are not read
_MASK = (1 << 64) - 1


class WindowSketch(NamedTuple):
    """One window of one section."""

    sketch: Sketch
    lost: int
    """Durations that were overwritten before they were reduced."""
    median_ns: int
    """Exact, of this window, as is the next."""
    mad_ns: int


def to_records(window: WindowSketch) -> list[list[int]]:
    """Return the words of its records, six each, as signed 64-bit integers."""
    sketch = window.sketch
    head = [sketch.count, sketch.sum_ns, sketch.sum_squares, sketch.min_ns, sketch.max_ns]
    return pack([*head, window.lost, window.median_ns, window.mad_ns], sketch.counts)


def pack(head: Sequence[int], counts: npt.NDArray[np.int64]) -> list[list[int]]:
    """As to_records(), of count, sum, sum of squares, smallest, largest, lost, median and MAD, and the histogram."""
    count, sum_ns, squares, *others = head
    used = counts.nonzero()[0]
    low = squares & _MASK
    words = np.zeros(-(-(_HEAD + len(used)) // WORDS) * WORDS, np.int64)
    words[:_HEAD] = _MARK + _HEAD + len(used), count, sum_ns, low - (low >> 63 << 64), squares >> 64, *others
    words[_HEAD : _HEAD + len(used)] = used << _COUNT_BITS | counts[used]
    return words.reshape(-1, WORDS).tolist()


def from_records(records: npt.NDArray[np.void]) -> tuple[list[tuple[int, WindowSketch]], int]:
    """Return the windows among these records with their names' ids, and how many records are of no whole run.

    records: all are SKETCH, in their order. Others of a run may have been lost, or an earlier version has written it.
    """
    windows: list[tuple[int, WindowSketch]] = []
    table = np.stack([records[column].astype(np.uint64) for column in _COLUMNS], axis=1) if len(records) else None
    at, stray = 0, 0
    while table is not None and at < len(records):
        length = -(-(int(table[at, 0]) - _MARK) // WORDS)
        run = records[at : at + length]
        whole = (
            0 < length == len(run)
            and run["flags"].tolist() == list(range(length))
            and bool((run["name_id"] == run["name_id"][0]).all())
        )
        if not whole:
            at, stray = at + 1, stray + 1
            continue
        windows.append((int(run["name_id"][0]), _window(table[at : at + length].ravel().tolist())))
        at += length
    return windows, stray


def _window(words: list[int]) -> WindowSketch:
    counts = np.zeros(BUCKETS, np.int64)
    for word in words[_HEAD : words[0] - _MARK]:
        counts[word >> _COUNT_BITS] = word & ((1 << _COUNT_BITS) - 1)
    sketch = Sketch()
    used = np.flatnonzero(counts)
    if len(used):
        sketch._add_counts(int(used[0]), counts[used[0] : used[-1] + 1])
    sketch.sum_ns, sketch.sum_squares = words[2], words[3] | words[4] << 64
    sketch.min_ns, sketch.max_ns = words[5], words[6]
    return WindowSketch(sketch, lost=words[7], median_ns=words[8], mad_ns=words[9])
