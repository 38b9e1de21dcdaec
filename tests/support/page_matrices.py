"""Matrices of a page's contents, decoded in the same way as the page's scripts do."""

from __future__ import annotations

import base64
import functools
import zlib
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.page.contents import EncodedMatrix
from torchlens_perf.page.matrix import _FIRST, _NOT_MEASURED, _ZERO

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.page.contents import StepMatrices

    Floats = npt.NDArray[np.float64]


def decoded(matrix: EncodedMatrix, ranks: int) -> npt.NDArray[np.float64]:
    """Return the input of encoded(), exact to half of log_step.

    Missing values are NaN. Raises ValueError.
    """
    codes = np.frombuffer(zlib.decompress(base64.b64decode(matrix["codes"])), "<u2").reshape(
        ranks, -1
    )
    values: npt.NDArray[np.float64] = matrix["smallest_s"] * np.exp(
        (codes.astype(np.float64) - _FIRST) * matrix["log_step"]
    )
    values[codes == _NOT_MEASURED] = np.nan
    values[codes == _ZERO] = 0.0
    return values


class Steps:
    """The decoded matrices of a page's contents."""

    def __init__(self, of: StepMatrices) -> None:
        self._of = of
        self.ranks = [place["rank"] for place in of["places"]]

    def step_s(self) -> Floats:
        """Return step durations [ranks, columns], with NaN for missing values.

        All matrices of the class have this shape.
        """
        return decoded(self._of["step"], len(self.ranks))

    @functools.cached_property
    def work_s(self) -> Floats:
        return decoded(self._of["work"], len(self.ranks))

    def excess(self) -> Floats:
        """Return each rank's work above the median of comparable ranks, as a share of
        the median.
        """
        excess: Floats = self.work_s / decoded(self._of["others"], len(self.ranks)) - 1
        return excess
