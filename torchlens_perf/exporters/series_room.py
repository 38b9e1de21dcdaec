"""How many series each node may send, so that all nodes together keep within the job's number. Pure.

Half of what a large job may send describes the job, and comes from node 0; the rest is for the nodes' hardware, a node
as much as another. Where a node's share is smaller than what it has, the most important comes first, and points of
several components become one: the largest value, or for counters the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from torchlens_perf.exporters import JobPart, Part, semantics
from torchlens_perf.exporters.delivery.wire import key_values

if TYPE_CHECKING:
    from opentelemetry.proto.metrics.v1.metrics_pb2 import NumberDataPoint

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
    points = {each.name: _points(each) for each in metrics}
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
                found.append(_with(each, form))
    return found


def _forms(metric: Metric) -> list[Sequence[Any]]:
    """A metric's points: all of them, those of all components together, all in one; as far as these are fewer."""
    points = _points(metric)
    found: list[Sequence[Any]] = [points]
    if metric.WhichOneof("data") not in ("gauge", "sum"):
        return found
    by_attributes: dict[tuple[tuple[str, str], ...], list[NumberDataPoint]] = {}
    for each in points:
        by_attributes.setdefault(_attributes(each), []).append(each)
    grows = metric.WhichOneof("data") == "sum"
    found.append([_merged(group, key, grows=grows) for key, group in by_attributes.items()])
    found.append([_merged(points, (), grows=grows)] if points else [])
    return found


def _merged(
    points: Sequence[NumberDataPoint], attributes: Iterable[tuple[str, str]], *, grows: bool
) -> NumberDataPoint:
    if len(points) == 1:
        return points[0]
    merged = type(points[0])()
    merged.CopyFrom(points[0])
    del merged.attributes[:]
    how = "sum" if grows else "max"
    merged.attributes.extend(key_values({**dict(attributes), semantics.OVER_COMPONENTS: how}))
    values = [_value(each) for each in points]
    value = sum(values) if grows else max(values)
    if all(each.WhichOneof("value") == "as_int" for each in points):
        merged.as_int = int(value)
    else:
        merged.as_double = float(value)
    return merged


def _attributes(point: NumberDataPoint) -> tuple[tuple[str, str], ...]:
    return tuple((each.key, each.value.string_value) for each in point.attributes if each.key not in _COMPONENT)


def _value(point: NumberDataPoint) -> float:
    return float(point.as_int if point.WhichOneof("value") == "as_int" else point.as_double)


def _points(metric: Metric) -> list[Any]:
    return list(getattr(metric, str(metric.WhichOneof("data"))).data_points)


def _with(metric: Metric, points: Sequence[Any]) -> Metric:
    """The metric with these points alone."""
    found = Metric()
    found.CopyFrom(metric)
    data = getattr(found, str(found.WhichOneof("data")))
    del data.data_points[:]
    data.data_points.extend(points)
    return found
