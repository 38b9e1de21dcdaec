"""Sketches: compact statistics of durations, which can be merged by addition. Pure functions.

A sketch consists of count, sum, sum of squares, minimum, maximum and a histogram. The histogram is
OpenTelemetry's exponential histogram of scale 5, in seconds. Each factor of two has 32 buckets that
are 2.2 % wide, so a quantile has an error of at most 1.1 %. Durations and sums are integers in
nanoseconds, so the order of merging does not change the result.
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
"""The buckets cover 2**-24 s (60 ns) to 2**34 s, which exceeds 64 bits of nanoseconds."""
LOWEST_BUCKET = PER_OCTAVE * LOWEST_OCTAVE
"""OpenTelemetry's index of the first bucket. This bucket also counts all shorter durations."""
BUCKETS = PER_OCTAVE * (HIGHEST_OCTAVE - LOWEST_OCTAVE)
_MAX_NS = (1 << 63) - 1


def compute_octave_bounds() -> list[int]:
    """Return floor(10**9 * 2**(34 + i / 32)) for i < 32.

    Each bucket bound is one of these numbers, shifted to the right.

    Floating-point powers would be inexact for some bounds, so the 32nd root is computed as five
    integer square roots. Rounding down after each root and shift does not change the result.
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
    """Return the upper bounds of the buckets in ns: bucket i contains (bound[i - 1], bound[i]].

    Bound i is floor(10**9 * 2**((LOWEST_BUCKET + i + 1) / 32)), but at most the largest signed
    integer of 64 bits.
    """
    octave, bounds = compute_octave_bounds(), []
    for index in range(LOWEST_BUCKET + 1, LOWEST_BUCKET + 1 + BUCKETS):
        above, part = divmod(index, PER_OCTAVE)
        bounds.append(min(octave[part] >> (HIGHEST_OCTAVE - above), _MAX_NS))
    return np.array(bounds, np.int64)


class Sketch:
    """Statistics of durations in ns. add() and merge() extend a sketch.

    Only buckets between the smallest and the largest duration are stored. All buckets would take
    9 KB, and a report on thousands of ranks contains a hundred sketches for each rank.
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
    def stored_buckets(self) -> tuple[int, npt.NDArray[np.int64]]:
        """Index of the first stored bucket, and the counts of all stored buckets. Read-only."""
        return self._first, self._used

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Copy of the counts of all buckets, with the shape (BUCKETS,)."""
        counts = np.zeros(BUCKETS, np.int64)
        counts[self._first : self._first + len(self._used)] = self._used
        return counts

    def add(
        self, values_ns: npt.NDArray[np.int64], bounds: npt.NDArray[np.int64] | None = None
    ) -> None:
        """Add durations. Negative durations count as zero. bounds: see add_to_sketches()."""
        if len(values_ns):
            add_to_sketches([self], values_ns, [0], bounds)

    def _add_summary(
        self,
        smallest: int,
        largest: int,
        sum_ns: int,
        sum_squares: int,
        first: int,
        counts: npt.NDArray[np.int64],
    ) -> None:
        """Add durations whose minimum, maximum, sums and bucket counts are given.

        counts: counts of the buckets from `first` on.
        """
        empty = not len(self._used)
        self.min_ns = smallest if empty else min(self.min_ns, smallest)
        self.max_ns = largest if empty else max(self.max_ns, largest)
        self.sum_ns += sum_ns
        self.sum_squares += sum_squares
        self._add_counts(first, counts)

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
        self.min_ns = min(self.min_ns, other.min_ns) if len(self._used) else other.min_ns
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

    def mean_without_outliers_ns(self) -> float:
        """Return the mean in ns without durations above twice the 90th percentile; NaN if empty."""
        bounds = bucket_bounds()[self._first : self._first + len(self._used)]
        usual = bounds <= 2 * self.quantile_ns(0.9) if len(bounds) else np.zeros(0, np.bool_)
        if usual.all() or not (self._used * usual).sum():
            return self.mean_ns()
        middles = bounds / 2 ** (0.5 / PER_OCTAVE)
        return float((self._used * middles)[usual].sum() / self._used[usual].sum())

    def to_numbers(self) -> list[int]:
        """Encode the sketch as numbers for from_numbers().

        The numbers are sum, sum of squares, minimum, maximum, index of the first stored bucket, and
        the counts of the stored buckets.
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
        """Decode the numbers that to_numbers() returned. Raise ValueError if they are invalid."""
        sketch = cls()
        sketch.sum_ns, sketch.sum_squares, sketch.min_ns, sketch.max_ns, first, *counts = numbers
        sketch._first, sketch._used = first, np.array(counts, np.int64)
        if not 0 <= first <= BUCKETS - len(counts):
            raise ValueError(f"{len(counts)} buckets from number {first} on: there are {BUCKETS}")
        return sketch


def merge_sketches(sketches: Iterable[Sketch]) -> Sketch:
    """Return one sketch of all durations in the sketches."""
    whole = Sketch()
    for each in sketches:
        whole.merge(each)
    return whole


def add_each(
    pairs: Iterable[tuple[Sketch, npt.NDArray[np.int64]]],
) -> None:
    """Add durations to several sketches. Each pair has a sketch and its durations."""
    added = [(sketch, values_ns) for sketch, values_ns in pairs if len(values_ns)]
    if added:
        ends = np.cumsum([len(values_ns) for _, values_ns in added]).tolist()
        add_to_sketches(
            [sketch for sketch, _ in added],
            np.concatenate([values_ns for _, values_ns in added]),
            [0, *ends[:-1]],
        )


