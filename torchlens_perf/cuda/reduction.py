"""The statistics of durations that kernels.cu reduces on the device: how they are laid out. Pure.

A window of a slot becomes three rows: `sums`, which merge over windows and ranks by SUM, `largest`, which merge by MAX,
and `exact`, which are this window's own. The histogram is that of sketch.Sketch up to 2**12 s: a row of sums is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchlens_perf.run.sketch import LOWEST_OCTAVE, PER_OCTAVE, octave_bounds, pack

if TYPE_CHECKING:
    import numpy.typing as npt

HIGHEST_OCTAVE = 12
BUCKETS = PER_OCTAVE * (HIGHEST_OCTAVE - LOWEST_OCTAVE)
"""Those of a sketch up to 2**12 s, 68 min; longer durations count in the last one."""


class Sum(IntEnum):
    """Columns of a row of sums; the histogram follows. Squares in three limbs of 32 bits, which carry nothing."""

    COUNT = 0
    NS = 1
    SQUARES_0 = 2
    SQUARES_1 = 3
    SQUARES_2 = 4
    LOST = 5


class Largest(IntEnum):
    """Columns of a row of largest values."""

    NS = 0
    MINUS_SMALLEST = 1


class Exact(IntEnum):
    """Columns of a window's own row: in ns, the last two of the device's clock."""

    MEDIAN = 0
    MAD = 1
    FIRST_START = 2
    LAST_END = 3


SUM_ROW = len(Sum) + BUCKETS
ROW_WIDTHS = (SUM_ROW, len(Largest), len(Exact))  # of a window's three tables, which lie one behind the other


class Reduced(NamedTuple):
    """A window of every slot."""

    sums: npt.NDArray[np.int64]
    """Shape [slots, SUM_ROW]."""
    largest: npt.NDArray[np.int64]
    """Shape [slots, len(Largest)]."""
    exact: npt.NDArray[np.int64]
    """Shape [slots, len(Exact)]."""


def tables_in(words: Any, slots: int, widths: Sequence[int]) -> list[Any]:
    """Views of the tables [slots, width] that lie one behind the other in an array or a tensor, and of what follows."""
    tables, at = [], 0
    for width in widths:
        tables.append(words[at : at + slots * width].reshape(slots, width))
        at += slots * width
    return [*tables, words[at:]]


def mantissa_bounds() -> npt.NDArray[np.uint64]:
    """Return the bounds of one octave, shifted until their highest bit is the 63rd, in order.

    A duration that is shifted likewise is compared with them. They are rounded down, which changes no comparison.
    """
    return np.array(sorted(bound if bound < 1 << 64 else bound >> 1 for bound in octave_bounds()), np.uint64)


def to_records(
    sums: npt.NDArray[np.int64], largest: npt.NDArray[np.int64], exact: npt.NDArray[np.int64]
) -> list[list[int]]:
    """A slot's rows of one window as the words of the ring file's records; none for an empty one."""
    count, sum_ns, *limbs, lost = sums[: len(Sum)].tolist()
    if not count:
        return []
    squares = sum(limb << (32 * place) for place, limb in enumerate(limbs))
    most, minus_least = largest.tolist()
    median, mad = exact[: Exact.MAD + 1].tolist()
    return pack([count, sum_ns, squares, -minus_least, most, lost, median, mad], sums[len(Sum) :])
