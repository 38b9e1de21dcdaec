"""A sketch as a run of records: how a window that was reduced on the device comes through the ring file. Pure.

A record of kind SKETCH holds six words of 64 bits where others hold times and values, and its place in the run in its
flags. The words: how many there are, count, sum, squares (low, high), smallest, largest, lost, median, median absolute
deviation, then a word for each bucket that is not empty: its index above 48 bits of count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchlens_perf.sketch import Sketch

if TYPE_CHECKING:
    import numpy.typing as npt

WORDS = 6  # of a record
_COLUMNS = ("start_ns", "duration_ns", "nested_ns", "phase_ns", "value0", "value1")
_HEAD = 10
_COUNT_BITS = 48
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
    """The words of its records, six each, as signed 64-bit integers."""
    sketch = window.sketch
    head = [sketch.count, sketch.sum_ns, sketch.sum_squares, sketch.smallest, sketch.largest]
    return pack([*head, window.lost, window.median_ns, window.mad_ns], sketch.counts)


def pack(head: Sequence[int], counts: npt.NDArray[np.int64]) -> list[list[int]]:
    """As to_records(), of count, sum, sum of squares, smallest, largest, lost, median and MAD, and the histogram."""
    count, sum_ns, squares, *others = head
    used = counts.nonzero()[0]
    low = squares & _MASK
    words = np.zeros(-(-(_HEAD + len(used)) // WORDS) * WORDS, np.int64)
    words[:_HEAD] = _HEAD + len(used), count, sum_ns, low - (low >> 63 << 64), squares >> 64, *others
    words[_HEAD : _HEAD + len(used)] = used << _COUNT_BITS | counts[used]
    return words.reshape(-1, WORDS).tolist()


def from_records(records: npt.NDArray[np.void]) -> tuple[list[tuple[int, WindowSketch]], int]:
    """The windows among these records, which are all SKETCH and in their order, with their names' ids; and how many
    records are of no whole run, because others of it were lost."""
    windows: list[tuple[int, WindowSketch]] = []
    table = np.stack([records[column].astype(np.uint64) for column in _COLUMNS], axis=1) if len(records) else None
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
        windows.append((int(run["name_id"][0]), _window(table[at : at + length].ravel().tolist())))
        at += length
    return windows, stray


def _window(words: list[int]) -> WindowSketch:
    sketch = Sketch()
    for word in words[_HEAD : words[0]]:
        sketch.counts[word >> _COUNT_BITS] = word & ((1 << _COUNT_BITS) - 1)
    sketch.sum_ns, sketch.sum_squares = words[2], words[3] | words[4] << 64
    sketch.smallest, sketch.largest = words[5], words[6]
    return WindowSketch(sketch, lost=words[7], median_ns=words[8], mad_ns=words[9])
