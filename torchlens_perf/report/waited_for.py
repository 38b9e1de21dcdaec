"""The rank that all others waited for in long steps, found by what each rank did in them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchlens_perf.analysis.statistics.step_mix import Bin, StepMix, TypicalStep, classify
from torchlens_perf.run.records import PARTS

if TYPE_CHECKING:
    import numpy.typing as npt

_WAITS = ("communication", "backward")
"""Parts in which a rank waits for others. Autograd hooks wait inside of the backward pass."""
MAX_STEPS = 7
"""Of a class: of more, the oldest numbers may be missing (step_mix.py)."""
_MUCH = 0.5  # of a class's additional time, that a rank has to have in the same step


class WaitedFor(NamedTuple):
    """A rank that all others waited for."""

    rank: int
    part: str
    """What took it longer."""


class Waits:
    """Looks for such ranks in the steps of a run. Each rank's typical step is made once, when it is asked for."""

    def __init__(self, mixes: Mapping[int, StepMix]) -> None:
        """mixes: each rank's steps."""
        self._mixes = mixes
        self._typical: dict[int, TypicalStep | None] = {}

    def waited_for(self, steps: Sequence[int], more_ns: float) -> WaitedFor | None:
        """Return the rank for which all others waited in each of these steps; None where it is not one and the same.

        more_ns: how much longer than the typical step they took.
        """
        if len(self._mixes) < 2 or not steps:
            return None
        found = {self._in_step(step, more_ns) for step in steps}
        return found.pop() if len(found) == 1 else None

    def _in_step(self, step: int, more_ns: float) -> WaitedFor | None:
        busy = []
        for rank in self._mixes:
            more = self._more(step, rank)
            if more is None or more.sum() < _MUCH * more_ns:
                return None
            part = PARTS[int(np.argmax(more))]
            if part not in _WAITS:
                busy.append(WaitedFor(rank, part))
                if self._lacks_cpu(step, rank, more_ns):
                    return None
        return busy[0] if len(busy) == 1 else None

    def _bin(self, step: int, rank: int) -> Bin | None:
        """Return the steps of a rank that a step is counted with; None where it is not known any more."""
        return next((each for each in self._mixes[rank].bins.values() if step in each.steps), None)

    def _lacks_cpu(self, step: int, rank: int, more_ns: float) -> bool:
        """Return whether a rank had no CPU for most of what a step took longer."""
        its = self._bin(step, rank)
        if its is None or not its.measured:
            return False
        return float(its.ready_ns.sum()) / its.measured >= _MUCH * more_ns

    def _more(self, step: int, rank: int) -> npt.NDArray[np.float64] | None:
        """How much longer each part of a step took than in the rank's typical step, in ns; None: not known."""
        its = self._bin(step, rank)
        if its is None:
            return None
        if rank not in self._typical:
            self._typical[rank] = classify([self._mixes[rank]]).typical
        typical = self._typical[rank]
        if typical is None:
            return None
        return np.asarray(its.parts_ns / its.count - np.array([typical.parts_ns[part] for part in PARTS]))
