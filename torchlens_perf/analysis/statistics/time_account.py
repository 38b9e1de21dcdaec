"""Account for the time of steps: seconds by part of the step and by state of the rank. Pure.

A part is what the program did: it is one of run.records.PARTS. A state is what the rank's training
thread did meanwhile: it ran, or it waited for a CPU, for data or for other ranks. The pairs of part
and state are the cells of an account. Each moment of a step is in exactly one cell, so the cells add
up to the wall time of the steps. Everything that is said about time is a sum of cells.

Waits for a CPU are measured at the borders of the parts, unless steps are short. Where they were not
measured, `is_measured` is False and the waits are in the other state of their part. No time is moved
to a part or state in which it was not measured. Time in communication counts as a wait for other
ranks until it ends, also if the thread then waits for a CPU. Waits of the thread for a device are not
measured: they are in the state of their part.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torchlens_perf.run.records import OWN_COLUMNS, OWN_PARTS, PARTS

Floats: TypeAlias = "npt.NDArray[np.float64]"

CPU = "cpu"
"""State of a thread that is runnable but not scheduled."""
_STATE_OF_PART = {**dict.fromkeys(PARTS, "running"), "data": "data", "communication": "ranks"}
"""The state of a part while it does not wait for a CPU."""
NO_PART = ""
"""Part of waits for a CPU of which only the sum over the parts is known."""
CELLS = (*_STATE_OF_PART.items(), *((part, CPU) for part in (*OWN_PARTS, NO_PART)))
"""The part and state of each cell."""


@dataclasses.dataclass(frozen=True)
class TimeAccount:
    """Time by cell, of one step or of several. Leading axes stand for ranks and steps."""

    cells_ns: Floats
    """Shape [..., len(CELLS)]."""
    is_measured: npt.NDArray[np.bool_]
    """Shape [...]: True where waits for a CPU were measured."""

    @classmethod
    def from_parts(cls, parts_ns: npt.NDArray[Any], lack_ns: npt.NDArray[Any]) -> TimeAccount:
        """Return the account of steps, whose wall time is the sum of their parts.

        lack_ns: time without a CPU in each part. NaN and negative values stand for not measured.
        Both arguments have the shape [..., len(PARTS)].
        """
        is_measured = np.asarray(lack_ns[..., 0] >= 0)
        known_ns = np.where(is_measured[..., None], lack_ns, 0)
        cells_ns = np.zeros((*parts_ns.shape[:-1], len(CELLS)))
        cpu_ns = np.minimum(known_ns, parts_ns)[..., OWN_COLUMNS]
        cells_ns[..., : len(PARTS)] = parts_ns
        cells_ns[..., OWN_COLUMNS] -= cpu_ns
        cells_ns[..., len(PARTS) : -1] = cpu_ns
        return cls(cells_ns, is_measured)

    @classmethod
    def from_work(
        cls,
        work_ns: Floats,
        lack_ns: Floats,
        tool_ns: Floats | float,
        communication_ns: Floats | float,
    ) -> TimeAccount:
        """Return the account of steps whose waits for a CPU are only known as their sum, `lack_ns`.

        work_ns: [..., len(OWN_PARTS)], time of each own part without these waits. lack_ns: NaN where
        the waits were not measured and are in the parts.
        """
        cells_ns = np.zeros((*work_ns.shape[:-1], len(CELLS)))
        cells_ns[..., OWN_COLUMNS] = work_ns
        cells_ns[..., PARTS.index("tool")] = tool_ns
        cells_ns[..., PARTS.index("communication")] = communication_ns
        cells_ns[..., -1] = np.nan_to_num(lack_ns)
        return cls(cells_ns, np.isfinite(lack_ns))

    def sum_ns(self, parts: Sequence[str] = (), states: Sequence[str] = ()) -> Any:
        """Return the time in these parts and states; () stands for all. That of one step is a float,
        as reports need it."""
        found_ns = self.cells_ns[..., find_cells(tuple(parts), tuple(states))].sum(axis=-1)
        return found_ns if self.is_measured.ndim else float(found_ns)

    @property
    def wall_ns(self) -> Any:
        """Wall time: the sum of all cells."""
        return self.sum_ns()

    @property
    def parts_ns(self) -> dict[str, Any]:
        """Time of each part, in all states."""
        return {part: self.sum_ns([part]) for part in PARTS}

    def uses_ns(self, *, divided: bool = True) -> dict[str, Any]:
        """Return the time of each part without its waits for a CPU, and these waits as CPU.

        divided: False leaves the waits in their parts.
        """
        if not divided:
            return {**self.parts_ns, CPU: 0.0}
        return {
            **{part: self.sum_ns([part], [state]) for part, state in _STATE_OF_PART.items()},
            CPU: self.sum_ns(states=[CPU]),
        }

    def select(self, chosen: Any) -> TimeAccount:
        """Return the account of chosen ranks and steps."""
        return TimeAccount(self.cells_ns[chosen], self.is_measured[chosen])


def mean_by_part(steps: Iterable[Mapping[str, float]]) -> Floats:
    """Return the mean time of each part; a missing part has taken no time."""
    values = np.array([[each.get(part, 0.0) for part in PARTS] for each in steps])
    return values.mean(axis=0)


@functools.cache
def find_cells(parts: tuple[str, ...], states: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """Return the indexes of the cells in these parts and states; () stands for all."""
    return np.array(
        [
            index
            for index, (part, state) in enumerate(CELLS)
            if (not parts or part in parts) and (not states or state in states)
        ],
        np.int64,
    )
