"""Processes and collectives of a job's latest attempt, from the states of its nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.analysis.collectives.slow_link import (
    LinkFindings,
    build_link_statistics,
    find_slow_links,
)
from torchlens_perf.analysis.collectives.statistics import merge_operations
from torchlens_perf.verdicts.node_state import NodeState, ProcessState


def latest_processes(nodes: Iterable[NodeState]) -> dict[int, ProcessState]:
    """Return the newest process of each rank, from the latest attempt and world size.

    In earlier attempts, processes may have had other ranks and steps. When agents join or leave an
    elastic job, the world size changes without a new attempt.
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


def latest_collective_joins(nodes: Iterable[NodeState]) -> list[CollectiveJoin]:
    """Return the joined collectives of all nodes that have processes of the latest attempt."""
    attempts = [
        (max((each.identity.attempt for each in node.processes.values()), default=0), node)
        for node in nodes
    ]
    newest = max((attempt for attempt, _ in attempts), default=0)
    return [node.join for attempt, node in attempts if attempt == newest]


def latest_slow_links(nodes: Sequence[NodeState]) -> LinkFindings:
    """Return findings on the slow links of the latest attempt."""
    hosts = {rank: process.identity.host for rank, process in latest_processes(nodes).items()}
    operations = merge_operations([join.operations() for join in latest_collective_joins(nodes)])
    return find_slow_links(build_link_statistics(operations), hosts)
