"""Immutable values that the sidecar computes from records: spans, step tables and traces.

Times are nanoseconds. Fields named `*_s` are seconds.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The parts of a step, whose times add up to its duration. "tool" is the time in this package's
# Python hooks. "host" is the rest.
PARTS = ("data", "forward", "recompute", "backward", "optimizer", "communication", "host", "tool")
# The parts that are a rank's own work, without waiting for other ranks and this package's time.
OWN_PARTS = ("data", "forward", "recompute", "backward", "optimizer", "host")
OWN_COLUMNS = [PARTS.index(part) for part in OWN_PARTS]
"""Indexes of OWN_PARTS in PARTS."""
PASSES = "passes without gradients"
WITHOUT_GRADIENTS = f"forward {PASSES}"
"""Name of these passes in a loop that trains, whichever module runs them: a reference, teacher or EMA
network, or the model itself in an evaluation, a rollout or sampling. Among the modules, their name
is PASSES."""


class Span(NamedTuple):
    """A named time interval within a step of one rank.

    This class is a tuple because runs have millions of spans.
    """

    kind: str
    name: str
    step: int
    start_ns: int
    """Start by CLOCK_MONOTONIC of the rank's node."""
    duration_ns: int
    depth: int
    flags: int
    value0: int
    value1: int


@dataclasses.dataclass(frozen=True)
class StepTable:
    """Finished steps of one rank as columns of equal length, in the order of their ends."""

    step: npt.NDArray[np.int64]
    start_ns: npt.NDArray[np.int64]
    duration_ns: npt.NDArray[np.int64]
    parts_ns: npt.NDArray[np.int64]
    """Shape [steps, len(PARTS)]."""
    memory_bytes: npt.NDArray[np.int64]
    micro_steps: npt.NDArray[np.int64]
    flags: npt.NDArray[np.int64]
    workload: npt.NDArray[np.int64]
    """Tokens or samples per step that the job has reported or its batches contain; -1 if not known.
    """
    cpu_ns: npt.NDArray[np.int64]
    """Shape [steps, len(PARTS)]: CPU time of the training thread; -1 if not measured."""
    ready_ns: npt.NDArray[np.int64]
    """Shape [steps, len(PARTS)]: time that the training thread was runnable but had no CPU; -1 if
    not measured. In steps timed by the device's clock, only time that delayed the device counts.
    """
    issue_ns: npt.NDArray[np.int64]
    """Shape [steps, len(PARTS)]: time that the host spent on issuing the device's work; 0 in steps
    timed by the host's clock.
    """
    issue_ready_ns: npt.NDArray[np.int64]
    """Shape [steps, len(PARTS)]: all time that the training thread was runnable but had no CPU."""
    lag_ns: npt.NDArray[np.int64]
    """Shape [steps, len(PARTS)]: the device's lag behind the host at the start of each part; 0 in
    steps timed by the host's clock.
    """

    def __len__(self) -> int:
        return len(self.step)

    def select_rows(self, chosen: npt.NDArray[np.bool_] | slice) -> StepTable:
        return StepTable(
            **{
                field.name: getattr(self, field.name)[chosen]
                for field in dataclasses.fields(StepTable)
            }
        )

    @property
    def own_ns(self) -> npt.NDArray[np.int64]:
        """Own time: each step's duration without blocking communication and this package's time."""
        return self.parts_ns[:, OWN_COLUMNS].sum(axis=1)

    @property
    def work_ns(self) -> npt.NDArray[np.int64]:
        """Work: own time without the time that the training thread was runnable but had no CPU."""
        return self.work_by_part_ns.sum(axis=1)

    @property
    def work_by_part_ns(self) -> npt.NDArray[np.int64]:
        """Work of each own part, with the shape [steps, len(OWN_PARTS)]."""
        own_ns, ready_ns = self.parts_ns[:, OWN_COLUMNS], self.ready_ns[:, OWN_COLUMNS].clip(min=0)
        return own_ns - ready_ns.clip(max=own_ns)


@dataclasses.dataclass(frozen=True)
class StepTrace:
    """One step of one rank with all of its spans, for export as a trace."""

    step: int
    start_ns: int
    duration_ns: int
    flags: int
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step of one attempt of the job that a node exports as a trace."""

    attempt: int
    step: int
    because: str
    """Reason why the step was selected: first, number, slow or verdict."""
    left_out: int = 0
    """Number of selected steps since the last exported step that were dropped for lack of space."""
