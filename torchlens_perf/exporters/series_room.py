"""Limit the number of series per node, which limits the number of series of the job. Pure.

Node 0 sends the series that describe a large job. The rest of the limit is for hardware and is
divided between nodes by their number of ranks. If a node has more series than its share, the least
important metrics are left out. Points of several components are then merged to one point with the
largest value, or for counters with the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, cast

from opentelemetry.sdk.metrics.export import Gauge, Metric, NumberDataPoint, Sum

from torchlens_perf.exporters import CoveredRanks, NodeRole, semantics
from torchlens_perf.run.grouping import group_values

SERIES_A_RANK = 20
_PER_RANK_SHARE = 0.64
_LARGE_JOB_SHARE = 0.25
_IMPORTANT = (
    semantics.STEP_DURATION, semantics.STEPS, semantics.HANG_DURATION, semantics.STEP_OWN_TIME, semantics.MEMORY,
    semantics.OUT_OF_MEMORY, semantics.PHASE_DURATION, semantics.DEVICE_DURATION, semantics.ALLOC_RETRIES,
    semantics.TOKENS, semantics.MODEL_FLOPS, semantics.MFU,
    "hw.errors", "hw.gpu.throttle.duration", "hw.temperature", "hw.gpu.utilization", "hw.gpu.memory.usage",
    "hw.power", "hw.gpu.tensor.utilization", "hw.gpu.sm.utilization", "hw.network.io", "hw.gpu.clock.frequency",
    "hw.gpu.dram.utilization", "hw.energy", "hw.gpu.io", "hw.network.up", "hw.gpu.sm.occupancy",
    "hw.network.packets", "hw.gpu.memory.limit", "hw.power.limit", "hw.gpu.clock.limit",
    "hw.network.bandwidth.limit",
)  # fmt: skip
_COMPONENT = (semantics.HARDWARE_ID, semantics.HARDWARE_NAME)


def max_ranks_with_own_series(max_series: int) -> int:
    """Return the largest world size with which every rank has series of its own."""
    return int(_PER_RANK_SHARE * max_series) // SERIES_A_RANK


def compute_series_limits(world_size: int, part: NodeRole) -> tuple[int, int | None]:
    """Return how many series this node may send that describe hardware, and how many others.

    None: the others need no limit.
    """
    if world_size <= max_ranks_with_own_series(part.max_series):
        return int((part.max_series - world_size * SERIES_A_RANK) * part.share), None
    job = _LARGE_JOB_SHARE * part.max_series
    hardware = int((part.max_series - job) * part.share)
    return hardware, max(1, int(job * part.share)) if part.part is CoveredRanks.ALONE else None


def limit_points(
    metrics: Sequence[Metric], room: int, forms_before: dict[str, int] | None = None
) -> list[Metric]:
    """Reduce metrics to at most `room` points.

    forms_before: index of each metric's form in earlier exports. It is updated. A merged metric is
    never split again, because each change would create new series.
    """
    before = {} if forms_before is None else forms_before
    points = {each.name: each.data.data_points for each in metrics}
    if sum(map(len, points.values())) <= room and not any(before.get(each) for each in points):
        return list(metrics)
    ordered = sorted(
        metrics, key=lambda each: _IMPORTANT.index(each.name) if each.name in _IMPORTANT else 99
    )
    forms = {each.name: _build_smaller_forms(each) for each in ordered}
    taken: dict[str, int] = {}
    # Each metric gets its smallest form before any metric gets a larger form.
    for each in ordered:
        smallest = len(forms[each.name]) - 1
        if len(forms[each.name][smallest]) <= room:
            taken[each.name] = smallest
            room -= len(forms[each.name][smallest])
    for each in ordered:
        of_metric = forms[each.name]
        for index in range(before.get(each.name, 0), taken.get(each.name, 0)):
            more = len(of_metric[index]) - len(of_metric[taken[each.name]])
            if more <= room:
                taken[each.name], room = index, room - more
                break
    before.update(taken)
    kept = {name: forms[name][index] for name, index in taken.items()}
    return [
        dataclasses.replace(
            each, data=dataclasses.replace(cast(Any, each.data), data_points=kept[each.name])
        )
        for each in metrics
        if kept.get(each.name)
    ]


def _build_smaller_forms(metric: Metric) -> list[Sequence[Any]]:
    """Return a metric's points in three forms: all, merged over components, and one point."""
    if not isinstance(metric.data, Gauge | Sum):
        return [metric.data.data_points]
    points = metric.data.data_points
    by_attributes = group_values(
        (tuple(item for item in (each.attributes or {}).items() if item[0] not in _COMPONENT), each)
        for each in points
    )
    how = "sum" if isinstance(metric.data, Sum) else "max"
    merged = [_merge_points(group, key, how) for key, group in by_attributes.items()]
    return [points, merged, [_merge_points(points, (), how)] if points else []]


def _merge_points(
    points: Sequence[NumberDataPoint], attributes: Iterable[tuple[str, Any]], how: str
) -> NumberDataPoint:
    if len(points) == 1:
        return points[0]
    value = (sum if how == "sum" else max)(point.value for point in points)
    return dataclasses.replace(
        points[0], attributes={**dict(attributes), semantics.OVER_COMPONENTS: how}, value=value
    )
