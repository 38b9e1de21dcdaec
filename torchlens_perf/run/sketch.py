"""Sketches of durations, which merge by addition. Pure.

A sketch is count, sum, sum of squares, minimum, maximum and a histogram: OpenTelemetry's
exponential histogram of scale 5, in seconds. Each octave has 32 buckets that are 2.2 % wide, so a
quantile has an error of at most 1.1 %. Durations and sums are integers of nanoseconds, so merging
in any order gives the same bytes.
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
"""The buckets cover 2**-24 s (60 ns) to 2**34 s. 64 bits of nanoseconds end below that."""
LOWEST_BUCKET = PER_OCTAVE * LOWEST_OCTAVE
"""Number of the first bucket in OpenTelemetry. This bucket also has all shorter durations."""
BUCKETS = PER_OCTAVE * (HIGHEST_OCTAVE - LOWEST_OCTAVE)
_MAX_NS = (1 << 63) - 1


def compute_octave_bounds() -> list[int]:
    """Return floor(10**9 * 2**(34 + i / 32)) for i < 32.

    All bounds are these numbers shifted to the right.

    Floating-point powers are not exact at some bounds. The 32nd root is computed as five integer
    square roots. Each root and each shift may be rounded down.
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
    """Return the buckets' upper bounds in ns: bucket i contains (bound[i - 1], bound[i]].

    Bound i is the largest integer not above 10**9 * 2**((LOWEST_BUCKET + i + 1) / 32). The last
    bounds are the largest integer of 64 bits.
    """
    octave, bounds = compute_octave_bounds(), []
    for index in range(LOWEST_BUCKET + 1, LOWEST_BUCKET + 1 + BUCKETS):
        above, part = divmod(index, PER_OCTAVE)
        bounds.append(min(octave[part] >> (HIGHEST_OCTAVE - above), _MAX_NS))
    return np.array(bounds, np.int64)


