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
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchlens_perf.board import Block
from torchlens_perf.episodes import Episode
from torchlens_perf.grouping import groups_of
from torchlens_perf.population import Population
from torchlens_perf.rank_ranges import ranges
from torchlens_perf.step_rows import Rows


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """What is known of a rank besides its times."""

    host: str = ""
    population: str = ""
    """Ranks with the same text do the same work, and are compared."""
    coordinates: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Its position in each dimension of the job's mesh: {"dp": 3, "pp": 0}."""
    site: str = ""
    """Where its host is, in words, see site.py."""


@dataclasses.dataclass(frozen=True)
class Usual:
    """What a population's ranks do in a step, in ns: medians over ranks and the newest rows."""

    population: str
    ranks: str
    """As ranges: "0-7"."""
    work_ns: float
    wait_ns: float


@dataclasses.dataclass(frozen=True)
class Findings:
    """The state of the judgement."""

    episodes: tuple[Episode, ...]
    rows: int
    """Common rows that were judged."""
    step_ns: float
    detectable_ns: float
    """The smallest excess that would have been named by now, had it lasted through `rows`; inf: none."""
    compared: int
    """Ranks that were compared."""
    last_step: int
    usual: tuple[Usual, ...] = ()
    """By population."""

    def to_json(self) -> dict[str, Any]:
        value = dataclasses.asdict(self)
        value["episodes"] = [episode.to_json() for episode in self.episodes]
        value["detectable_ns"] = self.detectable_ns if np.isfinite(self.detectable_ns) else None
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Findings:
        detectable = value["detectable_ns"]
        return cls(
            **{
                **value,
                "episodes": tuple(Episode(**episode) for episode in value["episodes"]),
                "detectable_ns": float("inf") if detectable is None else detectable,
                "usual": tuple(Usual(**usual) for usual in value["usual"]),
            }
        )


NOTHING = Findings((), 0, 0.0, float("inf"), 0, -1)


class Judge:
    """Judges all ranks of a job, each beside those that do the same work. Fed as rows come; one thread."""

    def __init__(self) -> None:
        self._populations: dict[str, Population] = {}
        self._place: dict[int, Place] = {}

    def know(self, rank: int, place: Place) -> None:
        """Where a rank is; before its first rows. A rank that is placed anew begins anew."""
        self._place[rank] = place

    def add(self, rank: int, rows: Rows) -> None:
        """Rows of a rank, in the order of their steps."""
        self.add_block(self._place.get(rank, Place()).population, Block.of(rank, rows))

    def add_block(self, population: str, block: Block) -> None:
        """Rows of several ranks of a population."""
        self._populations.setdefault(population, Population()).add(block)

    def end(self, rank: int) -> None:
        """The rank has ended."""
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
                usual.append(Usual(name, ranges(population.ranks), population.work_ns, population.wait_ns))
        episodes = [episode for population in populations for episode in population.episodes]
        self._share_costs(episodes)
        compared = [population for population in populations if population.compared]
        found = dataclasses.replace(
            NOTHING,
            episodes=tuple(sorted(episodes, key=lambda episode: (episode.until_step is not None, -episode.cost_ns))),
            step_ns=max((population.step_ns for population in populations), default=0.0),
            last_step=max((population.last_step for population in populations), default=-1),
            usual=tuple(usual),
        )
        if not compared:
            return found
        return dataclasses.replace(
            found,
            rows=max(population.rows for population in compared),
            detectable_ns=max(population.detectable_ns for population in compared),
            compared=sum(population.compared for population in compared),
        )

    def _share_costs(self, episodes: Sequence[Episode]) -> None:
        """Ranks that are slow together cost the job much where each alone costs it nothing: the others are as slow."""
        slow = {episode.rank: episode for episode in episodes if episode.until_step is None}
        for group in groups_of(slow.keys(), self._place) if len(slow) > 1 else ():
            costs = [population.shared_cost_ns(group.ranks) for population in self._populations.values()]
            cost_ns = max((cost for cost in costs if cost is not None), default=None)
            largest_ns = max(slow[rank].excess_ns for rank in group.ranks)
            for rank in group.ranks:  # see describe(): what they lack of a CPU is not their work
                slow[rank].shared_cost_ns = None if cost_ns is None else min(cost_ns, largest_ns)
