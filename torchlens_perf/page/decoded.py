"""A page's matrices as arrays, and what follows from them: for pictures, and who else reads a page's contents. Pure."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.page.matrix import decoded
from torchlens_perf.verdicts.stragglers.excess import relative_excess

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.page.contents import Columns, StepMatrices

    Floats = npt.NDArray[np.float64]


class Steps:
    """Contents' `steps`; its columns may be merged into fewer."""

    def __init__(self, of: StepMatrices, most_columns: int | None = None) -> None:
        """most_columns: so many at most, each of the same number of columns."""
        self._of = of
        columns = of["columns"]
        count = len(columns["first_steps"])
        self.together = 1 if most_columns is None else max(1, -(-count // most_columns))
        self.columns = _merged(columns, self.together)
        self.ranks = [place["rank"] for place in of["places"]]

    def step_s(self) -> Floats:
        """[ranks, columns], NaN where not measured; so the others."""
        return self._means(decoded(self._of["step"], len(self.ranks)))

    @functools.cached_property
    def work_s(self) -> Floats:
        return self._means(decoded(self._of["work"], len(self.ranks)))

    def excess(self) -> Floats:
        """Of each rank's work, above the median of the other ranks' that do the same, as a share of that."""
        found = np.full(self.work_s.shape, np.nan)
        populations: dict[str, list[int]] = defaultdict(list)
        for row, place in enumerate(self._of["places"]):
            populations[place["population"]].append(row)
        for rows in populations.values():
            found[rows] = relative_excess(self.work_s[rows])
        return found

    def _means(self, values: Floats) -> Floats:
        return means(values, self.together)


def means(values: Floats, together: int) -> Floats:
    """[rows, columns] of so many columns each, without those that are NaN."""
    if together == 1:
        return values
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % together)), constant_values=np.nan)
    groups = padded.reshape(len(values), -1, together)
    known = np.isfinite(groups)
    counts = known.sum(axis=2)
    sums = np.where(known, groups, 0.0).sum(axis=2)
    found: Floats = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    return found


def _merged(columns: Columns, together: int) -> Columns:
    if together == 1:
        return columns
    firsts = range(0, len(columns["first_steps"]), together)
    flags = [columns["flags"][at : at + together] for at in firsts]
    return {
        "width": columns["width"] * together,
        "first_steps": columns["first_steps"][::together],
        "started_s": columns["started_s"][::together],
        "flags": [list(dict.fromkeys(flag for each in group for flag in each)) for group in flags],
    }
