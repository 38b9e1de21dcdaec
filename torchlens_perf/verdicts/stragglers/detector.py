"""Which rank is slow, since when, in which phase, and what it costs. Pure: rows of ranks in, episodes out.

Step times equalise in synchronous training, so they name nobody. Judged is each rank's work: its step without the time
blocked in collectives, and without the time that its thread was ready and had no CPU. A rank's excess is its work above
the median of the other ranks that do the same, in the same step, so what makes all ranks slow together cancels.

At every EVERY-th row, for each rank: over which interval that ends now is its mean excess most standard errors above
zero, or above half of what is worth naming (a window-limited generalised likelihood ratio; Lai, IEEE Trans. Inf. Theory
44, 1998)? Single values are clipped, so that no single stall makes a verdict. A rank is named when that is more than
chance gives among so many ranks and intervals, when the excess is worth a person's time and larger than the ranks
differ anyway, and when it lasts: through the interval, and for longer than any machine is disturbed now and then. It is
dropped when the same test says that the excess has gone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.step_bins import MIN_ROW_NS, StepBinMaker, StepBins
from torchlens_perf.run.location import location
from torchlens_perf.run.rank_ranges import parse_ranges, ranges
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
    """Judges all ranks of a job, each beside those that do the same work. Fed as rows come; one thread."""

    def __init__(self) -> None:
        self._populations: dict[str, Population] = {}
        self._place: dict[int, Placement] = {}

    def set_place(self, rank: int, place: Placement) -> None:
        """Where a rank is; before its first rows. A rank that is placed anew begins anew."""
        self._place[rank] = place

    def add(self, rank: int, rows: StepBins) -> None:
        """Rows of a rank, in the order of their steps."""
        self.add_block(self._place.get(rank, Placement()).population, BinBatch.of(rank, rows))

    def add_block(self, population: str, block: BinBatch) -> None:
        self._populations.setdefault(population, Population()).add(block)

    def end(self, rank: int) -> None:
        for population in self._populations.values():
            population.end(rank)

    def judge(self, *, final: bool = False) -> Findings:
        """Judges what has come. final: the run has ended."""
        populations = list(self._populations.values())
        usual = []
        for population in populations:
            population.judge(final=final)
        for name, population in self._populations.items():
            if population.step_ns:
                usual.append(
                    Usual(name, ranges(population.ranks), population.work_ns, population.wait_ns, population.own)
                )
        self._share_costs(populations)
        episodes = [episode for population in populations for episode in population.episodes]
        compared = [population for population in populations if population.compared]
        found = NOTHING.with_episodes(
            episodes,
            step_ns=max((population.step_ns for population in populations), default=0.0),
            last_step=max((population.last_step for population in populations), default=-1),
            steps_needed=min((each.steps_needed for each in populations if each.steps_needed), default=0),
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
        """Set what slow ranks cost together: each alone may cost nothing, as the job then waits for another one."""
        of_each = [population.shared_costs_ns() for population in populations]
        costs_ns = {rank: cost_ns for costs in of_each for rank, cost_ns in costs.items()}
        shared_ns = {rank: cost_ns for costs in of_each if len(costs) > 1 for rank, cost_ns in costs.items()}
        # A node or a position may have ranks of several populations, whose steps wait for one another.
        for group in groups_of(costs_ns.keys(), self._place) if len(costs_ns) > 1 else ():
            known = [cost_ns for rank in group.ranks if (cost_ns := costs_ns[rank]) is not None]
            shared_ns.update(dict.fromkeys(group.ranks, max(known, default=None)))
        for population in populations:
            population.share_costs(shared_ns)


def dimension(description: str) -> str:
    """The mesh dimension that a process group's description names: "mesh_tp" is "tp"; "" if it names none."""
    return "" if description in _NOT_DIMENSIONS else description.removeprefix("mesh_")


def place_of(identity: Identity, model: str, groups: Mapping[str, ProcessGroup], judged_by: str = "") -> Placement:
    """Where a rank is: its host, what it computes (identity.model_digest), its position in the groups that it uses.

    judged_by: whose clock its steps are judged by. Host and device times are not compared with one another.
    """
    coordinates = {}
    for group in groups.values():
        name, members = dimension(group["description"]), parse_ranges(group["ranks"])
        if name and identity.rank in members:
            coordinates[name] = members.index(identity.rank)
    stage = "".join(f"/{name}{coordinates[name]}" for name in STAGES if name in coordinates)
    population = f"{model}{stage}{BY_DEVICE}" if judged_by == DEVICE else f"{model}{stage}"
    return Placement(identity.host, population, coordinates, location(identity.attributes))


class JobDetector:
    """Judge the ranks of one generation of processes. Their places are settled when their first rows come."""

    def __init__(self, earlier: Findings = NOTHING) -> None:
        """earlier: what an earlier sidecar has found about the same processes."""
        self._earlier = EarlierEpisodes(earlier)
        self.places: dict[int, Placement] = {}
        self.findings: Findings = NOTHING
        self._judge = StragglerDetector()
        self._makers: dict[int, StepBinMaker] = {}
        self._has_rows: set[int] = set()
        self._changed = False

    def add_steps(
        self, rank: int, place: Placement, table: StepTable, min_row_ns: float = MIN_ROW_NS
    ) -> StepBins | None:
        """Add finished steps of a rank of this node. Return the rows that they complete, to be sent to other nodes."""
        self.set_place(rank, place)
        rows = self._makers.setdefault(rank, StepBinMaker(min_row_ns=min_row_ns)).add(table)
        return self._add(rank, rows)

    def add_block(self, population: str, block: BinBatch) -> None:
        """Add rows of ranks of other nodes, which set_place() has registered."""
        self._judge.add_block(population, block)
        self._has_rows.update(block.ranks.tolist())
        self._changed = True

    def end(self, rank: int) -> StepBins | None:
        """End a rank, whose process has ended. Return its last rows."""
        rows = self._makers[rank].rest() if rank in self._makers else None
        self._add(rank, rows)
        self._judge.end(rank)
        self._changed = True
        return rows

    def judge(self, *, final: bool = False) -> Findings:
        """Return the findings about the rows that have come. final: the run has ended."""
        if final:
            for rank, maker in self._makers.items():
                self._add(rank, maker.rest())
        if self._changed or final:
            self._changed = False
            self.findings = self._earlier.merged_with(self._judge.judge(final=final))
        return self.findings

    def has_rows(self, rank: int) -> bool:
        """Whether rows of a rank have come: its place is settled."""
        return rank in self._has_rows

    def set_place(self, rank: int, place: Placement) -> None:
        """Set a rank's place until its first rows come: then it is compared with others.

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
