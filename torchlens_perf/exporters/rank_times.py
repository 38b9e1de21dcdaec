"""Work and wait times of all ranks in the newest steps. Pure.

Metrics show their quantiles over the ranks. A row is the mean over the steps of one bin
(analysis/statistics/step_bins.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.analysis.statistics.step_bins import BinBatch

_KEPT_ROWS = 64
_QUANTILES = {"min": 0.0, "median": 0.5, "p99": 0.99, "max": 1.0}


class RecentRankTimes:
    """The newest rows of all ranks that this sidecar compares."""

    def __init__(self) -> None:
        # By (bin width, bin number): work and wait of each rank in ns; NaN for missing times.
        self._rows: dict[tuple[int, int], npt.NDArray[np.float32]] = {}
        self._ranks = 0

    def add_batch(self, block: BinBatch) -> None:
        self._ranks = max(self._ranks, int(block.ranks.max(initial=-1)) + 1)
        times_ns = np.stack([block.parts_ns.sum(axis=2), block.wait_ns])
        keys = np.unique(block.key[block.key >= 0])
        for key in keys[-_KEPT_ROWS:].tolist():
            rank, column = np.nonzero(block.key == key)
            row = self._get_or_create_row(block.width, key)
            row[:, block.ranks[rank]] = times_ns[:, rank, column]

    def _get_or_create_row(self, width: int, key: int) -> npt.NDArray[np.float32]:
        """Return a row with a place for each known rank, and drop the oldest row if there are many."""
        known = self._rows.get((width, key), np.zeros((2, 0), np.float32))
        if known.shape[1] == self._ranks:
            return known
        row = self._rows[width, key] = np.full((2, self._ranks), np.nan, np.float32)
        row[:, : known.shape[1]] = known
        while len(self._rows) > _KEPT_ROWS:
            del self._rows[min(self._rows, key=_end_of_bin)]
        return row

    def rank_quantiles_s(self) -> dict[tuple[str, str], float]:
        """Return quantiles over ranks in seconds, with keys ("work" or "wait", name of the
        quantile).

        The quantiles are computed from the newest row that has times of the most ranks.
        """
        known = {key: int((~np.isnan(row[0])).sum()) for key, row in self._rows.items()}
        most = max(known.values(), default=0)
        if most < 2:
            return {}
        newest = max((key for key in known if known[key] == most), key=_end_of_bin)
        times_ns = self._rows[newest].astype(np.float64)
        quantiles_s = np.nanquantile(times_ns, list(_QUANTILES.values()), axis=1) / 1e9
        return {
            (what, name): value
            for what, of_what in zip(("work", "wait"), quantiles_s.T.tolist(), strict=True)
            for name, value in zip(_QUANTILES, of_what, strict=True)
        }


def _end_of_bin(key: tuple[int, int]) -> int:
    width, number = key
    return (number + 1) * width
