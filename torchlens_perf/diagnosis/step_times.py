"""Times of single steps of all ranks, from which lost time and gains are computed. Pure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.time_account import CPU, TimeAccount
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.stragglers.own_time import find_critical_ranks
from torchlens_perf.verdicts.stragglers.placement import STAGES, Placement

Floats = npt.NDArray[np.float64]


USES = (*OWN_PARTS, CPU, "tool", "communication")
"""Uses of a step's time, which add up to the step. The own parts exclude measured waits for a CPU.
"communication" is the time blocked in communication."""
OWN = slice(0, USES.index("communication"))
"""All uses but communication: the time for which other ranks may wait."""
MIN_ROWS = 8
"""Fewest rows from which a critical path is computed."""
_MAX_ROWS, _MAX_RANK_ROWS = 256, 1 << 18


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
    account: TimeAccount
    """Time of each rank in each row."""
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
    def critical(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Index of the critical rank of each row, for which the others wait, and of the row."""
        ranks = find_critical_ranks(self.account.sum_ns(["communication"]))
        return ranks, np.arange(len(self.steps))

    def select_since(self, step: int) -> StepTimes:
        """Return the rows from a step on; all rows if these are fewer than MIN_ROWS."""
        rows = self.steps >= step
        if rows.sum() < MIN_ROWS:
            return self
        return dataclasses.replace(
            self,
            steps=self.steps[rows],
            account=self.account.select(np.s_[:, rows]),
            workload=None if self.workload is None else self.workload[:, rows],
        )

    @functools.cached_property
    def uses_ns(self) -> Floats:
        """Times by use: [ranks, rows, len(USES)]."""
        found = self.account.uses_ns()
        return np.stack([found[use] for use in USES], axis=-1)

    @functools.cached_property
    def own_ns(self) -> Floats:
        """Time without communication: [ranks, rows]."""
        return self.uses_ns[..., OWN].sum(axis=2)


def read_judged_rows(detector: StragglerDetector) -> StepTimes | None:
    """Return the newest rows by which all ranks are judged; None with fewer than MIN_ROWS.

    They need no file, and are on node 0 for the ranks of all nodes.
    """
    places = detector.places
    found = detector.read_newest_rows(min(_MAX_ROWS, _MAX_RANK_ROWS // max(1, len(places))))
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found) or len({each.width for each in known}) > 1:
        return None
    keys = functools.reduce(np.intersect1d, [each.key for each in known])
    if len(keys) < MIN_ROWS:
        return None
    accounts = []
    for each in known:
        row = np.isin(each.key, keys)
        duration, lack, wait = (
            values[:, row].astype(np.float64)
            for values in (each.duration_ns, each.ready_ns, each.wait_ns)
        )
        parts = each.parts_ns[:, row].astype(np.float64)
        tool = np.maximum(duration - parts.sum(axis=2) - np.nan_to_num(lack) - wait, 0)
        accounts.append(TimeAccount.from_work(parts, lack, tool, wait))
    ranks = np.concatenate([each.ranks for each in known])
    order = np.argsort(ranks)
    members = tuple(ranks[order].tolist())
    return StepTimes(
        members,
        tuple(places[rank].population for rank in members),
        keys * known[0].width,
        known[0].width,
        TimeAccount(
            np.concatenate([each.cells_ns for each in accounts])[order],
            np.concatenate([each.is_measured for each in accounts])[order],
        ),
        pipelined=are_pipelined(places.values()),
    )


def are_pipelined(places: Iterable[Placement]) -> bool:
    """Return True if the ranks are stages of a pipeline."""
    stages = {
        (name, at) for each in places for name, at in each.coordinates.items() if name in STAGES
    }
    return len(stages) > 1
