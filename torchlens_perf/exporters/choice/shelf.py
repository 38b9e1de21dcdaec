"""The records of the newest steps of a node's ranks, until it is decided which of them are sent as traces. Pure."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.steps import span_count, step_traces

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.clock import Anchor
    from torchlens_perf.run.records import StepTable, StepTrace

MAX_BYTES = 16 << 20  # mostly of arrays that wait for the next segment anyway


@dataclasses.dataclass(frozen=True)
class Shelved:
    """Whole steps of one process."""

    key: str
    """Of the process, Identity.key."""
    rank: int
    anchor: Anchor
    records: npt.NDArray[np.void]
    later: npt.NDArray[np.void]
    """What came after them, and may be about them."""
    names: list[str]
    steps: StepTable

    def trace(self, step: int) -> StepTrace | None:
        found = step_traces(self.records, self.names, {step}, self.later)
        return found[0] if found else None

    def spans(self, step: int) -> int:
        """How many spans a step has, its own left out."""
        return span_count(self.records, step) + span_count(self.later, step)


class Shelf:
    """Records as they come; the oldest go when there are too many bytes of them."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: deque[Shelved] = deque()

    def add(self, shelved: Shelved) -> None:
        """Steps of a process, in their order; at least one."""
        self._kept.append(shelved)
        self._bytes += _bytes(shelved)
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            self._bytes -= _bytes(self._kept.popleft())

    def of(self, step: int) -> list[Shelved]:
        """What is there of a step, by rank at most one: that of the process that came last."""
        found: dict[int, Shelved] = {}
        for each in self._kept:
            if int(each.steps.step[0]) <= step <= int(each.steps.step[-1]) and (each.steps.step == step).any():
                found[each.rank] = each
        return [found[rank] for rank in sorted(found)]

    def spans(self, step: int) -> dict[int, int]:
        """By rank whose records of the step are there, how many spans it has, its step's own left out."""
        return {each.rank: each.spans(step) for each in self.of(step)}


def _bytes(shelved: Shelved) -> int:
    return int(shelved.records.nbytes + shelved.later.nbytes)
