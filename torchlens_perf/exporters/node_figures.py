"""Metrics of a node that are only exported on /metrics.

The metrics describe the node's processes and collectives, the ranks that arrive last, and open
alerts. The number of series is bounded. Series of single ranks only cover this node's ranks. In
large jobs, only the ranks with the largest lags have series.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.analysis.collectives.semantics import WaitRelation, semantics_of
from torchlens_perf.exporters import ExportBatch, NodeRole, node_semantics, semantics
from torchlens_perf.exporters.series_room import max_ranks_with_own_series
from torchlens_perf.run.verdicts import Alert
from torchlens_perf.verdicts.node_state import NodeState

MAX_ALERTS = 32
# Ranks of a large job that have series of their own.
MAX_RANKS = 8
_LARGEST_SMALL_JOB = max_ranks_with_own_series(NodeRole().max_series)
_OWN_TIME_WINDOW = 32
_SCALES: Mapping[str, float] = {
    node_semantics.COLLECTIVE_COMPARED: 1,
    node_semantics.COLLECTIVE_ARRIVED_LAST: 1,
    node_semantics.COLLECTIVE_LAG: 1e-9,
    node_semantics.COLLECTIVE_WAIT: 1e-9,
}
"""Factor from the totals of the join to the unit of each metric."""
_HOW_PROCESSES_END = ("closed", "failed", "died")

Labels = Mapping[str, Any]
Points = tuple[tuple[float, Labels], ...]


@dataclasses.dataclass(frozen=True)
class NodePoints:
    """Points of the node's metrics, all read at the same time."""

    points: Mapping[str, Points]
    gone: frozenset[int]
    """Ranks of this node that have no running process."""


def read_node_points(state: NodeState) -> NodePoints:
    """Read the node's metrics. Call it on the sidecar's thread, which owns the state."""
    processes = list(state.processes.values())
    running = {each.identity.rank: each for each in processes if not each.ended}
    ends = {how: sum(each.ended == how for each in processes) for how in _HOW_PROCESSES_END}
    steps = [
        each.statistics.last_step
        for each in running.values()
        if each.statistics.last_step is not None
    ]
    world_size = max((each.identity.world_size for each in processes), default=1)
    run = {semantics.RUN_ID: processes[0].identity.run_id} if processes else {}
    return NodePoints(
        {
            node_semantics.RANKS_RUNNING: ((len(running), {}),),
            node_semantics.LAST_STEP: ((min(steps), {}),) if steps else (),
            node_semantics.PROCESSES_ENDED: tuple(
                (count, {**run, node_semantics.PROCESS_END: how}) for how, count in ends.items()
            ),
            node_semantics.PROCESSES_OUT_OF_MEMORY: (
                (sum(each.out_of_memory is not None for each in processes), run),
            ),
            node_semantics.RECORDS_LOST: (
                (state.unwritten_records + sum(each.statistics.lost for each in processes), {}),
            ),
            **_points_by_operation(state.join),
            **_points_by_rank(
                state.join, MAX_RANKS if world_size > _LARGEST_SMALL_JOB else _LARGEST_SMALL_JOB
            ),
        },
        frozenset({each.identity.rank for each in processes} - running.keys()),
    )


def _points_by_operation(join: CollectiveJoin) -> dict[str, Points]:
    counts: dict[str, list[int]] = {}
    for each in join.operations():
        found = counts.setdefault(each.key.operation, [0, 0])
        found[0] += each.records
        found[1] += each.bytes
    return {
        name: tuple(
            (both[at], {node_semantics.COLLECTIVE_OPERATION: operation})
            for operation, both in counts.items()
        )
        for at, name in enumerate((node_semantics.COLLECTIVES, node_semantics.COLLECTIVE_IO))
    }


def _points_by_rank(join: CollectiveJoin, most: int) -> dict[str, Points]:
    """Return the waits of this node's ranks, and their lags in groups within this node."""
    totals: dict[str, Counter[int]] = defaultdict(Counter)
    for each in join.operations():
        known = (
            join.has_all_ranks(each.key.members)
            and semantics_of(each.key.operation).waits is WaitRelation.ALL
        )
        for rank, of_rank in each.totals_by_rank().items():
            # Where an asynchronous operation blocks its rank is not known.
            if each.asynchronous < each.records:
                totals[node_semantics.COLLECTIVE_WAIT][rank] += of_rank["exposed_wait_ns"]
            if known and each.joined:
                totals[node_semantics.COLLECTIVE_COMPARED][rank] += each.joined
                totals[node_semantics.COLLECTIVE_ARRIVED_LAST][rank] += of_rank["last"]
                lag_ns = of_rank["exposed_lag_ns"] + of_rank["overlapped_lag_ns"]
                totals[node_semantics.COLLECTIVE_LAG][rank] += lag_ns

    def importance(rank: int) -> tuple[int, int, int]:
        lag_ns = totals[node_semantics.COLLECTIVE_LAG][rank]
        return -lag_ns, -totals[node_semantics.COLLECTIVE_ARRIVED_LAST][rank], rank

    shown = sorted(sorted(set[int]().union(*totals.values()), key=importance)[:most])
    return {
        name: tuple(
            (totals[name][rank] * scale, {semantics.RANK: rank})
            for rank in shown
            if rank in totals[name]
        )
        for name, scale in _SCALES.items()
    }


class RecentOwnTimes:
    """Recent own times of this node's ranks. Use it on the sidecar's thread only."""

    def __init__(self) -> None:
        self._newest_ns: dict[int, deque[int]] = {}

    def add_batch(self, batch: ExportBatch) -> None:
        newest = self._newest_ns.setdefault(batch.identity.rank, deque(maxlen=_OWN_TIME_WINDOW))
        newest.extend(batch.steps.own_ns[-_OWN_TIME_WINDOW:].tolist())

    def slowest_and_fastest_points(self, gone: Iterable[int]) -> dict[str, Points]:
        """Return the mean own time of the slowest and of the fastest rank.

        gone: ranks that have ended, whose times are dropped.
        """
        for rank in gone:
            self._newest_ns.pop(rank, None)
        means_s = [sum(own) / len(own) / 1e9 for own in self._newest_ns.values() if own]
        names = node_semantics.OWN_TIME_SLOWEST, node_semantics.OWN_TIME_FASTEST
        return {
            name: ((of(means_s), {}),) if means_s else ()
            for name, of in zip(names, (max, min), strict=True)
        }


def points_of_open_alerts(state: NodeState, run_id: str) -> dict[str, Points]:
    """Return a point for each open alert. state: node whose sidecar assesses the job."""
    found = [_labels_of_alert(each.alert) for each in state.records.open_findings][-MAX_ALERTS:]
    run = {semantics.RUN_ID: run_id}
    return {node_semantics.OPEN_ALERT: tuple((1, {**run, **labels}) for labels in found)}


def _labels_of_alert(alert: Alert) -> Labels:
    """Return an alert's labels. Its text is no label: each change would start a new series."""
    of_hang = alert.kind == "hang"
    labels = {
        node_semantics.ALERT_KIND: alert.kind,
        semantics.RANK: alert.rank,
        semantics.SUSPECT_HOST: alert.host,
        semantics.PHASE: alert.phase,
        semantics.HANG_KIND if of_hang else semantics.STRAGGLER_CLASS: alert.cause,
        semantics.STRAGGLER_CAUSES: alert.because[0] if alert.because else None,
        semantics.STRAGGLER_SCOPE: alert.scope,
    }
    return {name: value for name, value in labels.items() if value not in (None, "")}
