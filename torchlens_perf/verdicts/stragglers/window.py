"""The sliding window: arrays of the newest rows of all compared ranks. Pure.

A row is a mean over `width` steps of one rank. Rows of each rank arrive separately, and some arrive
late. A column contains the rows of all ranks for the same steps. The excess of ranks is used
repeatedly, so it is computed once for each complete column and stored.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.step_bins import OTHER_WORK, BinBatch
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.verdicts.stragglers.excess import excess_over_others
from torchlens_perf.verdicts.stragglers.own_time import (
    OwnTime,
    PartTimes,
    average_own_time,
    compute_own_time,
    find_critical_ranks,
)

# If a rank ends at most this many rows before the other ranks, it counts as ended with them.
ENDED_ROWS = 4
# A rank that is more than this many rows behind the others counts as missing, and judging does not
# wait for it.
LATE_ROWS = 64
_MANY_RANKS = 4096
# Own times are computed for at most this many rows at once, to limit the memory for many ranks.
_ROWS_AT_ONCE = 1 << 16
# The largest value of a 16-bit float is 65504.
_LONGEST_S = 6e4
# Number of bits for the row number in an integer that combines rank and row number.
_KEY_BITS = 32
_OF_HOST = ("issue_ns", "issue_ready_ns", "lag_ns")
_OF_ALL = ("duration_ns", "wait_ns", "ready_ns", "workload", "parts_ns")
_VALUES = (*_OF_ALL, *_OF_HOST)
_BY_PART = ("parts_ns", "issue_ns", "lag_ns")


def max_judged_rows(ranks: int) -> int:
    """Return the number of newest rows by which ranks are judged.

    The number is smaller for many ranks, to limit the memory.
    """
    return 256 if ranks <= _MANY_RANKS else 128


# Rows of fewer steps than the rows of the window, which wait until they can be averaged to rows of
# the window.
_NARROW = np.dtype(
    [
        *((name, np.int64) for name in ("rank", "key", "flags")),
        *((name, np.float64, len(OWN_PARTS) if name in _BY_PART else ()) for name in _VALUES),
    ]
)


def _flatten(block: BinBatch) -> npt.NDArray[np.void]:
    rank, row = np.nonzero(block.key >= 0)
    rows = np.empty(len(rank), _NARROW)
    rows["rank"] = block.ranks[rank]
    for name in ("key", "flags", *_VALUES):
        rows[name] = getattr(block, name)[rank, row]
    return rows


def _merge_rows(rows: npt.NDArray[np.void], later: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Return all rows. Rows of `later` replace rows with equal ranks and keys."""
    places, places_of_later = (each["rank"] << _KEY_BITS | each["key"] for each in (rows, later))
    return np.concatenate([rows[~np.isin(places, places_of_later)], later])


def _widen(
    rows: npt.NDArray[np.void], per: int, width: int
) -> tuple[BinBatch | None, npt.NDArray[np.void]]:
    """Return complete rows of `width` steps, each of `per` narrow rows, and the rows that remain."""
    wide = rows["key"] // per
    pairs, group, count = np.unique(
        np.stack([rows["rank"], wide]), axis=1, return_inverse=True, return_counts=True
    )
    group = group.reshape(-1)
    full = count == per
    left = rows[~full[group] & (wide > wide.max() - LATE_ROWS)]
    if not full.any():
        return None, left
    ranks, index = np.unique(pairs[0, full], return_inverse=True)
    at = pairs[1, full] - pairs[1, full].min()
    shape = (len(ranks), int(at.max()) + 1)
    key, all_flags = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    key[index, at] = pairs[1, full]
    flags = np.zeros(len(count), np.int64)
    np.bitwise_or.at(flags, group, rows["flags"])
    all_flags[index, at] = flags[full]
    values: dict[str, Any] = {}
    for name in _VALUES:
        sums = np.zeros((len(count), *rows[name].shape[1:]))
        np.add.at(sums, group, rows[name])
        values[name] = np.full((*shape, *sums.shape[1:]), np.nan)
        values[name][index, at] = sums[full] / per
    return BinBatch(width, ranks, key, all_flags, **values), left


