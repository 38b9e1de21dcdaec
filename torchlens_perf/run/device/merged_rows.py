"""A row of a window that was merged over ranks on the device, as the words of a MERGED record. Pure.

A row is a device section of the user's, or a part of the device's steps. Of a section there is one record a window. Of
a part there is one of the slowest rank, and one of each rank whose work stands out: so what makes it slow is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torchlens_perf.run.device.step_parts import ROW_NAMES
from torchlens_perf.run.ring import MERGED_RANK_SHIFT, name_of

if TYPE_CHECKING:
    import numpy as np

SECTION = -1
STANDS_OUT = 5.0  # robust deviations above the ranks' median
MAX_RANKS = 8  # of which there are records, where so many stand out
_NS_MASK = (1 << MERGED_RANK_SHIFT) - 1
_TIMES_BITS, _EXCESS_MAX = 32, (1 << 31) - 1
_ROW_SHIFT, _ROW_MASK = MERGED_RANK_SHIFT, 15
_OUTSTANDING_SHIFT, _OUTSTANDING_MAX = MERGED_RANK_SHIFT + 4, (1 << 15) - 1
_US = 1000


class MergedRow(NamedTuple):
    """One row of one window, and one rank in it."""

    name: str
    times: int
    """Of all ranks."""
    sum_ns: int
    p50_ns: int
    """Upper bounds of the buckets, 2.2 % wide, in which the quantiles of all times lie."""
    p99_ns: int
    median_ns: int
    """Of the ranks' medians, as is the next."""
    mad_ns: int
    slowest: int
    """The rank that this record is about. Of a section: that with the highest score in any section, where that is this
    one; -1: none."""
    score: float
    """How many robust deviations its median lies above the ranks'; at most 655.35 in a record."""
    excess_ns: int = 0
    """How far its median lies above the ranks'. In microseconds in a record."""
    row: int = SECTION
    """Of step_parts.Row; SECTION: a section of the user's."""
    outstanding: int = 0
    """How many ranks stand out in this row."""
    step: int = 0
    """The step at whose end the window was merged: it has the steps that the device had passed then."""


def packed(row: MergedRow) -> tuple[int, ...]:
    """What recorder.record_completed() takes behind the step."""
    excess_us = min(max(row.excess_ns // _US, 0), _EXCESS_MAX)
    value0 = min(row.p50_ns, _NS_MASK) | (row.slowest + 1) << MERGED_RANK_SHIFT
    value1 = min(row.p99_ns, _NS_MASK) | (row.row + 1) << _ROW_SHIFT
    value1 |= min(row.outstanding, _OUTSTANDING_MAX) << _OUTSTANDING_SHIFT
    return (
        row.times | excess_us << _TIMES_BITS, row.sum_ns, min(round(100 * row.score), 0xFFFF),
        value0, value1, row.median_ns, row.mad_ns,
    )  # fmt: skip


def unpacked(record: np.void, names: list[str]) -> MergedRow:
    """The row that packed() made a record of. names: the ring file's, for sections."""
    value0, value1, start = int(record["value0"]), int(record["value1"]), int(record["start_ns"])
    row = (value1 >> _ROW_SHIFT & _ROW_MASK) - 1
    return MergedRow(
        name=ROW_NAMES[row] if 0 <= row < len(ROW_NAMES) else name_of(names, int(record["name_id"])),
        times=start & ((1 << _TIMES_BITS) - 1),
        sum_ns=int(record["duration_ns"]),
        p50_ns=value0 & _NS_MASK,
        p99_ns=value1 & _NS_MASK,
        median_ns=int(record["nested_ns"]),
        mad_ns=int(record["phase_ns"]),
        slowest=(value0 >> MERGED_RANK_SHIFT) - 1,
        score=int(record["flags"]) / 100,
        excess_ns=(start >> _TIMES_BITS) * _US,
        row=row,
        outstanding=value1 >> _OUTSTANDING_SHIFT,
        step=int(record["step"]),
    )
