"""The processes and collectives of a job's newest attempt, from its nodes' states. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.collectives.slow_link import (
    LinkFindings,
    build_link_statistics,
    find_slow_links,
)
from torchlens_perf.analysis.collectives.statistics import merge_operations

if TYPE_CHECKING:
    from torchlens_perf.analysis.collectives.join import CollectiveJoin
    from torchlens_perf.verdicts.node_state import NodeState, ProcessState


def latest_attempt(nodes: Iterable[NodeState]) -> dict[int, ProcessState]:
    """Return the newest process of each rank, from the newest attempt and world size only.

    Earlier processes may have had other ranks and other steps. Agents that join or leave an elastic
    job change the world size, which torchrun does not count as an attempt.
    """
    processes = sorted(
        (process for node in nodes for process in node.processes.values()),
        key=lambda each: (each.identity.attempt, each.anchor.unix_ns),
    )
    worlds = [(each.identity.attempt, each.identity.world_size) for each in processes]
    return {
        each.identity.rank: each
        for each, world in zip(processes, worlds, strict=True)
        if world == worlds[-1]
    }


def newest_joins(nodes: Iterable[NodeState]) -> list[CollectiveJoin]:
    """Return the joined collectives of the nodes that have processes of the newest attempt."""
    attempts = [
        (max((each.identity.attempt for each in node.processes.values()), default=0), node)
        for node in nodes
    ]
    newest = max((attempt for attempt, _ in attempts), default=0)
    return [node.join for attempt, node in attempts if attempt == newest]


def links_of(nodes: Sequence[NodeState]) -> LinkFindings:
    """Return the slow links of the newest attempt."""
    hosts = {rank: process.identity.host for rank, process in latest_attempt(nodes).items()}
    operations = merge_operations([join.operations() for join in newest_joins(nodes)])
    return find_slow_links(build_link_statistics(operations), hosts)
