"""NumPy versions of the kernels in cuda/kernels.cu. Tests compare the results of kernels and of
these functions bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchlens_perf.cuda.reduction import (
    BUCKETS,
    ROW_WIDTHS,
    ExactColumn,
    LargestColumn,
    ReducedWindow,
    SumColumn,
)
from torchlens_perf.run.sketch import bucket_bounds

# Value of `largest` in an empty window.
NO_SMALLEST = -(2**63 - 1)
# Factor from the MAD to the standard deviation of normal values.
ROBUST_DEVIATION = np.float32(1.4826)
# A slot without times of at least this many ranks has no scores.
FEWEST_RANKS = 2


class Scores(NamedTuple):
    """Scores of ranks relative to other ranks."""

    middle: npt.NDArray[np.float32]
    """Shape [slots, 2]: lower median and median absolute deviation of the ranks' times, in ns."""
    worst: npt.NDArray[np.uint64]
    """Shape [ranks]: bits of the rank's highest score over the slots as float32. 0 without a score.
    """


def reduce_window(
    start_ns: npt.NDArray[np.uint64],
    duration_ns: npt.NDArray[np.uint64],
    head: npt.NDArray[np.uint32],
    tail: npt.NDArray[np.uint32],
) -> ReducedWindow:
    """Reduce the entries between `tail` and `head` of each slot's ring [slots, places].

    `head` and `tail` count stamps modulo 2**32.
    """
    slots, places = duration_ns.shape
    reduced = ReducedWindow(*(np.zeros((slots, width), np.int64) for width in ROW_WIDTHS))
    for slot in range(slots):
        newest = int(head[slot])
        written = (newest - int(tail[slot])) % (1 << 32)
        # The oldest entry is skipped, because another stream may be writing to it.
        count = min(written, places - 1)
        at = (newest - count + np.arange(count)) % places
        _reduce(duration_ns[slot, at], *(table[slot] for table in reduced))
        reduced.sums[slot, SumColumn.LOST] = written - count
        if count:
            reduced.exact[slot, ExactColumn.FIRST_START] = start_ns[slot, at[0]]
            reduced.exact[slot, ExactColumn.LAST_END] = (
                start_ns[slot, at[-1]] + duration_ns[slot, at[-1]]
            )
    return reduced


def _reduce(
    values: npt.NDArray[np.uint64],
    sums: npt.NDArray[np.int64],
    largest: npt.NDArray[np.int64],
    exact: npt.NDArray[np.int64],
) -> None:
    """Fill the result rows of one slot."""
    count = len(values)
    largest[LargestColumn.MINUS_SMALLEST] = NO_SMALLEST
    if not count:
        return
    ordered = np.sort(values)
    sums[SumColumn.COUNT] = count
    sums[SumColumn.NS] = values.sum().view(np.int64)
    sums[SumColumn.SQUARES_0 : SumColumn.SQUARES_2 + 1] = _limbs_of_squares(values)
    bounded = np.minimum(values, np.uint64(2**63 - 1)).astype(np.int64)
    buckets = np.minimum(np.searchsorted(bucket_bounds(), bounded, side="left"), BUCKETS - 1)
    sums[len(SumColumn) :] = np.bincount(buckets, minlength=BUCKETS)
    largest[:] = ordered[-1].view(np.int64), -int(ordered[0].view(np.int64))
    median = ordered[(count - 1) // 2]
    distances = np.sort(np.maximum(ordered, median) - np.minimum(ordered, median))
    exact[ExactColumn.MEDIAN] = median
    exact[ExactColumn.MAD] = distances[(count - 1) // 2]


def _limbs_of_squares(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return the sums of bits 0 to 31, 32 to 63, and from 64 on of the squared values."""
    half = np.uint64(32)
    low_bits = np.uint64(0xFFFFFFFF)
    high, low = values >> half, values & low_bits
    # The square is high**2 * 2**64 + 2 * high * low * 2**32 + low**2. Sums of 64 bits wrap, so
    # carries are added by hand.
    middle = high * low
    lowest = low * low
    carry = (lowest >> half) + ((middle << np.uint64(1)) & low_bits)
    upper = high * high + (middle >> np.uint64(31)) + (carry >> half)
    limbs = np.array([(lowest & low_bits).sum(), (carry & low_bits).sum(), upper.sum()], np.uint64)
    return limbs.view(np.int64)


def merged_quantiles(
    sums: npt.NDArray[np.int64], parts: npt.NDArray[np.uint32]
) -> npt.NDArray[np.int32]:
    """Return the buckets of the quantiles of merged sums, [slots, quantiles]. -1 marks an empty
    row.

    `parts` are the quantiles in units of 2**-16.
    """
    buckets = np.full((len(sums), len(parts)), -1, np.int32)
    for slot, row in enumerate(sums):
        count = int(row[SumColumn.COUNT])
        if count:
            wanted = [((count - 1) * int(part) + (1 << 15)) >> 16 for part in parts]
            buckets[slot] = np.searchsorted(np.cumsum(row[len(SumColumn) :]), wanted, side="right")
    return buckets


def rank_scores(times_ns: npt.NDArray[np.int64], min_spread: float) -> Scores:
    """Score ranks' times [ranks, slots] against the median in each slot.

    A time of 0 means that the rank has no time in this slot.

    A score is (time - median) / max(1.4826 MAD, min_spread * median).

    Only positive scores in slots with at least FEWEST_RANKS times count.
    """
    ranks, slots = times_ns.shape
    scores = Scores(np.zeros((slots, 2), np.float32), np.zeros(ranks, np.uint64))
    for slot in range(slots):
        present = np.flatnonzero(times_ns[:, slot])
        times = times_ns[present, slot].astype(np.float32)
        if not len(times):
            continue
        middle = (len(times) - 1) // 2
        median = np.partition(times, middle)[middle]
        mad = np.partition(np.abs(times - median), middle)[middle]
        scores.middle[slot] = median, mad
        spread = np.maximum(ROBUST_DEVIATION * mad, np.float32(min_spread) * median)
        if len(times) < FEWEST_RANKS or not spread > 0:
            continue
        found = (times - median) / spread
        packed = found.view(np.uint32).astype(np.uint64) << np.uint64(32) | np.uint64(slot)
        above = found > 0
        scores.worst[present[above]] = np.maximum(scores.worst[present[above]], packed[above])
    return scores
