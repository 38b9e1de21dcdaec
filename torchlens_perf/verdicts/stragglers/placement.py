"""Where a rank is, and what slow ranks have in common: a whole node, or a position in the mesh. Pure."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

# Names of a mesh's dimension whose positions do different work: they are not compared with each other.
STAGES = ("pp", "pipeline", "stage")
BY_DEVICE = " by device"  # ends the population of ranks that are judged by their devices' clocks
MAX_OF_A_NODE = 0.75  # of its ranks must be slow for the node to be named


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """What is known of a rank besides its times."""

    host: str = ""
    population: str = ""
    """Ranks with the same text do the same work, and are compared."""
    coordinates: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Its position in each dimension of the job's mesh: {"dp": 3, "pp": 0}."""
    location: str = ""
    """Where its host is, in words, see run/location.py."""


class RankGroup(NamedTuple):
    """Slow ranks that are one thing: a person looks at the node, or at what the position is given."""

    kind: str
    """node, or position."""
    name: str
    """The host, or the position as "ep 3"."""
    ranks: tuple[int, ...]
    """Those that are slow."""


def groups_of(slow: Collection[int], places: Mapping[int, Placement]) -> list[RankGroup]:
    """Each slow rank in one group at most, nodes first. `places` has all ranks that were compared."""
    left = set(slow)
    found: list[RankGroup] = []
    for kind, name, members in (*_nodes(places), *_positions(places)):
        ranks = tuple(rank for rank in members if rank in left)
        if len(ranks) >= 2 and len(ranks) >= MAX_OF_A_NODE * len(members) and len(members) < len(places):
            found.append(RankGroup(kind, name, ranks))
            left.difference_update(ranks)
    return found


def _nodes(places: Mapping[int, Placement]) -> list[tuple[str, str, list[int]]]:
    by_host = defaultdict(list)
    for rank, place in places.items():
        by_host[place.host].append(rank)
    return [("node", host, ranks) for host, ranks in by_host.items()]


def _positions(places: Mapping[int, Placement]) -> list[tuple[str, str, list[int]]]:
    """Positions in a dimension of the mesh, where all ranks there do the same part of the model: experts, above all."""
    by_position = defaultdict(list)
    for rank, place in places.items():
        for name, coordinate in place.coordinates.items():
            if name not in STAGES:
                by_position[name, coordinate].append(rank)
    return [("position", f"{name} {coordinate}", ranks) for (name, coordinate), ranks in sorted(by_position.items())]
