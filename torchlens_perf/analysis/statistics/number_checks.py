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


class ParameterHash(NamedTuple):
    """Hash of the bits of a part of a parameter at the end of a step."""

    step: int
    check: int
    """Number of the check, which is equal on all ranks."""
    name: str
    group: int
    """A number of the ranks that share the parameter."""
    bits: int


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
                self._add_value(name, step, float(record["value0"].view(np.float64)))
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

    def _add_value(self, name: str, step: int, value: float) -> None:
        checks = self.values.setdefault(name, ValueChecks())
        checks.count += 1
        if math.isfinite(value):
            checks.last_finite = step
            checks.newest.append(value)
            del checks.newest[:-_MAX_KEPT]
        else:
            checks.not_finite += 1
            if checks.first_not_finite is None:
                checks.first_not_finite = step
