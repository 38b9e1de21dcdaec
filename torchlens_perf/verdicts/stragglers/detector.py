"""The straggler detector, which compares the work of ranks and returns episodes of slow ranks.
Pure.

In synchronous training, all ranks have the same step times, so these do not show a slow rank. The
detector compares work instead. Work is the time of a step without blocking in collectives, and
without the time in which the rank was runnable but had no CPU. A rank's excess is its work minus
the median of the other ranks that do the same work in the same step. A slowdown of all ranks
therefore cancels out. The detector's rows are means over one or several steps.

After every EVERY rows, the detector considers, for each rank, all intervals up to the newest row.
It chooses the interval whose mean excess is the most standard errors above a level. The level is
first zero, and then half of the smallest excess worth naming. The procedure is a window-limited
generalized likelihood ratio test (Lai, IEEE Trans. Inf. Theory 44, 1998). Single values are
clipped, so a single stall never makes a rank slow. A rank is named as slow if all of these
conditions are true:

- The number of standard errors is too high to be chance for this number of ranks and intervals.
- The excess is large enough to be investigated, and exceeds the usual differences between ranks.
- The excess is present throughout the interval, and lasts longer than usual disturbances.

An episode ends when a likelihood ratio test shows that the excess is gone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from torchlens_perf.analysis.statistics.step_bins import MIN_ROW_NS, BinBatch, StepBinner
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.location import describe_location
from torchlens_perf.run.rank_facts import ProcessGroup
from torchlens_perf.run.rank_ranges import format_ranges, parse_ranges
from torchlens_perf.run.records import StepTable
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings, UsualTimes
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.stragglers.placement import BY_DEVICE, STAGES, Placement, group_slow
from torchlens_perf.verdicts.stragglers.population import JudgedRows, Population
from torchlens_perf.verdicts.stragglers.resume import EarlierEpisodes

_NOT_DIMENSIONS = ("", "undefined", "default_pg")


def mesh_dimension(description: str) -> str:
    """Return the mesh dimension in a process group's description, such as "tp" for "mesh_tp"."""
    return "" if description in _NOT_DIMENSIONS else description.removeprefix("mesh_")


def build_placement(
    identity: Identity, model: str, groups: Mapping[str, ProcessGroup], judged_by: str = ""
) -> Placement:
    """Return a rank's placement, from its host, its model and its positions in process groups.

    judged_by: the clock by which the rank's steps are judged. Ranks with different clocks are not
    compared.
    """
    coordinates = {}
    for group in groups.values():
        name, members = mesh_dimension(group["description"]), parse_ranges(group["ranks"])
        if name and identity.rank in members:
            coordinates[name] = members.index(identity.rank)
    stage = "".join(f"/{name}{coordinates[name]}" for name in STAGES if name in coordinates)
    population = f"{model}{stage}{BY_DEVICE}" if judged_by == DEVICE else f"{model}{stage}"
    return Placement(identity.host, population, coordinates, describe_location(identity.attributes))


