"""Times of single steps of all ranks, from which lost time and gains are computed. Pure."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.run.records import OWN_PARTS

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

USES = (*OWN_PARTS, "cpu", "tool", "communication")
"""Uses of a step's time, which add up to the step. "cpu" is CPU contention, which the own parts
exclude. "communication" is the time blocked in communication."""
OWN = slice(0, USES.index("communication"))
"""All uses but communication: the time for which other ranks may wait."""


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Rows of one or several steps that all ranks have made, without unusual steps."""

    ranks: tuple[int, ...]
    """Ranks in ascending order."""
    populations: tuple[str, ...]
    """The population of each rank. Ranks of one population do the same work."""
    steps: npt.NDArray[np.int64]
    """First step of each row."""
    width: int
    """Number of steps in a row. With more than one step, times are means."""
    uses_ns: Floats
    """Times by use: [ranks, rows, len(USES)]."""
    workload: Floats | None = None
    """Elements of the step's batches: [ranks, rows]. NaN: not known."""
    pipelined: bool = False
    """True if the ranks are stages of a pipeline, which waits for its slowest stage in each
    micro-batch."""

    def correlate_workload(self) -> float | None:
        """Return the correlation of own time with workload, as differences from the ranks' mean.

        Return None if all ranks have the same workload in each step, or if it is not known.
        """
        if self.workload is None or not np.isfinite(self.workload).all():
            return None
        work, own = (each - each.mean(axis=0) for each in (self.workload, self.own_ns))
        scale = float(np.sqrt((work**2).sum() * (own**2).sum()))
        return float((work * own).sum()) / scale if scale else None

    @functools.cached_property
    def own_ns(self) -> Floats:
        """Time without communication: [ranks, rows]."""
        total: Floats = self.uses_ns[..., OWN].sum(axis=2)
        return total


def fill_contention(durations_ns: Floats, contention_ns: Floats, sampled: float | None) -> Floats:
    """Return the CPU contention of each step, also of steps in which it was not measured (NaN).

    durations_ns, contention_ns: [ranks, steps]. sampled: share of contention in one-second samples.

    Short steps, and steps with many phases, are not measured. They get the share of the rank's
    measured steps, if most steps are measured, otherwise the sampled share.
    """
    measured = np.isfinite(contention_ns)
    of_measured = np.where(measured, contention_ns, 0).sum(axis=1) / np.maximum(
        1, (durations_ns * measured).sum(axis=1)
    )
    share = np.where(measured.mean(axis=1) >= 0.5, of_measured, sampled or 0.0)
    return np.where(measured, contention_ns, durations_ns * share[:, None])


def split_contention(parts_ns: Floats, contention_ns: Floats, typical_ns: Floats) -> Floats:
    """Return parts without CPU contention.

    parts_ns: [..., parts]. contention_ns: [...], contention of all parts together. typical_ns:
    [parts], the parts in which contention usually occurs. What does not fit into these parts is
    subtracted from all parts in proportion to their times.
    """
    contention_ns = np.minimum(contention_ns, parts_ns.sum(axis=-1))
    share = typical_ns / typical_ns.sum() if typical_ns.any() else typical_ns
    taken = np.minimum(parts_ns, contention_ns[..., None] * share)
    left = parts_ns - taken
    rest = contention_ns - taken.sum(axis=-1)
    scale = np.divide(rest, left.sum(axis=-1), out=np.zeros_like(rest), where=rest > 0)
    without: Floats = left * (1 - scale[..., None])
    return without