class Sketch:
    """The distribution of durations in ns. add() and merge() extend it.

    Only buckets between the smallest and the largest duration take memory. A report on thousands of
    ranks has a hundred sketches for each rank, and all buckets of a sketch would take 9 KB.
    """

    __slots__ = ("_first", "_used", "max_ns", "min_ns", "sum_ns", "sum_squares")

    def __init__(self) -> None:
        # Index of the bucket at _used[0].
        self._first = 0
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
        """Return the first non-empty bucket, and the counts from there to the last one.

        Do not modify them.
        """
        return self._first, self._used

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Return a copy of the counts of all buckets, shape (BUCKETS,)."""
        counts = np.zeros(BUCKETS, np.int64)
        counts[self._first : self._first + len(self._used)] = self._used
        return counts

    def add(
        self, values_ns: npt.NDArray[np.int64], bounds: npt.NDArray[np.int64] | None = None
    ) -> None:
        """Add durations; negative ones count as zero. bounds: see add_to_sketches()."""
        if len(values_ns):
            add_to_sketches([self], values_ns, [0], bounds)

    def _add_summed(
        self,
        smallest: int,
        largest: int,
        sum_ns: int,
        sum_squares: int,
        buckets: npt.NDArray[np.int64],
    ) -> None:
        """Add values by their smallest, largest, sums and bucket indexes."""
        empty = not len(self._used)
        self.min_ns = smallest if empty else min(self.min_ns, smallest)
        self.max_ns = largest if empty else max(self.max_ns, largest)
        self.sum_ns += sum_ns
        self.sum_squares += sum_squares
        first = int(buckets.min())
        self._add_counts(first, np.bincount(buckets - first))

    def _add_counts(self, first: int, counts: npt.NDArray[np.int64]) -> None:
        """Add counts for the buckets from `first` on."""
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
        """Return the q-quantile in ns, with an error of at most 1.1 %; NaN for an empty sketch."""
        count = self.count
        if not count:
            return math.nan
        wanted = min(count, max(1, math.ceil(q * count)))
        bucket = self._first + int(np.searchsorted(np.cumsum(self._used), wanted))
        upper = float(bucket_bounds()[bucket])
        lower = upper / 2 ** (1 / PER_OCTAVE)
        return min(max(math.sqrt(lower * upper), self.min_ns), self.max_ns)

    def mean_ns(self) -> float:
        """Return the mean in ns; NaN for an empty sketch."""
        count = self.count
        return self.sum_ns / count if count else math.nan

    def usual_mean_ns(self) -> float:
        """Return the mean in ns of durations up to twice the 90th percentile; NaN if empty."""
        bounds = bucket_bounds()[self._first : self._first + len(self._used)]
        usual = bounds <= 2 * self.quantile_ns(0.9) if len(bounds) else np.zeros(0, np.bool_)
        if usual.all() or not (self._used * usual).sum():
            return self.mean_ns()
        middles = bounds / 2 ** (0.5 / PER_OCTAVE)
        return float((self._used * middles)[usual].sum() / self._used[usual].sum())

    def numbers(self) -> list[int]:
        """Return the sketch's numbers for from_numbers().

        They are sum, squares, smallest, largest, first used bucket and the counts from there.
        """
        return [
            self.sum_ns,
            self.sum_squares,
            self.min_ns,
            self.max_ns,
            self._first,
            *self._used.tolist(),
        ]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Sketch:
        """Return the sketch for a value of numbers(). Raise ValueError if it is invalid."""
        sketch = cls()
        sketch.sum_ns, sketch.sum_squares, sketch.min_ns, sketch.max_ns, first, *counts = numbers
        sketch._first, sketch._used = first, np.array(counts, np.int64)
        if not 0 <= first <= BUCKETS - len(counts):
            raise ValueError(f"{len(counts)} buckets from number {first} on: there are {BUCKETS}")
        return sketch


def merge_sketches(sketches: Iterable[Sketch]) -> Sketch:
    """Return the sum of the sketches."""
    whole = Sketch()
    for each in sketches:
        whole.merge(each)
    return whole


def add_to_sketches(
    sketches: Sequence[Sketch],
    values_ns: npt.NDArray[np.int64],
    starts: Sequence[int],
    bounds: npt.NDArray[np.int64] | None = None,
) -> None:
    """Add the durations from starts[i] until starts[i + 1], at least one, to sketch i.

    This equals Sketch.add() for each sketch, with far fewer NumPy calls: a rank has a hundred
    modules and few new values of each.

    bounds: other bucket bounds than bucket_bounds(), in ns, fewer than BUCKETS. Durations above the
    last bound count in an extra bucket. Such sketches have no quantiles, and only merge with
    sketches of the same bounds.
    """
    if not len(starts):
        return
    values_ns = np.maximum(values_ns, 0)
    # Values are split to keep the sums exact: 64-bit squares of durations above 3 s would overflow.
    high, low = values_ns >> 20, values_ns & 0xFFFFF
    smallest, largest = (
        each.reduceat(values_ns, starts).tolist() for each in (np.minimum, np.maximum)
    )
    sums, high_squares, products, low_squares = (
        np.add.reduceat(each, starts).tolist()
        for each in (values_ns, high * high, high * low, low * low)
    )
    buckets = np.searchsorted(bucket_bounds() if bounds is None else bounds, values_ns, side="left")
    for i, (sketch, start, end) in enumerate(
        zip(sketches, starts, [*starts[1:], len(values_ns)], strict=True)
    ):
        squares = (high_squares[i] << 40) + (products[i] << 21) + low_squares[i]
        sketch._add_summed(smallest[i], largest[i], sums[i], squares, buckets[start:end])


# -- as records of a ring file

# A window that was reduced on the device is a run of records of kind SKETCH. Such a record has six
# 64-bit words instead of times and values, and its index in the run is in its flags. The words of a
# run: number of words, count, sum, squares (low, high), smallest, largest, lost, median, median
# absolute deviation. Then each non-empty bucket has one word: its index above 48 bits of count.
WORDS = 6  # words in a record
_COLUMNS = ("start_ns", "duration_ns", "nested_ns", "phase_ns", "value0", "value1")
_HEAD = 10
_COUNT_BITS = 48
# Earlier versions, whose buckets were octaves of nanoseconds, lack this bit. Their records are
# skipped.
_MARK = 1 << 32
_MASK = (1 << 64) - 1


class WindowSketch(NamedTuple):
    """Statistics of one section in one window."""

    sketch: Sketch
    lost: int
    """Number of durations that were overwritten before the reduction."""
    median_ns: int
    """Exact median of this window. `mad_ns` is the exact median absolute deviation."""
    mad_ns: int


def to_records(window: WindowSketch) -> list[list[int]]:
    """Return the words of the window's records, six each, as signed 64-bit integers."""
    sketch = window.sketch
    head = [sketch.count, sketch.sum_ns, sketch.sum_squares, sketch.min_ns, sketch.max_ns]
    return pack_words([*head, window.lost, window.median_ns, window.mad_ns], sketch.counts)


def pack_words(head: Sequence[int], counts: npt.NDArray[np.int64]) -> list[list[int]]:
    """Return record words as to_records() does, from the numbers in `head` and the histogram.

    head: count, sum, sum of squares, smallest, largest, lost, median, MAD.
    """
    count, sum_ns, squares, *others = head
    used = counts.nonzero()[0]
    low = squares & _MASK
    words = np.zeros(-(-(_HEAD + len(used)) // WORDS) * WORDS, np.int64)
    words[:_HEAD] = (
        _MARK + _HEAD + len(used),
        count,
        sum_ns,
        low - (low >> 63 << 64),
        squares >> 64,
        *others,
    )
    words[_HEAD : _HEAD + len(used)] = used << _COUNT_BITS | counts[used]
    return words.reshape(-1, WORDS).tolist()


def from_records(records: npt.NDArray[np.void]) -> tuple[list[tuple[int, WindowSketch]], int]:
    """Return windows with the ids of their names, and the number of records in incomplete runs.

    records: SKETCH records in their order. Some may have been lost, or an earlier version may have
    written them.
    """
    windows: list[tuple[int, WindowSketch]] = []
    table = (
        np.stack([records[column].astype(np.uint64) for column in _COLUMNS], axis=1)
        if len(records)
        else None
    )
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
        windows.append(
            (int(run["name_id"][0]), _decode_window(table[at : at + length].ravel().tolist()))
        )
        at += length
    return windows, stray


def _decode_window(words: list[int]) -> WindowSketch:
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