def add_to_sketches(
    sketches: Sequence[Sketch],
    values_ns: npt.NDArray[np.int64],
    starts: Sequence[int],
    bounds: npt.NDArray[np.int64] | None = None,
) -> None:
    """Add the durations values_ns[starts[i] : starts[i + 1]] to sketch i.

    Each sketch gets at least one duration. The result is the same as that of Sketch.add() for each
    sketch. One call for all sketches needs far fewer NumPy calls, because a rank has a hundred
    modules with few new durations each.

    bounds: bucket bounds in ns that replace bucket_bounds(), fewer than BUCKETS. Durations above
    the last bound are counted in an extra bucket. Such sketches have no quantiles, and can only be
    merged with sketches of the same bounds.
    """
    if not len(starts):
        return
    values_ns = np.maximum(values_ns, 0)
    # Squares of durations above 3 s would overflow 64 bits, so each duration is split in two.
    high, low = values_ns >> 20, values_ns & 0xFFFFF
    smallest, largest = (
        each.reduceat(values_ns, starts).tolist() for each in (np.minimum, np.maximum)
    )
    sums, high_squares, products, low_squares = (
        np.add.reduceat(each, starts).tolist()
        for each in (values_ns, high * high, high * low, low * low)
    )
    buckets = np.searchsorted(bucket_bounds() if bounds is None else bounds, values_ns, side="left")
    firsts, lasts = (each.reduceat(buckets, starts) for each in (np.minimum, np.maximum))
    # Count the buckets of all sketches in one array, in which each sketch has as many places as its
    # durations need.
    ends = np.cumsum(lasts - firsts + 1)
    places = np.repeat(ends - lasts - 1, np.diff([*starts, len(values_ns)])) + buckets
    counts, begin = np.bincount(places, minlength=int(ends[-1])), 0
    for i, (sketch, first, end) in enumerate(
        zip(sketches, firsts.tolist(), ends.tolist(), strict=True)
    ):
        squares = (high_squares[i] << 40) + (products[i] << 21) + low_squares[i]
        sketch._add_summary(smallest[i], largest[i], sums[i], squares, first, counts[begin:end])
        begin = end


# -- encoding as records of a ring file

# The statistics of a window that the device has computed are stored as several SKETCH records. Such
# a record has six 64-bit words instead of times and values. Its flags contain its index among the
# window's records. The words of a window are: number of words, count, sum, sum of squares (low,
# high), minimum, maximum, lost durations, median, median absolute deviation. They are followed by
# one word for each non-empty bucket, with the bucket's index above 48 bits of its count.
WORDS = 6  # words in a record
_COLUMNS = ("start_ns", "duration_ns", "nested_ns", "phase_ns", "value0", "value1")
_HEAD = 10
_COUNT_BITS = 48
_MASK = (1 << 64) - 1


class WindowSketch(NamedTuple):
    """Statistics of one device section in one window of steps."""

    sketch: Sketch
    lost: int
    """Number of durations that were overwritten before the reduction."""
    median_ns: int
    """Exact median of this window."""
    mad_ns: int
    """Exact median absolute deviation of this window."""


def encode_window_words(head: Sequence[int], counts: npt.NDArray[np.int64]) -> list[list[int]]:
    """Encode a window as SKETCH records, from the numbers in `head` and the histogram `counts`.

    head: count, sum, sum of squares, minimum, maximum, lost durations, median, MAD.
    """
    count, sum_ns, squares, *others = head
    used = counts.nonzero()[0]
    low = squares & _MASK
    words = np.zeros(-(-(_HEAD + len(used)) // WORDS) * WORDS, np.int64)
    words[:_HEAD] = (
        _HEAD + len(used),
        count,
        sum_ns,
        low - (low >> 63 << 64),
        squares >> 64,
        *others,
    )
    words[_HEAD : _HEAD + len(used)] = used << _COUNT_BITS | counts[used]
    return words.reshape(-1, WORDS).tolist()


def decode_windows(records: npt.NDArray[np.void]) -> tuple[list[tuple[int, WindowSketch]], int]:
    """Decode windows with the ids of their names, and count records of incomplete windows.

    records: SKETCH records in their order. Some records may be lost.
    """
    windows: list[tuple[int, WindowSketch]] = []
    table = (
        np.stack([records[column].astype(np.uint64) for column in _COLUMNS], axis=1)
        if len(records)
        else None
    )
    at, stray = 0, 0
    while table is not None and at < len(records):
        length = -(-int(table[at, 0]) // WORDS)
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
    for word in words[_HEAD : words[0]]:
        counts[word >> _COUNT_BITS] = word & ((1 << _COUNT_BITS) - 1)
    sketch = Sketch()
    used = np.flatnonzero(counts)
    if len(used):
        sketch._add_counts(int(used[0]), counts[used[0] : used[-1] + 1])
    sketch.sum_ns, sketch.sum_squares = words[2], words[3] | words[4] << 64
    sketch.min_ns, sketch.max_ns = words[5], words[6]
    return WindowSketch(sketch, lost=words[7], median_ns=words[8], mad_ns=words[9])