class StragglerDetector:
    """Finds slow ranks among the processes of one attempt, from their steps or from rows.

    Ranks that do the same work are compared. A rank's placement cannot change after its first rows.
    Not thread-safe.
    """

    def __init__(self, earlier: Findings = NOTHING) -> None:
        """earlier: findings of an earlier sidecar about the same processes."""
        self.places: dict[int, Placement] = {}
        self.findings: Findings = NOTHING
        self._earlier = EarlierEpisodes(earlier)
        self._populations: dict[str, Population] = {}
        self._binners: dict[int, StepBinner] = {}
        self.ranks_with_rows: set[int] = set()
        """Ranks of which rows have arrived, after which their placement is final."""
        self._changed = False

    def add_steps(
        self, rank: int, place: Placement, table: StepTable, min_row_ns: float = MIN_ROW_NS
    ) -> BinBatch | None:
        """Add finished steps of a rank of this node.

        Return the rows that these steps complete, which are then sent to node 0.
        """
        self.set_placement(rank, place)
        binner = self._binners.setdefault(rank, StepBinner(min_row_ns=min_row_ns, rank=rank))
        return self.add_rows(rank, binner.add_steps(table))

    def add_rows(self, rank: int, rows: BinBatch | None) -> BinBatch | None:
        """Add rows of a rank, in the order of their steps. Return these rows."""
        if rows is not None and len(rows):
            self.add_bin_batch(self.places.get(rank, Placement()).population, rows)
        return rows

    def add_bin_batch(self, population: str, block: BinBatch) -> None:
        """Add rows of several ranks. Call set_placement() for these ranks first."""
        self._populations.setdefault(population, Population()).add_rows(block)
        self.ranks_with_rows.update(block.ranks.tolist())
        self._changed = True

    def end_rank(self, rank: int) -> BinBatch | None:
        """Record that a rank's process has ended. Return its last rows."""
        rows = self._binners[rank].pop_incomplete_row() if rank in self._binners else None
        self.add_rows(rank, rows)
        for population in self._populations.values():
            population.ended.add(rank)
        self._changed = True
        return rows

    def judge(self, *, final: bool = False) -> Findings:
        """Return the findings from all rows so far. final: True if the run has ended."""
        if final:
            for rank, binner in self._binners.items():
                self.add_rows(rank, binner.pop_incomplete_row())
        if self._changed or final:
            self._changed = False
            self.findings = self._earlier.merge_into(self._judge_populations(final=final))
        return self.findings

    def read_newest_rows(self, most: int) -> list[JudgedRows | None]:
        """Return the newest rows of each population, see Population.read_newest_rows()."""
        return [each.read_newest_rows(most) for each in self._populations.values()]

    def set_placement(self, rank: int, place: Placement) -> None:
        """Set a rank's placement, unless rows of the rank have already arrived.

        The rank's model and process groups become known in the first steps.
        """
        if rank not in self.ranks_with_rows:
            self.places[rank] = place

    def _judge_populations(self, *, final: bool) -> Findings:
        for population in self._populations.values():
            population.judge(final=final)
        populations = list(self._populations.values())
        self._set_shared_costs(populations)
        found = NOTHING.with_episodes(
            [episode for population in populations for episode in population.episodes],
            step_ns=max((population.step_ns for population in populations), default=0.0),
            last_step=max((population.last_step for population in populations), default=-1),
            steps_needed=min(
                (each.steps_needed for each in populations if each.steps_needed), default=0
            ),
            usual=tuple(
                UsualTimes(name, format_ranges(each.ranks), each.work_ns, each.wait_ns, each.own)
                for name, each in self._populations.items()
                if each.step_ns
            ),
        )
        compared = [population for population in populations if population.compared]
        if not compared:
            return found
        detectable_ns = max(population.detectable_ns for population in compared)
        return dataclasses.replace(
            found,
            rows=max(population.rows for population in compared),
            detectable_ns=detectable_ns if math.isfinite(detectable_ns) else None,
            compared=sum(population.compared for population in compared),
        )

    def _set_shared_costs(self, populations: Sequence[Population]) -> None:
        """Set the shared cost of ranks that are slow together.

        The cost of a single slow rank may be zero, because without it, the job would wait for
        another slow rank.
        """
        slow = [each.rank for every in populations for each in every.episodes if not each.is_over]
        groups = list(group_slow(slow, self.places)) if len(slow) > 1 else []
        of_each = [population.compute_shared_costs(groups) for population in populations]
        all_costs = {rank: cost for costs in of_each for rank, cost in costs.items()}
        shared = {rank: cost for costs in of_each if len(costs) > 1 for rank, cost in costs.items()}
        # The ranks of a node or a position may do different work, but also wait for one another.
        for group in groups:
            known = [cost for rank in group.ranks if (cost := all_costs.get(rank)) is not None]
            largest = max(known, key=lambda cost: cost.cost_ns, default=None)
            shared.update(dict.fromkeys(group.ranks, largest))
        for population in populations:
            population.episodes = [
                (
                    dataclasses.replace(each, shared=shared[each.rank])
                    if not each.is_over and each.rank in shared
                    else each
                )
                for each in population.episodes
            ]
