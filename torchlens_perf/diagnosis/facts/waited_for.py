"""Find the rank that all others waited for in long steps, by comparing the parts of each rank's
step. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.step_mix import Bin, StepMix, TypicalStep, classify_steps
from torchlens_perf.analysis.statistics.time_account import CPU
from torchlens_perf.run.records import PARTS

_WAITS = ("communication", "backward")
"""Parts in which a rank waits for others.

Autograd hooks (such as DDP's) wait inside the backward pass.
"""
MAX_STEPS = 7
"""Largest number of steps of a class to compare.

If there are more, the oldest may be lost (step_mix.py).
"""
# A rank takes part in a long step if it has at least this share of the class's additional time.
_MIN_SHARE = 0.5


class AwaitedRankFinder:
    """Finds ranks that all others waited for. Each rank's typical step is computed on first use."""

    def __init__(self, mixes: Mapping[int, StepMix]) -> None:
        """mixes: each rank's steps."""
        self._mixes = mixes
        self._typical: dict[int, TypicalStep | None] = {}

    def find_awaited_rank(self, steps: Sequence[int], more_ns: float) -> int | None:
        """Return the rank that all others waited for in these steps; None if it differs between
        steps.

        more_ns: additional time of these steps over the typical step.
        """
        if len(self._mixes) < 2 or not steps:
            return None
        found = {self._find_in_one_step(step, more_ns) for step in steps}
        return found.pop() if len(found) == 1 else None

    def find_part(self, steps: Sequence[int], rank: int) -> str:
        """Return the part with most of the additional time of the rank that was found in these steps."""
        more = (self._excess_over_typical(step, rank) for step in steps)
        return PARTS[int(np.argmax(sum(each for each in more if each is not None)))]

    def _find_in_one_step(self, step: int, more_ns: float) -> int | None:
        busy: list[int] = []
        for rank in self._mixes:
            more = self._excess_over_typical(step, rank)
            if more is None or more.sum() < _MIN_SHARE * more_ns:
                return None
            if PARTS[int(np.argmax(more))] in _WAITS:
                continue
            busy.append(rank)
            its = self._find_bin(step, rank)
            # CPU contention explains most of the additional time.
            if its is not None and its.account.sum_ns(states=[CPU]) >= _MIN_SHARE * more_ns:
                return None
        return busy[0] if len(busy) == 1 else None

    def _find_bin(self, step: int, rank: int) -> Bin | None:
        """Return the bin of a rank that contains this step; None if the step was dropped."""
        return next((each for each in self._mixes[rank].bins.values() if step in each.steps), None)

    def _excess_over_typical(self, step: int, rank: int) -> npt.NDArray[np.float64] | None:
        """Return the excess of each part over the rank's typical step in ns; None if unknown."""
        its = self._find_bin(step, rank)
        if its is None:
            return None
        if rank not in self._typical:
            self._typical[rank] = classify_steps([self._mixes[rank]]).typical
        typical = self._typical[rank]
        if typical is None:
            return None
        return np.array(
            [
                own_ns - typical.account.sum_ns([part])
                for part, own_ns in its.account.parts_ns.items()
            ]
        )
