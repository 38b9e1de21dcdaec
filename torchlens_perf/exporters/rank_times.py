"""Work and wait times of all ranks in the newest steps. Pure.

Metrics show their quantiles over the ranks. A row is the mean over the steps of one bin
(analysis/statistics/step_bins.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.verdicts.stragglers.window import BinBatch

    _Times = npt.NDArray[np.floating[Any]]

_KEPT_ROWS = 64
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
