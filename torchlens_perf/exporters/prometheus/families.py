"""Convert metrics of OpenTelemetry's SDK to metric families of prometheus_client.

Histograms of phases are converted to sums and counts, because their buckets would be 90% of all
series.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from opentelemetry.sdk.metrics.export import Gauge, Histogram, HistogramDataPoint, Sum
from opentelemetry.sdk.metrics.export import Metric as SdkMetric
from opentelemetry.trace import format_span_id, format_trace_id
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar

from torchlens_perf.errors import printable
from torchlens_perf.exporters import semantics
from torchlens_perf.exporters.prometheus.names import prometheus_name, prometheus_unit_suffix

# Largest number of points per metric. 64 ranks with 10 phases have 640 points.
MAX_POINTS = 1024
MAX_LABEL = 256
_WITHOUT_BUCKETS = {semantics.PHASE_DURATION, semantics.DEVICE_DURATION}
_OF_PROCESSES = {semantics.MEMORY, semantics.DEVICE_MEMORY}
_DROPPED = "torchlens_perf_scrape_dropped_points"
_RANK = prometheus_name(semantics.RANK)

Labels = dict[str, str]


def convert_to_families(
    metrics: Iterable[SdkMetric], resource: Mapping[str, Any], gone: Collection[int] = ()
) -> Iterator[Metric]:
    """Yield metric families with their samples, target_info first.

    resource: attributes of the node's resource. gone: ranks whose processes have ended. Memory
    gauges of these ranks are left out, and counters are kept.
    """
    info = Metric("target", "Who serves these metrics: the resource of OpenTelemetry", "info")
    info.add_sample("target_info", to_labels(resource.items()), 1)
    yield info
    ended, dropped = {str(rank) for rank in gone}, 0
    for metric in metrics:
        points: list[Any] = list(metric.data.data_points)
        dropped += max(0, len(points) - MAX_POINTS)
        del points[MAX_POINTS:]
        labelled = [(to_labels((point.attributes or {}).items()), point) for point in points]
        if isinstance(metric.data, Histogram):
            yield _convert_histogram(metric, labelled)
        else:
            lasting = metric.name not in _OF_PROCESSES
            yield _convert_number(
                metric, [each for each in labelled if lasting or each[0].get(_RANK) not in ended]
            )
    lost = Metric(
        _DROPPED, "Points that are not in this answer, as there would be too many", "gauge"
    )
    lost.add_sample(_DROPPED, {}, dropped)
    yield lost


def to_labels(attributes: Iterable[tuple[str, Any]]) -> Labels:
    """Convert attributes to labels of limited length without control characters."""
    return {
        prometheus_name(name): printable(
            ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        )[:MAX_LABEL]
        for name, value in attributes
    }


def _convert_number(metric: SdkMetric, points: Sequence[tuple[Labels, Any]]) -> Metric:
    counts = isinstance(metric.data, Sum) and metric.data.is_monotonic
    unit = prometheus_unit_suffix(metric.unit or "", gauge=isinstance(metric.data, Gauge))
    name = prometheus_name(metric.name, unit)
    found = Metric(name, metric.description or "", "counter" if counts else "gauge", unit)
    for labels, point in points:
        found.add_sample(f"{name}_total" if counts else name, labels, point.value)
    return found


def _convert_histogram(
    metric: SdkMetric, points: Sequence[tuple[Labels, HistogramDataPoint]]
) -> Metric:
    unit = prometheus_unit_suffix(metric.unit or "", gauge=False)
    name, buckets = prometheus_name(metric.name, unit), metric.name not in _WITHOUT_BUCKETS
    found = Metric(name, metric.description or "", "histogram" if buckets else "summary", unit)
    for labels, point in points:
        if buckets:
            _add_buckets(found, labels, point)
        found.add_sample(f"{name}_count", labels, point.count)
        found.add_sample(f"{name}_sum", labels, point.sum)
    return found


def _add_buckets(found: Metric, labels: Labels, point: HistogramDataPoint) -> None:
    bounds = list(point.explicit_bounds)
    examples = sorted(point.exemplars, key=lambda each: each.time_unix_nano)
    # The newest exemplar of each bucket.
    newest = {bisect_left(bounds, example.value): example for example in examples}
    for bucket, until_here in enumerate(itertools.accumulate(point.bucket_counts)):
        upper = repr(bounds[bucket]) if bucket < len(bounds) else "+Inf"
        exemplar = _to_prometheus_exemplar(newest[bucket]) if bucket in newest else None
        found.add_sample(
            f"{found.name}_bucket", {**labels, "le": upper}, until_here, exemplar=exemplar
        )


def _to_prometheus_exemplar(example: Any) -> Exemplar:
    ids = {
        "trace_id": format_trace_id(example.trace_id),
        "span_id": format_span_id(example.span_id),
    }
    return Exemplar(ids, example.value, example.time_unix_nano / 1e9)
