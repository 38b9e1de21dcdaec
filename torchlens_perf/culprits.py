"""From slow ranks to what they have in common: one rank, a whole node, or a position in the mesh. Pure."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchlens_perf.episodes import Episode
from torchlens_perf.node_judge import STAGES
from torchlens_perf.rank_ranges import parse_ranges
from torchlens_perf.straggler import Findings, Place

MOST_OF_A_NODE = 0.75  # of its ranks must be slow for the node to be named
MOST_NAMED = 8
LEAST_IMBALANCE = 0.1  # of the step: what a pipeline stage does more than the others on average


@dataclasses.dataclass(frozen=True)
class Culprit:
    """Ranks that are slow together, and why they are named together."""

    kind: str
    """rank, node, or position."""
    name: str
    """The host, or the position as "ep 3"; else ""."""
    ranks: tuple[int, ...]
    lead: Episode
    """That of the slowest rank."""

    host: str = ""
    """Of the slowest rank."""


@dataclasses.dataclass(frozen=True)
class StageImbalance:
    """A pipeline stage that has more work than the others. Times in ns per step."""

    stage: str
    ranks: tuple[int, ...]
    work_ns: float
    others_work_ns: float


@dataclasses.dataclass(frozen=True)
class Named:
    """Who is to be named now."""

    culprits: tuple[Culprit, ...] = ()
    imbalance: StageImbalance | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Named:
        return cls(
            tuple(
                Culprit(**{**each, "ranks": tuple(each["ranks"]), "lead": Episode(**each["lead"])})
                for each in value["culprits"]
            ),
            value["imbalance"]
            and StageImbalance(**{**value["imbalance"], "ranks": tuple(value["imbalance"]["ranks"])}),
        )


NOBODY = Named()


def name(findings: Findings, places: Mapping[int, Place]) -> Named:
    """Who is slow now. `places` has all ranks that were compared."""
    now = [episode for episode in findings.episodes if episode.until_step is None]
    return Named(tuple(culprits(now, places)[:MOST_NAMED]), stage_imbalance(findings, places))


def culprits(episodes: Sequence[Episode], places: Mapping[int, Place]) -> list[Culprit]:
    """Who is to be named for these episodes, the costliest first. `places` has all ranks that were compared."""
    left = {episode.rank: episode for episode in episodes}
    found: list[Culprit] = []
    for kind, name, members in (*_nodes(places), *_positions(places)):
        slow = [rank for rank in members if rank in left]
        if len(slow) >= 2 and len(slow) >= MOST_OF_A_NODE * len(members) and len(members) < len(places):
            found.append(Culprit(kind, name, tuple(slow), _lead([left.pop(rank) for rank in slow])))
    found += [Culprit("rank", "", (rank,), episode) for rank, episode in left.items()]
    found = [dataclasses.replace(each, host=places.get(each.lead.rank, Place()).host) for each in found]
    return sorted(found, key=lambda each: (-each.lead.cost_ns, -each.lead.excess_ns))


def _lead(episodes: Iterable[Episode]) -> Episode:
    return max(episodes, key=lambda episode: episode.excess_ns)


def _nodes(places: Mapping[int, Place]) -> list[tuple[str, str, list[int]]]:
    by_host = defaultdict(list)
    for rank, place in places.items():
        by_host[place.host].append(rank)
    return [("node", host, ranks) for host, ranks in by_host.items()]


def _positions(places: Mapping[int, Place]) -> list[tuple[str, str, list[int]]]:
    """Positions in a dimension of the mesh, where all ranks there do the same part of the model: experts, above all."""
    by_position = defaultdict(list)
    for rank, place in places.items():
        for name, coordinate in place.coordinates.items():
            if name not in STAGES:
                by_position[name, coordinate].append(rank)
    return [("position", f"{name} {coordinate}", ranks) for (name, coordinate), ranks in sorted(by_position.items())]


def stage_imbalance(findings: Findings, places: Mapping[int, Place]) -> StageImbalance | None:
    """The pipeline stage with the most work, if that is much more than the others'. None without stages."""
    stages: dict[str, list[tuple[tuple[int, ...], float]]] = defaultdict(list)
    for usual in findings.usual:
        ranks = parse_ranges(usual.ranks)
        coordinates = places[ranks[0]].coordinates if ranks and ranks[0] in places else {}
        stage = next((f"{name} {coordinates[name]}" for name in STAGES if name in coordinates), "")
        if stage:
            stages[stage].append((ranks, usual.work_ns))
    if len(stages) < 2 or not findings.step_ns:
        return None
    work = {stage: max(value for _, value in parts) for stage, parts in stages.items()}
    largest = max(work, key=lambda stage: work[stage])
    others = [value for stage, value in work.items() if stage != largest]
    mean = sum(others) / len(others)
    if work[largest] - mean < LEAST_IMBALANCE * findings.step_ns:
        return None
    ranks = tuple(sorted(rank for part, _ in stages[largest] for rank in part))
    return StageImbalance(largest, ranks, work[largest], mean)
