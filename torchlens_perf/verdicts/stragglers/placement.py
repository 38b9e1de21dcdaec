"""Placements of ranks in a job, and groups of slow ranks with the same node or mesh position.
Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from torchlens_perf.run.grouping import group_values

# Possible names of the mesh dimension for pipeline stages. Ranks of different stages do different
# work, and are not compared.
STAGES = ("pp", "pipeline", "stage")
# Suffix of the population key of ranks that are judged by their devices' clocks.
BY_DEVICE = " by device"
# A node or position is named as slow if at least this share of its ranks is slow.
MIN_SLOW_SHARE = 0.75


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Host, population and mesh position of a rank."""

    host: str = ""
    population: str = ""
    """A key for the rank's work. Ranks with the same key do the same work, and are compared."""
    coordinates: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The rank's position in each dimension of the job's mesh, such as {"dp": 3, "pp": 0}."""
    location: str = ""
    """Location of the host in the data center, in words, see run/location.py."""


class SlowRankGroup(NamedTuple):
    """Slow ranks that have a node or a mesh position in common."""

    kind: str
    """"node" or "position"."""
    name: str
    """The host, or the position such as "ep 3"."""
    ranks: tuple[int, ...]
    """The slow ranks of the group."""


def group_slow(slow: Collection[int], places: Mapping[int, Placement]) -> Iterator[SlowRankGroup]:
    """Yield groups of slow ranks, nodes first.

    A rank is in at most one group. slow: the slow ranks. places: placements of all compared ranks.
    """
    left = set(slow)
    for kind, name, members in (*_ranks_by_node(places), *_ranks_by_mesh_position(places)):
        ranks = tuple(rank for rank in members if rank in left)
        if (
            len(ranks) >= 2
            and len(ranks) >= MIN_SLOW_SHARE * len(members)
            and len(members) < len(places)
        ):
            left.difference_update(ranks)
            yield SlowRankGroup(kind, name, ranks)


def _ranks_by_node(places: Mapping[int, Placement]) -> list[tuple[str, str, list[int]]]:
    by_host = group_values((place.host, rank) for rank, place in places.items())
    return [("node", host, ranks) for host, ranks in by_host.items()]


def _ranks_by_mesh_position(places: Mapping[int, Placement]) -> list[tuple[str, str, list[int]]]:
    """Return the ranks at each mesh position, such as "ep 3". Pipeline stages are left out."""
    by_position = group_values(
        (position, rank)
        for rank, place in places.items()
        for position in place.coordinates.items()
        if position[0] not in STAGES
    )
    return [
        ("position", f"{name} {coordinate}", ranks)
        for (name, coordinate), ranks in sorted(by_position.items())
    ]
