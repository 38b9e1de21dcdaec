"""Define the layout of the duration statistics that kernels.cu computes on the device. No I/O.

The durations of a section (slot) in a window of time become three rows:

- `sums`, which merge over windows and ranks by SUM. The row contains the histogram of sketch.Sketch
  up to 2**12 s;
- `largest`, which merge by MAX;
- `exact`, which are valid for this window only.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchlens_perf.run.sketch import (
    LOWEST_OCTAVE,
    PER_OCTAVE,
    compute_octave_bounds,
    encode_window_words,
)

if TYPE_CHECKING:
    import numpy.typing as npt

HIGHEST_OCTAVE = 12
BUCKETS = PER_OCTAVE * (HIGHEST_OCTAVE - LOWEST_OCTAVE)
"""Buckets of a sketch up to 2**12 s (68 min). Longer durations count in the last bucket."""


class SumColumn(IntEnum):
    """Columns of a row of sums. The histogram follows these columns.

    The sum of squares is in three columns, each a sum of 32-bit limbs. The reader adds the carries.
    """

    COUNT = 0
    NS = 1
    SQUARES_0 = 2
    SQUARES_1 = 3
    SQUARES_2 = 4
    LOST = 5


class LargestColumn(IntEnum):
    """Columns of a row of largest values."""

    NS = 0
    MINUS_SMALLEST = 1


class ExactColumn(IntEnum):
    """Columns of a window's exact row in ns. The last two are times of the device's clock."""

    MEDIAN = 0
    MAD = 1
    FIRST_START = 2
    LAST_END = 3


SUM_ROW = len(SumColumn) + BUCKETS
# Widths of the three tables of a window, which are contiguous in memory.
ROW_WIDTHS = (SUM_ROW, len(LargestColumn), len(ExactColumn))


class ReducedWindow(NamedTuple):
    """The rows of all slots for one window."""

    sums: npt.NDArray[np.int64]
    """Shape [slots, SUM_ROW]."""
    largest: npt.NDArray[np.int64]
    """Shape [slots, len(LargestColumn)]."""
    exact: npt.NDArray[np.int64]
    """Shape [slots, len(ExactColumn)]."""


def view_tables(words: Any, slots: int, widths: Sequence[int]) -> list[Any]:
    """Return views of contiguous tables [slots, width] in an array or tensor, and of what
    follows."""
    tables, at = [], 0
    for width in widths:
        tables.append(words[at : at + slots * width].reshape(slots, width))
        at += slots * width
    return [*tables, words[at:]]


def mantissa_bounds() -> npt.NDArray[np.uint64]:
    """Return the sorted bounds of one octave, shifted until the highest set bit is bit 63.

    The kernel shifts a duration in the same way and compares it with the bounds. The bounds are
    rounded down, which does not change any comparison.
    """
    return np.array(
        sorted(bound if bound < 1 << 64 else bound >> 1 for bound in compute_octave_bounds()),
        np.uint64,
    )


def pack_window(
    sums: npt.NDArray[np.int64], largest: npt.NDArray[np.int64], exact: npt.NDArray[np.int64]
) -> list[list[int]]:
    """Pack a slot's rows of one window into words of the ring file's records.

    The result is empty for a window without durations.
    """
    count, sum_ns, *limbs, lost = sums[: len(SumColumn)].tolist()
    if not count:
        return []
    squares = sum(limb << (32 * place) for place, limb in enumerate(limbs))
    most, minus_least = largest.tolist()
    median, mad = exact[: ExactColumn.MAD + 1].tolist()
    return encode_window_words(
        [count, sum_ns, squares, -minus_least, most, lost, median, mad], sums[len(SumColumn) :]
    )
