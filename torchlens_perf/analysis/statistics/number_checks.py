"""Checked numbers of one rank: losses, gradient norms and hashes of parameters. Pure."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchlens_perf.run.ring import GRADIENT_NORM, LOSS, Kind, lookup_name

if TYPE_CHECKING:
    import numpy.typing as npt

_MAX_KEPT = 128
"""Number of the newest hashes, of earlier hashes, and of the newest values of each name."""
_NEAR = 16
"""Number of values whose median is the usual value."""
_MIN_DEVIATIONS, _MAX_OUTLIERS = 32, 16
_OUTLIER_FACTOR, _MIN_OUTLIER_SHARE = 5.0, 0.1
"""An outlier is above the usual value by this factor of the largest earlier deviation, and by this
share of the usual value."""


class ParameterHash(NamedTuple):
    """Hash of the bits of a part of a parameter at the end of a step."""

    step: int
    check: int
    """Number of the check, which is equal on all ranks."""
    name: str
    group: int
    """A number of the ranks that share the parameter."""
    bits: int


class OutlierValue(NamedTuple):
    """A value that is far above the values before it."""

    step: int
    value: float
    usual: float
    """Median of the values before it."""


@dataclasses.dataclass
class ValueChecks:
    """Checks of one number, such as the loss."""

    count: int = 0
    not_finite: int = 0
    first_not_finite: int | None = None
    """Step of the first value that is NaN or infinite."""
    last_finite: int | None = None
    """Step of the newest finite value."""
    newest: list[float] = dataclasses.field(default_factory=list)
    """The newest finite values."""
    deviations: list[float] = dataclasses.field(default_factory=list)
    """Distances of the newest values from the values before them. Those of outliers are limited."""
    outlier_count: int = 0
    outliers: list[OutlierValue] = dataclasses.field(default_factory=list)
    """The newest outliers."""

    def add_value(self, step: int, value: float) -> None:
        self.count += 1
        if not math.isfinite(value):
            self.not_finite += 1
            if self.first_not_finite is None:
                self.first_not_finite = step
            return
        self.last_finite = step
        if self.newest:
            self._add_deviation(step, value)
        self.newest.append(value)
        del self.newest[:-_MAX_KEPT]

    def _add_deviation(self, step: int, value: float) -> None:
        near = sorted(self.newest[-_NEAR:])
        usual = near[len(near) // 2]
        limit = math.inf
        if len(self.deviations) >= _MIN_DEVIATIONS:
            largest = max(self.deviations)
            limit = max(_OUTLIER_FACTOR * largest, _MIN_OUTLIER_SHARE * abs(usual))
        if value - usual > limit:
            self.outlier_count += 1
            self.outliers.append(OutlierValue(step, value, usual))
            del self.outliers[:-_MAX_OUTLIERS]
            # An outlier must not hide the next one.
            limit /= _OUTLIER_FACTOR
        self.deviations.append(min(abs(value - usual), limit))
        del self.deviations[:-_MAX_KEPT]


@dataclasses.dataclass
class NumberChecks:
    """Checks of the whole run. The newest ones are kept, and a bounded number of earlier hashes."""

    newest: list[ParameterHash] = dataclasses.field(default_factory=list)
    earlier: list[ParameterHash] = dataclasses.field(default_factory=list)
    every: int = 1
    """Earlier checks are kept if their number is a multiple of this one."""
    hashed: int = 0
    values: dict[str, ValueChecks] = dataclasses.field(default_factory=dict)

    def add_records(self, records: npt.NDArray[np.void], names: list[str]) -> None:
        """Add NUMBERS records. All other records are ignored."""
        for record in records[records["kind"] == Kind.NUMBERS]:
            name, step = lookup_name(names, int(record["name_id"])), int(record["step"])
            if name in (LOSS, GRADIENT_NORM):
                checks = self.values.setdefault(name, ValueChecks())
                checks.add_value(step, float(record["value0"].view(np.float64)))
            else:
                check, group = divmod(int(record["value1"]), 1 << 32)
                self._add_hash(ParameterHash(step, check, name, group, int(record["value0"])))

    def _add_hash(self, new: ParameterHash) -> None:
        self.hashed += 1
        self.newest.append(new)
        if len(self.newest) > _MAX_KEPT:
            self.earlier.append(self.newest.pop(0))
        if len(self.earlier) > _MAX_KEPT:
            self.every *= 2
        self.earlier = [each for each in self.earlier if each.check % self.every == 0]
