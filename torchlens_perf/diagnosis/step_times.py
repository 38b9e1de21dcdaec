"""Times of single steps of all ranks, from which lost time and gains are computed. Pure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.verdicts.stragglers.placement import STAGES

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
    from torchlens_perf.verdicts.stragglers.placement import Placement
    from torchlens_perf.verdicts.words.report import Facts

    Floats = npt.NDArray[np.float64]

USES = (*OWN_PARTS, "cpu", "tool", "communication")
"""Uses of a step's time, which add up to the step. "cpu" is CPU contention, which the own parts
exclude. "communication" is the time blocked in communication."""
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


def read_judged_rows(detector: StragglerDetector, facts: Facts) -> StepTimes | None:
    """Return the newest rows by which all ranks are judged; None with fewer than MIN_ROWS.

    They need no file, and are on node 0 for the ranks of all nodes. facts: those of this node.
    """
    places = detector.places
    found = detector.read_newest_rows(min(_MAX_ROWS, _MAX_RANK_ROWS // max(1, len(places))))
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found) or len({each.width for each in known}) > 1:
        return None
    keys = functools.reduce(np.intersect1d, [each.key for each in known])
    if len(keys) < MIN_ROWS:
        return None
    uses = []
    for each in known:
        row = np.isin(each.key, keys)
        duration, measured, wait = (
            values[:, row].astype(np.float64)
            for values in (each.duration_ns, each.ready_ns, each.wait_ns)
        )
        ready = fill_contention(duration, measured, facts["steps"]["sampled_lack_of_cpu"])
        # The judge's parts exclude measured contention only.
        parts = split_contention(
            each.parts_ns[:, row].astype(np.float64),
            np.where(np.isnan(measured), ready, 0.0),
            average_contention(facts),
        )
        tool = np.maximum(duration - parts.sum(axis=2) - ready - wait, 0)
        rest = [values[..., None] for values in (ready, tool, wait)]
        uses.append(np.concatenate([parts, *rest], axis=2))
    ranks = np.concatenate([each.ranks for each in known])
    order = np.argsort(ranks)
    members = tuple(ranks[order].tolist())
    return StepTimes(
        members,
        tuple(places[rank].population for rank in members),
        keys * known[0].width,
        known[0].width,
        np.concatenate(uses)[order],
        pipelined=are_pipelined(places.values()),
    )


def are_pipelined(places: Iterable[Placement]) -> bool:
    """Return True if the ranks are stages of a pipeline."""
    stages = {
        (name, at) for each in places for name, at in each.coordinates.items() if name in STAGES
    }
    return len(stages) > 1


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


def average_contention(facts: Facts) -> Floats:
    """Return the CPU contention in each own part of a typical step, up to a factor."""
    lacks = [each["typical"]["lack_of_cpu"] or {} for each in facts["ranks"] if each["typical"]]
    found: Floats = np.array([sum(lack.get(part, 0.0) for lack in lacks) for part in OWN_PARTS])
    return found


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
