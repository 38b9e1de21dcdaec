"""Convert spans, metrics and log records of OpenTelemetry's SDK to OTLP requests, and back.

Requests are encoded by OpenTelemetry's own exporters, so any endpoint accepts a request that was
stored in a file.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.trace.status import Status, StatusCode

Item: TypeAlias = ReadableSpan | ReadableLogRecord | MetricsData
"""An element of a request. A request of metrics has a single element."""

# Bit of SpanFlags: the parent or linked span belongs to another process.
_REMOTE = 0x200
_ENCODERS = {
    "traces": ("trace_encoder", "encode_spans"),
    "metrics": ("metrics_encoder", "encode_metrics"),
    "logs": ("_log_encoder", "encode_logs"),
}


def count_items(items: Iterable[Item]) -> int:
    """Return the number of spans, metric points or log records in these items."""
    return sum(
        sum(len(metric.data.data_points) for metric in metrics_of(item))
        if isinstance(item, MetricsData)
        else 1
        for item in items
    )


def metrics_of(data: MetricsData) -> list[sdk.Metric]:
    """Return the metrics of all resources and scopes."""
    return [
        metric
        for of in data.resource_metrics
        for scope in of.scope_metrics
        for metric in scope.metrics
    ]


def split_in_halves(items: Sequence[Item]) -> list[list[Item]]:
    """Split the items of a request in two; [] if it has a single item or metric."""
    if len(items) > 1:
        return [list(items[: len(items) // 2]), list(items[len(items) // 2 :])]
    if (
        len(items) == 1
        and isinstance(data := items[0], MetricsData)
        and (count := len(metrics_of(data))) > 1
    ):
        return [
            [_slice_of_metrics(data, 0, count // 2)],
            [_slice_of_metrics(data, count // 2, count)],
        ]
    return []


def _slice_of_metrics(data: MetricsData, begin: int, end: int) -> MetricsData:
    # NodeMetrics creates exactly one resource and one scope.
    (of,) = data.resource_metrics
    (scope,) = of.scope_metrics
    kept = sdk.ScopeMetrics(scope.scope, scope.metrics[begin:end], scope.schema_url)
    return MetricsData([sdk.ResourceMetrics(of.resource, [kept], of.schema_url)])


def build_message(signal: str, items: Sequence[Item]) -> Any:
    """Build the protobuf message of a request with the encoders of the SDK's exporters."""
    module, name = _ENCODERS[signal]
    encode = getattr(
        importlib.import_module(f"opentelemetry.exporter.otlp.proto.common.{module}"), name
    )
    return encode(items[0] if signal == "metrics" else items)


def encode_request(signal: str, items: Sequence[Item]) -> bytes:
    """Encode items as the bytes of a request."""
    body: bytes = build_message(signal, items).SerializeToString()
    return body


def decode_request(signal: str, body: bytes) -> list[Item]:
    """Decode the bytes of a request to items. Raises ValueError if the bytes are invalid."""
    try:
        if signal == "traces":
            return list(_decode_spans(ExportTraceServiceRequest.FromString(body)))
        if signal == "logs":
            return list(_decode_log_records(ExportLogsServiceRequest.FromString(body)))
        return [_decode_metrics(ExportMetricsServiceRequest.FromString(body))]
    except (DecodeError, KeyError, TypeError) as error:
        raise ValueError(f"not a request of {signal}: {error}") from error


def _decode_spans(request: ExportTraceServiceRequest) -> Iterator[ReadableSpan]:
    for of_resource in request.resource_spans:
        resource = _decode_resource(of_resource)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                context = _decode_span_context(span.trace_id, span.span_id, 0, span.trace_state)
                parent = (
                    _decode_span_context(span.trace_id, span.parent_span_id, span.flags)
                    if span.parent_span_id
                    else None
                )
                links = [
                    Link(
                        _decode_span_context(each.trace_id, each.span_id, each.flags),
                        _decode_attributes(each),
                    )
                    for each in span.links
                ]
                yield ReadableSpan(
                    span.name, context, parent, resource, _decode_attributes(span), links=links,
                    status=Status(StatusCode(span.status.code)), start_time=span.start_time_unix_nano,
                    end_time=span.end_time_unix_nano, instrumentation_scope=_decode_scope(of_scope),
                )  # fmt: skip


