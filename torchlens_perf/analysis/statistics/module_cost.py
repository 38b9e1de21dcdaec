"""Estimate what timing the calls of modules costs, from steps with and without it. Pure.

A step's number alone decides whether its calls are timed. Within a block of consecutive steps,
steps of both sorts therefore differ only by this cost and by chance, even if the job slows down.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import NamedTuple

import numpy as np

from torchlens_perf.analysis.statistics.step_bins import OTHER_WORK
from torchlens_perf.run.records import StepTable
from torchlens_perf.run.ring import Flag

BLOCK_STEPS = 64
# Durations are clipped to this distance from the block's median, as a share of the median.
_MAX_DEVIATION = 0.25
# A block in which more steps are clipped has several sorts of steps, such as accumulating ones.
_MIN_UNCLIPPED = 0.5
# With fewer blocks, their spread is not known well enough for an interval.
_MIN_BLOCKS = 8


class MeasuredCost(NamedTuple):
    """Measured cost of timing a step's calls of modules, in ns."""

    mean_ns: float
    error_ns: float
    """Standard error. It includes that the spread of few blocks is not known exactly."""
    steps: int
    """Number of compared steps."""


@dataclasses.dataclass
class ModuleCost:
    """Sums over blocks of steps, and the block in progress. Steps must be added in order.

    The difference d of a block's means has the weight w. Its variance is proportional to 1/w.
    """

    blocks: int = 0
    steps: int = 0
    weight: float = 0.0
    """Sum of w."""
    weighted_ns: float = 0.0
    """Sum of w d."""
    weighted_square_ns2: float = 0.0
    """Sum of w d²."""
    block: int = 0
    """Number of the block in progress: of a step's number divided by BLOCK_STEPS."""
    timed_ns: list[int] = dataclasses.field(default_factory=list)
    """Durations of the steps of the block in progress whose calls were timed."""
    untimed_ns: list[int] = dataclasses.field(default_factory=list)

    def add_steps(self, table: StepTable) -> None:
        """Add steps after the warm-up. Steps with OTHER_WORK are left out.

        Time in which the training thread was runnable but had no CPU does not count. It varies much
        more than the cost of recording.
        """
        compared = (table.flags & OTHER_WORK) == 0
        running_ns = table.duration_ns - table.ready_ns.clip(min=0).sum(axis=1)
        running_ns, blocks = running_ns[compared], table.step[compared] // BLOCK_STEPS
        starts = np.flatnonzero(np.diff(blocks, prepend=-1)).tolist()
        untimed = (table.flags[compared] & Flag.WITHOUT_MODULES) != 0
        for start, end in itertools.pairwise([*starts, len(blocks)]):
            if blocks[start] != self.block:
                self._end_block()
                self.block = int(blocks[start])
            of_block, without = running_ns[start:end], untimed[start:end]
            self.timed_ns += of_block[~without].tolist()
            self.untimed_ns += of_block[without].tolist()

    def estimate(self) -> MeasuredCost | None:
        """Return the measured cost; None with too few steps of one sort."""
        if self.blocks < _MIN_BLOCKS:
            return None
        mean_ns = self.weighted_ns / self.weight
        spread_ns2 = max(0.0, self.weighted_square_ns2 - self.weight * mean_ns**2)
        # With n - 1 degrees of freedom, the variance of the t distribution is (n - 1) / (n - 3).
        error_ns = math.sqrt(spread_ns2 / (self.blocks - 3) / self.weight)
        return MeasuredCost(mean_ns, error_ns, self.steps)

    def _end_block(self) -> None:
        timed, untimed = np.array(self.timed_ns, np.float64), np.array(self.untimed_ns, np.float64)
        self.timed_ns, self.untimed_ns = [], []
        if not len(timed) or not len(untimed):
            return
        durations_ns = np.concatenate([timed, untimed])
        median_ns = float(np.median(durations_ns))
        unclipped = float((np.abs(durations_ns / median_ns - 1) <= _MAX_DEVIATION).mean())
        if unclipped < _MIN_UNCLIPPED:
            return
        bounds_ns = (1 - _MAX_DEVIATION) * median_ns, (1 + _MAX_DEVIATION) * median_ns
        # A cost moves only the durations that are not clipped.
        difference_ns = (
            timed.clip(*bounds_ns).mean() - untimed.clip(*bounds_ns).mean()
        ) / unclipped
        weight = unclipped**2 * len(timed) * len(untimed) / (len(timed) + len(untimed))
        self.blocks += 1
        self.steps += len(timed) + len(untimed)
        self.weight += weight
        self.weighted_ns += weight * float(difference_ns)
        self.weighted_square_ns2 += weight * float(difference_ns) ** 2
