"""Placements of ranks, and groups of slow ranks on one node or at one position in the mesh.
Pure."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

# Names of the mesh dimension of pipeline stages. Stages do different work, so they are not
# compared.
STAGES = ("pp", "pipeline", "stage")
# Suffix of the population of ranks that are judged by their devices' clocks.
BY_DEVICE = " by device"
# At least this share of the ranks of a node or position must be slow for it to be named.
MIN_SLOW_SHARE = 0.75


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Host, population and mesh position of a rank."""

    host: str = ""
    population: str = ""
    """Key of the rank's population: ranks with the same key do the same work, and are compared."""
    coordinates: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Its position in each dimension of the job's mesh: {"dp": 3, "pp": 0}."""
    location: str = ""
    """Location of its host, in words, see run/location.py."""


class RankGroup(NamedTuple):
    """Slow ranks with a common cause, the node or the input of the position."""

    kind: str
    """node, or position."""
    name: str
    """The host, or the position as "ep 3"."""
    ranks: tuple[int, ...]
    """The slow ranks of the group."""


def groups_of(slow: Collection[int], places: Mapping[int, Placement]) -> list[RankGroup]:
    """Return groups of slow ranks, nodes first.

    A rank is in at most one group. `places` has all compared ranks.
    """
    left = set(slow)
    found: list[RankGroup] = []
    for kind, name, members in (*_nodes(places), *_positions(places)):
        ranks = tuple(rank for rank in members if rank in left)
        if (
            len(ranks) >= 2
            and len(ranks) >= MIN_SLOW_SHARE * len(members)
            and len(members) < len(places)
        ):
            found.append(RankGroup(kind, name, ranks))
            left.difference_update(ranks)
    return found


def _nodes(places: Mapping[int, Placement]) -> list[tuple[str, str, list[int]]]:
    by_host = defaultdict(list)
    for rank, place in places.items():
        by_host[place.host].append(rank)
    return [("node", host, ranks) for host, ranks in by_host.items()]


def _positions(places: Mapping[int, Placement]) -> list[tuple[str, str, list[int]]]:
    """Return the mesh positions whose ranks all do the same part of the model, such as experts."""
    by_position = defaultdict(list)
    for rank, place in places.items():
        for name, coordinate in place.coordinates.items():
            if name not in STAGES:
                by_position[name, coordinate].append(rank)
    return [
        ("position", f"{name} {coordinate}", ranks)
        for (name, coordinate), ranks in sorted(by_position.items())
    ]
