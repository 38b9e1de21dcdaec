"""The straggler detector: it takes rows of all ranks and returns episodes of slow ranks. Pure.

All ranks have the same step times in synchronous training, so a slow rank cannot be found by them.
The detector compares work: the step without the time blocked in collectives, and without ready time
(runnable without a CPU). A rank's excess is its work minus the median of the other ranks that do
the same work in the same step. Slowness of all ranks together therefore cancels out.

After every EVERY rows, the detector searches for each rank the interval up to the newest row whose
mean excess is the most standard errors above a level. The level is zero, and then half of the
smallest excess that is worth naming. This is a window-limited generalized likelihood ratio test
(Lai, IEEE Trans. Inf. Theory 44, 1998). Single values are clipped, so no single stall makes a
verdict. A rank is named if all of these hold:

- The standard errors are higher than chance gives for this number of ranks and intervals.
- The excess is worth a person's time, and larger than the usual differences between ranks.
- The excess lasts through the interval, and longer than usual disturbances.

An episode ends when a likelihood ratio test shows that the excess is gone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.step_bins import MIN_ROW_NS, StepBinner, StepBins
from torchlens_perf.run.location import describe_location
from torchlens_perf.run.rank_ranges import format_ranges, parse_ranges
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings, Usual
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.stragglers.placement import BY_DEVICE, STAGES, Placement, groups_of
from torchlens_perf.verdicts.stragglers.population import Population
from torchlens_perf.verdicts.stragglers.resume import EarlierEpisodes
from torchlens_perf.verdicts.stragglers.window import BinBatch

if TYPE_CHECKING:
    from torchlens_perf.run.identity import Identity, ProcessGroup
    from torchlens_perf.run.records import StepTable

_NOT_DIMENSIONS = ("", "undefined", "default_pg")


class StragglerDetector:
    """Compare the ranks of a job within their populations, as rows arrive. Not thread-safe."""

    def __init__(self) -> None:
        self._populations: dict[str, Population] = {}
        self._place: dict[int, Placement] = {}

    def set_place(self, rank: int, place: Placement) -> None:
        """Set the placement of a rank before its first rows.

        Another population starts without earlier rows.
        """
        self._place[rank] = place

    def add(self, rank: int, rows: StepBins) -> None:
        """Add rows of a rank, in the order of their steps."""
        self.add_block(self._place.get(rank, Placement()).population, BinBatch.of(rank, rows))

    def add_block(self, population: str, block: BinBatch) -> None:
        self._populations.setdefault(population, Population()).add(block)

    def end(self, rank: int) -> None:
        for population in self._populations.values():
            population.end(rank)

    def judge(self, *, final: bool = False) -> Findings:
        """Judge the new rows and return all findings. final: the run has ended."""
        populations = list(self._populations.values())
        usual = []
        for population in populations:
            population.judge(final=final)
        for name, population in self._populations.items():
            if population.step_ns:
                usual.append(
                    Usual(
                        name,
                        format_ranges(population.ranks),
                        population.work_ns,
                        population.wait_ns,
                        population.own,
                    )
                )
        self._share_costs(populations)
        episodes = [episode for population in populations for episode in population.episodes]
        compared = [population for population in populations if population.compared]
        found = NOTHING.with_episodes(
            episodes,
            step_ns=max((population.step_ns for population in populations), default=0.0),
            last_step=max((population.last_step for population in populations), default=-1),
            steps_needed=min(
                (each.steps_needed for each in populations if each.steps_needed), default=0
            ),
            usual=tuple(usual),
        )
        if not compared:
            return found
        detectable_ns = max(population.detectable_ns for population in compared)
        return dataclasses.replace(
            found,
            rows=max(population.rows for population in compared),
            detectable_ns=detectable_ns if math.isfinite(detectable_ns) else None,
            compared=sum(population.compared for population in compared),
        )

    def _share_costs(self, populations: Sequence[Population]) -> None:
        """Set the shared costs of slow ranks.

        Each alone may cost nothing, if the job then waits for another one.
        """
        of_each = [population.shared_costs_ns() for population in populations]
        costs_ns = {rank: cost_ns for costs in of_each for rank, cost_ns in costs.items()}
        shared_ns = {
            rank: cost_ns for costs in of_each if len(costs) > 1 for rank, cost_ns in costs.items()
        }
        # A node or a position may have ranks of several populations, which wait for one another.
        for group in groups_of(costs_ns.keys(), self._place) if len(costs_ns) > 1 else ():
            known = [cost_ns for rank in group.ranks if (cost_ns := costs_ns[rank]) is not None]
            shared_ns.update(dict.fromkeys(group.ranks, max(known, default=None)))
        for population in populations:
            population.share_costs(shared_ns)


def dimension(description: str) -> str:
    """Return the mesh dimension in a process group's description, such as "tp" for "mesh_tp"."""
    return "" if description in _NOT_DIMENSIONS else description.removeprefix("mesh_")


