"""How many series each node may send, so that all nodes together keep within the job's number. Pure.

Half of what a large job may send describes the job, and comes from node 0; the rest is for the nodes' hardware, a node
as much as another. Where a node's share is smaller than what it has, the most important comes first, and points of
several components become one: the largest value, or for counters the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry.sdk.metrics.export import Gauge, Sum

from torchlens_perf.exporters import JobPart, Part, semantics

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric, NumberDataPoint

SERIES_A_RANK = 20  # at most, of a rank with series of its own
_RANKS_SHARE = 0.64  # of all series, those of ranks where each has its own
_JOB_SHARE = 0.25  # those that describe a large job
_IMPORTANT = (
    semantics.STEP_DURATION, semantics.STEPS, semantics.HANG_DURATION, semantics.STEP_OWN_TIME, semantics.MEMORY,
    semantics.OUT_OF_MEMORY, semantics.PHASE_DURATION, semantics.DEVICE_DURATION, semantics.ALLOC_RETRIES,
    semantics.ERRORS, semantics.GPU_THROTTLED, semantics.TEMPERATURE, semantics.GPU_BUSY, semantics.GPU_MEMORY,
    semantics.POWER, semantics.GPU_TENSOR_ACTIVE, semantics.GPU_SM_ACTIVE, semantics.NETWORK_IO, semantics.GPU_CLOCK,
    semantics.GPU_DRAM_ACTIVE, semantics.ENERGY, semantics.GPU_IO, semantics.NETWORK_UP, semantics.GPU_SM_OCCUPANCY,
    semantics.NETWORK_PACKETS, semantics.GPU_MEMORY_LIMIT, semantics.POWER_LIMIT, semantics.GPU_CLOCK_LIMIT,
    semantics.NETWORK_LIMIT,
)  # fmt: skip
_COMPONENT = (semantics.HARDWARE_ID, semantics.HARDWARE_NAME)


class Room(NamedTuple):
    """Series that a node may send."""

    hardware: int
    others: int | None
    """None: what describes the job, which is bounded by itself."""


def most_ranks(max_series: int) -> int:
    """Up to so many ranks there is room for series of each."""
    return int(_RANKS_SHARE * max_series) // SERIES_A_RANK


def shares(world_size: int, part: JobPart) -> Room:
    """What is this node's."""
    if world_size <= most_ranks(part.max_series):
        return Room(int((part.max_series - world_size * SERIES_A_RANK) * part.share), None)
    job = _JOB_SHARE * part.max_series
    hardware = int((part.max_series - job) * part.share)
    return Room(hardware, max(1, int(job * part.share)) if part.part is Part.ALONE else None)


def most_important(metrics: Sequence[Metric], room: int, forms_before: dict[str, int] | None = None) -> list[Metric]:
    """The metrics in at most so many points.

    forms_before: by metric, in which form it was sent; changed. What has become fewer points does not become more
    again: each change makes other series.
    """
    before = {} if forms_before is None else forms_before
    points = {each.name: each.data.data_points for each in metrics}
    if sum(map(len, points.values())) <= room and not any(before.get(each) for each in points):
        return list(metrics)
    ordered = sorted(metrics, key=lambda each: _IMPORTANT.index(each.name) if each.name in _IMPORTANT else 99)
    forms = {each.name: _forms(each) for each in ordered}
    taken: dict[str, int] = {}
    for each in ordered:  # one point of each before more of any
        smallest = len(forms[each.name]) - 1
        if len(forms[each.name][smallest]) <= room:
            taken[each.name] = smallest
            room -= len(forms[each.name][smallest])
    for each in ordered:
        finest = before.get(each.name, 0)
        for index, form in enumerate(forms[each.name][: taken.get(each.name, 0)]):
            if index < finest:
                continue
            more = len(form) - len(forms[each.name][taken[each.name]])
            if more <= room:
                taken[each.name], room = index, room - more
                break
    before.update(taken)
    found = []
    for each in metrics:
        if each.name in taken:
            form = forms[each.name][taken[each.name]]
            if form:
                data: Any = each.data
                found.append(dataclasses.replace(each, data=dataclasses.replace(data, data_points=form)))
    return found


def _forms(metric: Metric) -> list[Sequence[Any]]:
    """A metric's points: all of them, those of all components together, all in one; as far as these are fewer."""
    points = metric.data.data_points
    found: list[Sequence[Any]] = [points]
    if not isinstance(metric.data, Gauge | Sum):
        return found
    by_attributes: dict[tuple[tuple[str, Any], ...], list[NumberDataPoint]] = {}
    for each in metric.data.data_points:
        key = tuple(item for item in (each.attributes or {}).items() if item[0] not in _COMPONENT)
        by_attributes.setdefault(key, []).append(each)
    how = "sum" if isinstance(metric.data, Sum) else "max"
    found.append([_merged(group, key, how) for key, group in by_attributes.items()])
    found.append([_merged(metric.data.data_points, (), how)] if points else [])
    return found


def _merged(points: Sequence[NumberDataPoint], attributes: Iterable[tuple[str, Any]], how: str) -> NumberDataPoint:
    if len(points) == 1:
        return points[0]
    value = (sum if how == "sum" else max)(point.value for point in points)
    return dataclasses.replace(points[0], attributes={**dict(attributes), semantics.OVER_COMPONENTS: how}, value=value)