def _decode_log_records(request: ExportLogsServiceRequest) -> Iterator[ReadableLogRecord]:
    from opentelemetry._logs import LogRecord, SeverityNumber

    for of_resource in request.resource_logs:
        resource = _decode_resource(of_resource)
        for of_scope in of_resource.scope_logs:
            for each in of_scope.log_records:
                context = _decode_span_context(each.trace_id, each.span_id, 0)
                record = LogRecord(
                    timestamp=each.time_unix_nano, observed_timestamp=each.observed_time_unix_nano,
                    context=context_with_span(context) if each.trace_id else None,
                    severity_text=each.severity_text, severity_number=SeverityNumber(each.severity_number),
                    body=_decode_value(each.body), attributes=_decode_attributes(each), event_name=each.event_name,
                )  # fmt: skip
                yield ReadableLogRecord(record, resource, _decode_scope(of_scope))


def _decode_metrics(request: ExportMetricsServiceRequest) -> MetricsData:
    return MetricsData(
        [
            sdk.ResourceMetrics(
                _decode_resource(of),
                [
                    sdk.ScopeMetrics(_decode_scope(each), [*map(_decode_metric, each.metrics)], "")
                    for each in of.scope_metrics
                ],
                "",
            )
            for of in request.resource_metrics
        ]
    )


_POINTS = {
    "gauge": (sdk.Gauge, sdk.NumberDataPoint),
    "sum": (sdk.Sum, sdk.NumberDataPoint),
    "histogram": (sdk.Histogram, sdk.HistogramDataPoint),
    "exponential_histogram": (sdk.ExponentialHistogram, sdk.ExponentialHistogramDataPoint),
}


def _decode_metric(metric: Any) -> sdk.Metric:
    kind = metric.WhichOneof("data")
    made_of, points_of = _POINTS[kind]
    data = getattr(metric, kind)
    points = [_from_message(points_of, each) for each in data.data_points]
    return sdk.Metric(
        metric.name,
        metric.description,
        metric.unit,
        _from_message(made_of, data, data_points=points),
    )


def _from_message(kind: type, message: Any, **known: Any) -> Any:
    """Create a dataclass of the SDK from the message's fields with the same names."""
    fields = (field.name for field in dataclasses.fields(kind) if field.name not in known)
    return kind(**known, **{name: _FIELDS.get(name, _copy_value)(message, name) for name in fields})


def _copy_value(message: Any, name: str) -> Any:
    found = getattr(message, name)
    return list(found) if isinstance(found, Sequence) else found


_FIELDS: dict[str, Callable[[Any, str], Any]] = {
    "attributes": lambda message, _: _decode_attributes(message),
    "filtered_attributes": lambda message, _: {},
    "value": lambda message, _: getattr(message, message.WhichOneof("value")),
    "exemplars": lambda message, _: [_from_message(Exemplar, each) for each in message.exemplars],
    "trace_id": lambda message, _: _decode_id(message.trace_id),
    "span_id": lambda message, _: _decode_id(message.span_id),
    "positive": lambda message, _: _from_message(sdk.Buckets, message.positive),
    "negative": lambda message, _: _from_message(sdk.Buckets, message.negative),
    "aggregation_temporality": lambda data, _: sdk.AggregationTemporality(
        data.aggregation_temporality
    ),
}


def context_with_span(context: SpanContext) -> Any:
    """Return a context with a span of this span context as the current span."""
    return set_span_in_context(NonRecordingSpan(context))


def _decode_span_context(
    trace_id: bytes, span_id: bytes, flags: int, state: str = ""
) -> SpanContext:
    is_remote, kept = bool(flags & _REMOTE), TraceState.from_header([state]) if state else None
    return SpanContext(
        _decode_id(trace_id), _decode_id(span_id), is_remote, TraceFlags(TraceFlags.SAMPLED), kept
    )


def _decode_id(text: bytes) -> int:
    return int.from_bytes(text, "big")


def _decode_resource(of_resource: Any) -> Resource:
    return Resource(_decode_attributes(of_resource.resource), of_resource.schema_url)


def _decode_scope(of_scope: Any) -> InstrumentationScope:
    return InstrumentationScope(of_scope.scope.name, of_scope.scope.version)


def _decode_attributes(holder: Any) -> dict[str, Any]:
    return {each.key: _decode_value(each.value) for each in holder.attributes}


def _decode_value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_decode_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