class SlidingWindow:
    """Ring buffers [ranks, columns] of the newest rows, with a column for each row number.

    The additional last column receives the values of missing rows, which are never read.
    """

    def __init__(self, ranks: npt.NDArray[np.int64], width: int) -> None:
        """ranks: the ranks in ascending order. width: the number of steps of a row."""
        self.ranks = ranks
        self.width = width
        self.rows = max_judged_rows(len(ranks))
        self.columns = self.rows + LATE_ROWS
        shape = (len(ranks), self.columns + 1)
        self.key = np.full(shape, -1, np.int32)
        self.flags = np.zeros(shape, np.uint16)
        self.duration_ns, self.wait_ns, self.ready_ns, self.workload = (
            np.full(shape, np.nan, np.float32) for _ in range(4)
        )
        self.parts_ns = np.full((*shape, len(OWN_PARTS)), np.nan, np.float32)
        # These arrays are empty unless ranks are judged by their devices. For other ranks, own time
        # is work. 16-bit values limit the memory for many ranks.
        self._issue_s = self._lag_s = np.zeros((0, 0, 0), np.float16)
        self.no_cpu_ns = self.issue_ready_ns = self.ready_ns
        self.own_ns = np.full(shape, np.nan, np.float32)
        self.by_host_ns = np.zeros((0, 0), np.float32)
        """Own time of the parts in which the device waits for its host; empty unless ranks are
        judged by their devices."""
        self._critical = np.full(self.columns + 1, -1, np.int64)
        """Index of the critical rank of each column, see own_time.py; -1 if own time is work."""
        self.excess_ns = np.zeros(shape, np.float32)
        self.newest = np.full(len(ranks), -1, np.int64)
        # For each column: the row number for which excess was computed, and whether ranks can be
        # compared in this row.
        self._computed = np.full(self.columns, -1, np.int64)
        self._good = np.zeros(self.columns, bool)
        # Indices of the ranks for which the excess was computed.
        self._compared = np.zeros(0, np.int64)
        # Narrower rows, by width, that do not complete a row of the window yet.
        self._narrow: dict[int, npt.NDArray[np.void]] = {}

    def add_rows(self, block: BinBatch) -> None:
        """Add rows. All their ranks must be in the window.

        Narrower rows are kept until they complete a row of the window.
        """
        if block.width != self.width:
            known = self._narrow.get(block.width, np.empty(0, _NARROW))
            wide, self._narrow[block.width] = _widen(
                _merge_rows(known, _flatten(block)), self.width // block.width, self.width
            )
            if wide is None:
                return
            block = wide
        if block.issue_ns.any():
            self._create_host_arrays()
        index = np.searchsorted(self.ranks, block.ranks)[:, None]
        keys = np.where(block.key > block.key.max() - self.columns, block.key, -1)
        at = np.where(keys >= 0, keys % self.columns, self.columns)
        self.flags[index, at] = block.flags
        for name in self._kept_fields:
            getattr(self, name)[index, at] = getattr(block, name)
        if self._has_host_times:
            # An unknown lag is recorded as a very large value, which must fit into 16 bits.
            self._issue_s[index, at], self._lag_s[index, at] = (
                np.minimum(each / 1e9, _LONGEST_S) for each in (block.issue_ns, block.lag_ns)
            )
        self.own_ns[index, at] = block.parts_ns.sum(axis=2)
        self.key[index, at] = keys
        self.newest[index[:, 0]] = np.maximum(self.newest[index[:, 0]], keys.max(axis=1))
        self._critical[at[keys >= 0]] = -1
        # Excess that was computed without these rows is no longer valid.
        self._computed[at[keys >= 0]] = -1

    @property
    def _has_host_times(self) -> bool:
        return len(self._issue_s) > 0

    @property
    def _kept_fields(self) -> tuple[str, ...]:
        return (*_OF_ALL, "issue_ready_ns") if self._has_host_times else _OF_ALL

    def _create_host_arrays(self) -> None:
        """Create the arrays for ranks that are judged by their devices, if they are missing."""
        if not self._has_host_times:
            self._issue_s, self._lag_s = (
                np.zeros(self.parts_ns.shape, np.float16) for _ in range(2)
            )
            self.issue_ready_ns = np.full_like(self.ready_ns, np.nan)
            self.no_cpu_ns, self.by_host_ns = self.ready_ns.copy(), np.zeros_like(self.ready_ns)

    def with_more_ranks(self, ranks: npt.NDArray[np.int64]) -> SlidingWindow:
        grown = SlidingWindow(ranks, self.width)
        if grown.columns != self.columns:
            # With many ranks, a window has fewer columns, and the new window starts empty.
            return grown
        at = np.searchsorted(ranks, self.ranks)
        if self._has_host_times:
            grown._create_host_arrays()
            grown._issue_s[at], grown._lag_s[at] = self._issue_s, self._lag_s
        for name in ("key", "flags", "newest", "own_ns", *self._kept_fields):
            getattr(grown, name)[at] = getattr(self, name)
        grown._narrow = self._narrow
        return grown

    def newest_complete_row(self, ended: Collection[int]) -> int:
        """Return the newest row that all ranks have. Ended ranks and late ranks are ignored."""
        has_ended = np.isin(self.ranks, list(ended))
        newest = self.newest[~has_ended]
        frontier = int(
            newest[newest >= newest.max() - LATE_ROWS].min() if len(newest) else self.newest.max()
        )
        # The ranks of a job may end with different rows. They are judged up to the last row that
        # all of them have.
        just_ended = self.newest[has_ended & (self.newest >= frontier - ENDED_ROWS)]
        return int(min([frontier, *just_ended]))

    def oldest_row(self) -> int:
        keys = self.key[:, :-1]
        return int(keys[keys >= 0].min())

    def comparable_rows(
        self, first: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the numbers of comparable rows in range(first, end), and the indices of the ranks
        that have them."""
        keys = np.arange(max(first, end - self.rows, 0), end)
        present = np.flatnonzero(self.newest >= end - 1)
        if not np.array_equal(present, self._compared):
            self._compared = present
            self._computed[:] = -1
        at = keys % self.columns
        new = self._computed[at] != keys
        if new.any():
            self._compute_excess(keys[new], at[new], present)
        return keys[self._good[at]], present

    def _compute_excess(
        self,
        keys: npt.NDArray[np.int64],
        columns: npt.NDArray[np.int64],
        present: npt.NDArray[np.int64],
    ) -> None:
        """Compute the excess in the columns of these rows, and whether ranks can be compared."""
        self._computed[columns] = keys
        self.excess_ns[:, columns] = 0.0
        block = np.ix_(present, columns)
        other_work = np.bitwise_or.reduce(self.flags[block], axis=0) & OTHER_WORK
        self._good[columns] = good = (self.key[block] == keys).all(axis=0) & (other_work == 0)
        if not good.any():
            return
        if self._has_host_times:
            for some in np.array_split(
                columns[good], -(-good.sum() * len(present) // _ROWS_AT_ONCE)
            ):
                self._compute_own_time(present, some)
        if len(present) > 1:
            block = np.ix_(present, columns[good])
            self.excess_ns[block] = excess_over_others(self.own_ns[block].astype(np.float64))

    def _compute_own_time(
        self, present: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]
    ) -> None:
        """Compute own times in the columns in which all ranks have host times.

        Ranks of other nodes have no host times.
        """
        block = np.ix_(present, columns)
        known: npt.NDArray[np.bool_] = np.asarray(
            (self._issue_s[block] > 0).any(axis=2).all(axis=0)
        )
        critical = present[find_critical_ranks(self.wait_ns[block])]
        self._critical[columns] = np.where(known, critical, -1)
        own_ns, by_host = self.own_time_by_part(block)
        self.own_ns[block] = own_ns.sum(axis=2, dtype=np.float64)
        self.by_host_ns[block] = np.where(by_host, own_ns, 0).sum(axis=2)
        held_up_ns = np.maximum(
            self.issue_ready_ns[block] - _to_ns(self._lag_s[critical, columns]).sum(axis=1), 0
        )
        ready_ns = self.ready_ns[block]
        self.no_cpu_ns[block] = np.where(known, np.fmax(ready_ns, held_up_ns), ready_ns)

    def own_time_by_part(
        self, block: tuple[npt.NDArray[np.int64], ...]
    ) -> tuple[npt.NDArray[np.floating[Any]], npt.NDArray[np.bool_]]:
        """Return own time by part, and whether the device waits for its host in the part.

        Both results have the shape [ranks, columns, len(OWN_PARTS)]. block: indices of ranks and
        columns, for which comparable_rows() must have been called.
        """
        parts_ns, columns = self.parts_ns[block], block[1].ravel()
        known = self._critical[columns] >= 0
        if not known.any():
            return parts_ns, np.zeros(parts_ns.shape, bool)
        critical = self._critical[columns], columns
        own_ns, by_host = compute_own_time(
            PartTimes(parts_ns, _to_ns(self._issue_s[block]), _to_ns(self._lag_s[block])),
            PartTimes(
                self.parts_ns[critical],
                _to_ns(self._issue_s[critical]),
                _to_ns(self._lag_s[critical]),
            ),
        )
        return np.where(known[:, None], own_ns, parts_ns), by_host & known[:, None]

    def mean_own_time(self, block: tuple[npt.NDArray[np.int64], ...]) -> OwnTime | None:
        """Return the mean own time; None if ranks are not judged by their devices.

        block: indices of ranks and columns, as for own_time_by_part().
        """
        return (
            average_own_time(self.own_time_by_part(block)[0], self.parts_ns[block])
            if self._has_host_times
            else None
        )

    def launch_shares(self, block: tuple[npt.NDArray[np.int64], ...]) -> npt.NDArray[np.float64]:
        """Return the share of each rank's own time in which the device waits for its host: [ranks].

        block: indices of ranks and columns.
        """
        if not self._has_host_times:
            return np.zeros(len(block[0]))
        own_ns = self.own_ns[block].sum(axis=1, dtype=np.float64)
        return self.by_host_ns[block].sum(axis=1, dtype=np.float64) / np.maximum(own_ns, 1.0)


def _to_ns(seconds: npt.NDArray[np.float16]) -> npt.NDArray[np.float32]:
    return np.float32(1e9) * seconds
