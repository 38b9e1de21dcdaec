"""The values that flow from the sidecar on: finished, frozen. Times are nanoseconds; `*_s` fields are seconds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# What a step's time is divided into; a step's parts add up to its duration. "host" is what is left over, "tool" is the
# time in our own Python hooks.
PARTS = ("data", "forward", "recompute", "backward", "optimizer", "communication", "host", "tool")
# The parts that are the rank's own work: all but waiting for other ranks, and us.
OWN_PARTS = ("data", "forward", "recompute", "backward", "optimizer", "host")
OWN_COLUMNS = [PARTS.index(part) for part in OWN_PARTS]
"""Where they are in columns of PARTS."""


class Span(NamedTuple):
    """One closed interval of one rank, with its name and place in the step. A tuple: runs have millions."""

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
    """Tokens or samples, as the job reported them or as its batches hold them; -1 where not known."""
    cpu_ns: npt.NDArray[np.int64]
    """Shape [steps, len(PARTS)]: CPU time of the training thread; -1 where it was not measured."""
    ready_ns: npt.NDArray[np.int64]
    """Shape [steps, len(PARTS)]: time that the training thread was ready and had no CPU; -1 where not measured."""
    issue_ns: npt.NDArray[np.int64]
    """Shape [steps, len(PARTS)]: the host's own time to issue the device's work; 0 in steps by the host's clock."""
    issue_ready_ns: npt.NDArray[np.int64]
    """`ready_ns` of the host. In steps by the device's clock, `ready_ns` has only what held up the device."""
    lag_ns: npt.NDArray[np.int64]
    """Shape [steps, len(PARTS)]: the device's lag behind the host at the begin of each part; 0 there too."""

    def __len__(self) -> int:
        return len(self.step)

    def where(self, chosen: npt.NDArray[np.bool_] | slice) -> StepTable:
        return StepTable(**{field.name: getattr(self, field.name)[chosen] for field in dataclasses.fields(StepTable)})

    @property
    def own_ns(self) -> npt.NDArray[np.int64]:
        """Own time: the step without the time blocked in communication and without ours."""
        own: npt.NDArray[np.int64] = self.parts_ns[:, OWN_COLUMNS].sum(axis=1)
        return own

    @property
    def work_ns(self) -> npt.NDArray[np.int64]:
        """Own time without the part of it in which the thread was ready and had no CPU, where that was measured."""
        work: npt.NDArray[np.int64] = self.work_by_part_ns.sum(axis=1)
        return work

    @property
    def work_by_part_ns(self) -> npt.NDArray[np.int64]:
        """Shape [steps, len(OWN_PARTS)]: the same of each part."""
        own_ns, ready_ns = self.parts_ns[:, OWN_COLUMNS], self.ready_ns[:, OWN_COLUMNS].clip(min=0)
        work: npt.NDArray[np.int64] = own_ns - ready_ns.clip(max=own_ns)
        return work


@dataclasses.dataclass(frozen=True)
class StepTrace:
    """Everything of one step of one rank, for export as spans."""

    step: int
    start_ns: int
    duration_ns: int
    flags: int
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step of one attempt of the job that is sent as a trace. All nodes send the same of it."""

    attempt: int
    step: int
    because: str
    """first, number, slow or verdict."""
    roles: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The ranks that are sent, by why: ("slow", (3, 17)). Without any, all ranks are."""
    max_spans: int = 0
    """That a rank may have in it, besides its step's own; 0: any number."""
    left_out: int = 0
    """Steps before it that were to be sent, and for which there was no room since the last one that was."""

    def role(self, rank: int) -> str | None:
        """Why the rank is sent; "" where all are; None where it is not."""
        if not self.roles:
            return ""
        return next((name for name, ranks in self.roles if rank in ranks), None)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that are sent; () where all are."""
        return tuple(sorted({rank for _, ranks in self.roles for rank in ranks}))
