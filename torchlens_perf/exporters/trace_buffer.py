"""A buffer that keeps the newest steps until the traced steps are selected. Pure."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.steps import build_step_traces, count_spans

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.clock import Anchor
    from torchlens_perf.run.records import StepTable, StepTrace

# Most of the buffered arrays are in memory anyway until they are written to disk.
MAX_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class BufferedSteps:
    """Complete steps of one process, with their records."""

    key: str
    """Identity.key of the process."""
    rank: int
    anchor: Anchor
    records: npt.NDArray[np.void]
    later: npt.NDArray[np.void]
    """Records that arrived after these steps. Some of these records may belong to the steps."""
    names: list[str]
    steps: StepTable

    def has_step(self, step: int) -> bool:
        is_near = int(self.steps.step[0]) <= step <= int(self.steps.step[-1])
        return is_near and bool((self.steps.step == step).any())

    def build_traces(self, step: int) -> tuple[StepTrace, ...]:
        """Return the trace of a step, if all of its records are here."""
        return tuple(build_step_traces(self.records, self.names, {step}, self.later))

    @property
    def size_bytes(self) -> int:
        return int(self.records.nbytes + self.later.nbytes)

    def count_spans(self, step: int) -> int:
        """Return the number of spans of a step, without the span of the step itself."""
        return count_spans(self.records, step) + count_spans(self.later, step)


class TraceBuffer:
    """A queue of steps that drops its oldest entries when it exceeds a number of bytes."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: deque[BufferedSteps] = deque()

    def append_steps(self, shelved: BufferedSteps) -> None:
        """Append at least one step of a process. Steps must be in order."""
        self._kept.append(shelved)
        self._bytes += shelved.size_bytes
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            self._bytes -= self._kept.popleft().size_bytes

    def entries_with_step(self, step: int) -> list[BufferedSteps]:
        """Return for each rank the newest entry that contains a step."""
        found = {each.rank: each for each in self._kept if each.has_step(step)}
        return [found[rank] for rank in sorted(found)]

    def count_spans_by_rank(self, step: int) -> dict[int, int]:
        """Return the number of spans of a step by rank, without the span of the step itself."""
        return {each.rank: each.count_spans(step) for each in self.entries_with_step(step)}
