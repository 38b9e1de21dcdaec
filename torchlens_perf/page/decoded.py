"""A page's matrices as arrays, and the excess of each rank. Pure."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.page.matrix import decoded
from torchlens_perf.verdicts.stragglers.excess import relative_excess

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.page.contents import StepMatrices

    Floats = npt.NDArray[np.float64]


class Steps:
    """The matrices of a page's contents, decoded."""

    def __init__(self, of: StepMatrices) -> None:
        self._of = of
        self.ranks = [place["rank"] for place in of["places"]]

    def step_s(self) -> Floats:
        """[ranks, columns], NaN where not measured; so the others."""
        return decoded(self._of["step"], len(self.ranks))

    @functools.cached_property
    def work_s(self) -> Floats:
        return decoded(self._of["work"], len(self.ranks))

    def excess(self) -> Floats:
        """Of each rank's work, above the median of the other ranks' that do the same, as a share of that."""
        found = np.full(self.work_s.shape, np.nan)
        populations: dict[str, list[int]] = defaultdict(list)
        for row, place in enumerate(self._of["places"]):
            populations[place["population"]].append(row)
        for rows in populations.values():
            found[rows] = relative_excess(self.work_s[rows])
        return found
