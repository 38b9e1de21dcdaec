"""Work and wait times of all ranks in the newest steps. Pure.

The times show which rank arrived last, and which rank had most work. A row is the mean over the
steps of one bin (analysis/statistics/step_bins.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.exporters.sampling.decision import LAST, MOST_WORK, NAMED, REFERENCE

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.verdicts.stragglers.placement import Placement
    from torchlens_perf.verdicts.stragglers.window import BinBatch

    _Times = npt.NDArray[np.floating[Any]]

_KEPT_ROWS = 64
MAX_NAMED = 4
QUANTILES = {"min": 0.0, "median": 0.5, "p99": 0.99, "max": 1.0}


class RankTimes:
    """Mean times in one bin of steps, as arrays by rank; NaN for times that are missing."""

    def __init__(self, ranks: int) -> None:
        self.work_ns = np.full(ranks, np.nan, np.float32)
        self.wait_ns = np.full(ranks, np.nan, np.float32)

    def set_times(self, ranks: npt.NDArray[np.int64], work_ns: _Times, wait_ns: _Times) -> None:
        most = int(ranks.max()) + 1
        if most > len(self.work_ns):
            more = np.full(most - len(self.work_ns), np.nan, np.float32)
            self.work_ns, self.wait_ns = (
                np.append(self.work_ns, more),
                np.append(self.wait_ns, more),
            )
        self.work_ns[ranks], self.wait_ns[ranks] = work_ns, wait_ns

    @property
    def known_count(self) -> int:
        """Number of ranks whose times have arrived."""
        return int(np.count_nonzero(~np.isnan(self.work_ns)))


class RecentRankTimes:
    """The newest rows of all ranks that this sidecar compares."""

    def __init__(self) -> None:
        # Rows by (bin width, bin number).
        self._rows: dict[tuple[int, int], RankTimes] = {}
        self._ranks = 0

    def add_batch(self, block: BinBatch) -> None:
        self._ranks = (
            max(self._ranks, int(block.ranks.max()) + 1) if len(block.ranks) else self._ranks
        )
        work_ns, rows = block.parts_ns.sum(axis=2), block.key.shape[1]
        if len(block.ranks) == 1:
            # Ranks of this node are added one at a time.
            for index in range(max(0, rows - _KEPT_ROWS), rows):
                self._get_or_create_row(block.width, int(block.key[0, index])).set_times(
                    block.ranks, work_ns[0, index], block.wait_ns[0, index]
                )
            return
        for key in np.unique(block.key[block.key >= 0]).tolist():
            rank, row = np.nonzero(block.key == key)
            self._get_or_create_row(block.width, key).set_times(
                block.ranks[rank], work_ns[rank, row], block.wait_ns[rank, row]
            )

    def _get_or_create_row(self, width: int, key: int) -> RankTimes:
        found = self._rows.get((width, key))
        if found is None:
            found = self._rows[width, key] = RankTimes(self._ranks)
            while len(self._rows) > _KEPT_ROWS:
                del self._rows[min(self._rows, key=lambda each: (each[1] + 1) * each[0])]
        return found

    def times_in_step(self, step: int) -> RankTimes | None:
        """Return the ranks' times in a step, merged from the bins of all widths."""
        found: RankTimes | None = None
        for (width, key), row in self._rows.items():
            if key == step // width:
                if found is None:
                    found = RankTimes(self._ranks)
                there = np.flatnonzero(~np.isnan(row.work_ns))
                if len(there):
                    found.set_times(there, row.work_ns[there], row.wait_ns[there])
        return found

    def rank_quantiles_s(self) -> dict[tuple[str, str], float]:
        """Return quantiles over ranks in seconds, with keys ("work" or "wait", name of the
        quantile).

        The quantiles are computed from the newest row that has times of the most ranks.
        """
        ordered = sorted(self._rows.items(), key=lambda item: -(item[0][1] + 1) * item[0][0])
        most = max((row.known_count for _, row in ordered), default=0)
        row = next((row for _, row in ordered if row.known_count == most and most > 1), None)
        if row is None:
            return {}
        found = {}
        for what, values in (("work", row.work_ns), ("wait", row.wait_ns)):
            there = values[~np.isnan(values)].astype(np.float64)
            for name, value in zip(
                QUANTILES, np.quantile(there, list(QUANTILES.values())), strict=True
            ):
                found[what, name] = float(value) / 1e9
        return found


def select_explaining_ranks(
    row: RankTimes | None,
    slow: Sequence[int],
    places: Mapping[int, Placement],
    within: Collection[int] | None = None,
) -> dict[str, list[int]]:
    """Return the ranks that explain the duration of a step, by role.

    The roles are: ranks reported as slow (most expensive first), the rank that arrived last, the
    rank with most work, and a rank with median work for comparison.

    row: times of the step, if known. within: ranks to which the result is limited.
    """
    found: dict[str, list[int]] = {}
    named = [rank for rank in slow if within is None or rank in within][:MAX_NAMED]
    if named:
        found[NAMED] = named
    if row is None:
        return found
    there = np.flatnonzero(~np.isnan(row.work_ns))
    if within is not None:
        there = there[np.isin(there, list(within))]
    if not len(there):
        return found
    work_ns, wait_ns = row.work_ns[there], row.wait_ns[there]
    taken = set(named)
    if wait_ns.max() > wait_ns.min():
        _add_role(found, taken, LAST, int(there[int(wait_ns.argmin())]))
    _add_role(found, taken, MOST_WORK, int(there[int(work_ns.argmax())]))
    lead = next(iter(next(iter(found.values()))))
    population = places[lead].population if lead in places else None
    others = [
        index
        for index, rank in enumerate(there.tolist())
        if rank not in taken
        and rank not in slow
        and (rank not in places or places[rank].population == population)
    ]
    if others:
        of_others = work_ns[others]
        middle = int(np.argsort(of_others, kind="stable")[(len(others) - 1) // 2])
        _add_role(found, taken, REFERENCE, int(there[others[middle]]))
    return found


def _add_role(found: dict[str, list[int]], taken: set[int], why: str, rank: int) -> None:
    if rank not in taken:
        taken.add(rank)
        found[why] = [rank]
