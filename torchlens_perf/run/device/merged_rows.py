"""Encode statistics that were merged over ranks on the device. Pure functions.

A MERGED record stores one row of one window. A window is a number of successive steps.

A row describes a device section of the user or a part of the device's steps. A section has one
record per window. A part has one record for the slowest rank and one for each outlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torchlens_perf.run.device.step_parts import ROW_NAMES
from torchlens_perf.run.ring import MERGED_RANK_SHIFT, lookup_name

if TYPE_CHECKING:
    import numpy as np

SECTION = -1
# A rank is an outlier if it is this many robust deviations above the median of the ranks.
STANDS_OUT = 5.0
# Largest number of outliers that get a record.
MAX_RANKS = 8
_NS_MASK = (1 << MERGED_RANK_SHIFT) - 1
_TIMES_BITS, _EXCESS_MAX = 32, (1 << 31) - 1
_ROW_SHIFT, _ROW_MASK = MERGED_RANK_SHIFT, 15
_OUTSTANDING_SHIFT, _OUTSTANDING_MAX = MERGED_RANK_SHIFT + 4, (1 << 15) - 1
_US = 1000


class MergedRow(NamedTuple):
    """One row of one window, with the values of one rank."""

    name: str
    times: int
    """Number of measured times over all ranks."""
    sum_ns: int
    p50_ns: int
    """Median of all times over all ranks. Quantiles are rounded up to the bound of a bucket that is
    2.2 % wide.
    """
    p99_ns: int
    median_ns: int
    """Median of the ranks' medians."""
    mad_ns: int
    """Median absolute deviation of the ranks' medians."""
    slowest: int
    """The rank that this record describes; -1 for no rank.

    Of all sections, only the one with the highest score names its rank.
    """
    score: float
    """Number of robust deviations of the rank's median above the median of the ranks. A record
    stores at most 655.35.
    """
    excess_ns: int = 0
    """Difference between the rank's median and the median of the ranks. A record stores
    microseconds.
    """
    row: int = SECTION
    """A step_parts.StepPart, or SECTION for a section of the user."""
    outstanding: int = 0
    """Number of ranks that are outliers in this row."""
    step: int = 0
    """Step at whose end the window was merged. The window consists of the steps that the device had
    finished by that time.
    """


def pack_row(row: MergedRow) -> tuple[int, ...]:
    """Encode a row as the arguments of recorder.record_completed() after the step."""
    excess_us = min(max(row.excess_ns // _US, 0), _EXCESS_MAX)
    value0 = min(row.p50_ns, _NS_MASK) | (row.slowest + 1) << MERGED_RANK_SHIFT
    value1 = min(row.p99_ns, _NS_MASK) | (row.row + 1) << _ROW_SHIFT
    value1 |= min(row.outstanding, _OUTSTANDING_MAX) << _OUTSTANDING_SHIFT
    return (
        row.times | excess_us << _TIMES_BITS, row.sum_ns, min(round(100 * row.score), 0xFFFF),
        value0, value1, row.median_ns, row.mad_ns,
    )  # fmt: skip


def unpack_row(record: np.void, names: list[str]) -> MergedRow:
    """Decode the row that pack_row() stored in a record.

    names: names in the ring file, which include those of sections.
    """
    value0, value1, start = int(record["value0"]), int(record["value1"]), int(record["start_ns"])
    row = (value1 >> _ROW_SHIFT & _ROW_MASK) - 1
    return MergedRow(
        name=(
            ROW_NAMES[row]
            if 0 <= row < len(ROW_NAMES)
            else lookup_name(names, int(record["name_id"]))
        ),
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
