"""Sums over the operators of counted steps, from OPERATORS records. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchlens_perf.run.operators import OperatorKey, Work
from torchlens_perf.run.records import StepTable
from torchlens_perf.run.ring import OTHER_NAMES, Kind, lookup_name

_MAX_NAMES = 64


class OperatorSum(NamedTuple):
    """Sum over the operators with one key in one module, in all counted steps."""

    module: str
    """The innermost timed module; "" outside all modules."""
    key: OperatorKey
    flops: int
    bytes: int
    duration_ns: int


@dataclasses.dataclass
class OperatorStatistics:
    """Operators of one process. Records must be added in sequence order."""

    steps: int = 0
    """Number of counted steps."""
    calls: int = 0
    duration_ns: int = 0
    """Host time of all operators, without those that other operators call."""
    samples: int = 0
    steps_with_samples: int = 0
    has_tokens: bool = False
    """True if the workload of steps is in tokens."""
    counted: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """By flags and module, as "70:blocks.0.mlp": operations, bytes and ns. See iter_sums()."""
    others: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """Calls and ns of operators that have no formula, by name."""
    workload: int = 0
    """Sum of the steps' workloads, see StepTable."""
    workload_steps: int = 0
    """Number of steps whose workload is known."""
    counted_workload: int = 0
    """Workload of the counted steps."""

    def add_records(
        self, records: npt.NDArray[np.void], steps: StepTable, names: list[str]
    ) -> None:
        """Add the OPERATORS records of complete steps. All other records are ignored."""
        known = steps.workload >= 0
        self.workload += int(steps.workload[known].sum())
        self.workload_steps += int(known.sum())
        for record in records[records["kind"] == Kind.OPERATORS]:
            key = OperatorKey.from_flags(int(record["flags"]))
            name = lookup_name(names, int(record["name_id"]))
            took_ns, first, second = (
                int(record[field]) for field in ("duration_ns", "value0", "value1")
            )
            if key.work == Work.OTHER:
                _add(self.others, name, second, took_ns)
            elif key.work in (Work.STEP, Work.TOKEN_STEP):
                self._add_step(int(record["step"]), steps, took_ns, first, second)
                self.has_tokens |= key.work == Work.TOKEN_STEP
            else:
                _add(self.counted, f"{record['flags']}:{name}", first, second, took_ns)
        while len(self.others) > _MAX_NAMES:
            least = min(set(self.others) - {OTHER_NAMES}, key=lambda each: self.others[each][1])
            _add(self.others, OTHER_NAMES, *self.others.pop(least))

    def _add_step(
        self, step: int, steps: StepTable, took_ns: int, samples: int, calls: int
    ) -> None:
        row = int(np.searchsorted(steps.step, step))
        if row == len(steps) or steps.step[row] != step:
            return
        self.steps += 1
        self.calls += calls
        self.duration_ns += took_ns
        self.counted_workload += max(0, int(steps.workload[row]))
        self.samples += max(0, samples - 1)
        self.steps_with_samples += samples > 0

    def iter_sums(self) -> Iterator[OperatorSum]:
        for text, sums in self.counted.items():
            flags, _, name = text.partition(":")
            module = name.removeprefix("forward ")
            yield OperatorSum(
                "" if module == OTHER_NAMES else module, OperatorKey.from_flags(int(flags)), *sums
            )

    @property
    def mean_workload(self) -> float | None:
        """Mean workload of a step; None if not known."""
        return self.workload / self.workload_steps if self.workload_steps else None

    @property
    def per_step(self) -> float:
        """Factor from sums over the counted steps to a mean step; 0 without counted steps.

        If the steps' workloads differ, work is taken to grow in proportion to the workload.
        """
        mean = self.mean_workload
        if mean is not None and self.counted_workload:
            return mean / self.counted_workload
        return 1 / self.steps if self.steps else 0.0


def _add(sums: dict[str, list[int]], key: str, *values: int) -> None:
    before = sums.setdefault(key, [0] * len(values))
    for place, value in enumerate(values):
        before[place] += value
