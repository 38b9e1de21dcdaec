"""The final, immutable values that the sidecar computes.

Times are nanoseconds; `*_s` fields are seconds.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The parts of a step's time, which add up to its duration. "host" is the remainder. "tool" is the
# time in the Python hooks of this package.
PARTS = ("data", "forward", "recompute", "backward", "optimizer", "communication", "host", "tool")
# The parts that are the rank's own work: without waiting for other ranks, and without this
# package's time.
OWN_PARTS = ("data", "forward", "recompute", "backward", "optimizer", "host")
OWN_COLUMNS = [PARTS.index(part) for part in OWN_PARTS]
"""Indexes of OWN_PARTS in columns of PARTS."""


class Span(NamedTuple):
    """One closed interval of one rank, with its name and place in the step.

    A tuple, because runs have millions of spans.
    """

    kind: str
    name: str
    step: int
    start_ns: int
    """CLOCK_MONOTONIC of the rank's node."""
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
    """Tokens or samples per step, as reported by the job or counted in its batches; -1 if not
    known.
    """
    cpu_ns: npt.NDArray[np.int64]
    """Shape [steps, len(PARTS)]: CPU time of the training thread; -1 if not measured."""
    ready_ns: npt.NDArray[np.int64]
    """Shape [steps, len(PARTS)]: time that the training thread was runnable without a CPU; -1 if
    not measured.
    """
    issue_ns: npt.NDArray[np.int64]
    """Shape [steps, len(PARTS)]: the host's own time to issue the device's work; 0 in steps timed
    by the host's clock.
    """
    issue_ready_ns: npt.NDArray[np.int64]
    """`ready_ns` of the host. In steps timed by the device's clock, `ready_ns` only has the part
    that delayed the device.
    """
    lag_ns: npt.NDArray[np.int64]
    """Shape [steps, len(PARTS)]: the device's lag behind the host at the start of each part.

    It is 0 in steps timed by the host's clock.
    """

    def __len__(self) -> int:
        return len(self.step)

    def where(self, chosen: npt.NDArray[np.bool_] | slice) -> StepTable:
        return StepTable(
            **{
                field.name: getattr(self, field.name)[chosen]
                for field in dataclasses.fields(StepTable)
            }
        )

    @property
    def own_ns(self) -> npt.NDArray[np.int64]:
        """Own time: the step without blocking communication and without this package's time."""
        own: npt.NDArray[np.int64] = self.parts_ns[:, OWN_COLUMNS].sum(axis=1)
        return own

    @property
    def work_ns(self) -> npt.NDArray[np.int64]:
        """Own time without time runnable without a CPU, if that was measured."""
        work: npt.NDArray[np.int64] = self.work_by_part_ns.sum(axis=1)
        return work

    @property
    def work_by_part_ns(self) -> npt.NDArray[np.int64]:
        """Shape [steps, len(OWN_PARTS)]: `work_ns` of each part."""
        own_ns, ready_ns = self.parts_ns[:, OWN_COLUMNS], self.ready_ns[:, OWN_COLUMNS].clip(min=0)
        work: npt.NDArray[np.int64] = own_ns - ready_ns.clip(max=own_ns)
        return work


@dataclasses.dataclass(frozen=True)
class StepTrace:
    """All data of one step of one rank, for export as spans."""

    step: int
    start_ns: int
    duration_ns: int
    flags: int
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step of one attempt of the job that is exported as a trace.

    All nodes export the same ranks of it.
    """

    attempt: int
    step: int
    because: str
    """Why the step was selected: first, number, slow or verdict."""
    roles: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Exported ranks by reason, such as ("slow", (3, 17)). If empty, all ranks are exported."""
    max_spans: int = 0
    """Largest number of spans of a rank, not counting the step's own; 0 for no limit."""
    left_out: int = 0
    """Number of selected steps since the previous exported one that were dropped for lack of room.
    """

    def role(self, rank: int) -> str | None:
        """Return why the rank is exported; "" if all ranks are; None if it is not."""
        if not self.roles:
            return ""
        return next((name for name, ranks in self.roles if rank in ranks), None)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The exported ranks; () if all ranks are."""
        return tuple(sorted({rank for _, ranks in self.roles for rank in ranks}))