def place_of(
    identity: Identity, model: str, groups: Mapping[str, ProcessGroup], judged_by: str = ""
) -> Placement:
    """Return a rank's placement: its host, its model and its positions in process groups.

    judged_by: the clock that its steps are judged by. Host and device times are not compared with
    one another.
    """
    coordinates = {}
    for group in groups.values():
        name, members = dimension(group["description"]), parse_ranges(group["ranks"])
        if name and identity.rank in members:
            coordinates[name] = members.index(identity.rank)
    stage = "".join(f"/{name}{coordinates[name]}" for name in STAGES if name in coordinates)
    population = f"{model}{stage}{BY_DEVICE}" if judged_by == DEVICE else f"{model}{stage}"
    return Placement(identity.host, population, coordinates, describe_location(identity.attributes))


class JobDetector:
    """Judge the ranks of one generation of processes.

    A rank's placement is final once its first rows have arrived.
    """

    def __init__(self, earlier: Findings = NOTHING) -> None:
        """earlier: findings of an earlier sidecar about the same processes."""
        self._earlier = EarlierEpisodes(earlier)
        self.places: dict[int, Placement] = {}
        self.findings: Findings = NOTHING
        self._judge = StragglerDetector()
        self._makers: dict[int, StepBinner] = {}
        self._has_rows: set[int] = set()
        self._changed = False

    def add_steps(
        self, rank: int, place: Placement, table: StepTable, min_row_ns: float = MIN_ROW_NS
    ) -> StepBins | None:
        """Add finished steps of a rank of this node.

        Return the completed rows, to be sent to other nodes.
        """
        self.set_place(rank, place)
        rows = self._makers.setdefault(rank, StepBinner(min_row_ns=min_row_ns)).add_steps(table)
        return self._add(rank, rows)

    def add_block(self, population: str, block: BinBatch) -> None:
        """Add rows of ranks of other nodes, which set_place() has registered."""
        self._judge.add_block(population, block)
        self._has_rows.update(block.ranks.tolist())
        self._changed = True

    def end(self, rank: int) -> StepBins | None:
        """End a rank, whose process has ended. Return its last rows."""
        rows = self._makers[rank].pop_incomplete_row() if rank in self._makers else None
        self._add(rank, rows)
        self._judge.end(rank)
        self._changed = True
        return rows

    def judge(self, *, final: bool = False) -> Findings:
        """Return the findings about all rows so far. final: the run has ended."""
        if final:
            for rank, maker in self._makers.items():
                self._add(rank, maker.pop_incomplete_row())
        if self._changed or final:
            self._changed = False
            self.findings = self._earlier.merged_with(self._judge.judge(final=final))
        return self.findings

    def has_rows(self, rank: int) -> bool:
        """Return True if rows of a rank have arrived, so its placement is final."""
        return rank in self._has_rows

    def set_place(self, rank: int, place: Placement) -> None:
        """Set a rank's placement. This has no effect after its first rows, as it is compared then.

        Models and groups are known within the first steps.
        """
        if rank not in self._has_rows and self.places.get(rank) != place:
            self.places[rank] = place
            self._judge.set_place(rank, place)

    def _add(self, rank: int, rows: StepBins | None) -> StepBins | None:
        if rows is not None and len(rows):
            self._judge.add(rank, rows)
            self._has_rows.add(rank)
            self._changed = True
        return rows
