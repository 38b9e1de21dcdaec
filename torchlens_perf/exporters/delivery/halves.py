"""A request that is too large for the endpoint, in two."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

# By signal: the request, and the fields down to its items.
REQUESTS: dict[str, tuple[Any, str, str, str]] = {
    "traces": (ExportTraceServiceRequest, "resource_spans", "scope_spans", "spans"),
    "metrics": (ExportMetricsServiceRequest, "resource_metrics", "scope_metrics", "metrics"),
    "logs": (ExportLogsServiceRequest, "resource_logs", "scope_logs", "log_records"),
}


def count(signal: str, body: bytes) -> int:
    """How many spans, points or records it holds. Raises google.protobuf.message.DecodeError for what is no request."""
    return sum(_size(item) for items in _lists(signal, _decoded(signal, body)) for item in items)


def halves(signal: str, body: bytes) -> list[tuple[bytes, int]]:
    """Two requests with half of the items each, and how many they hold; nothing where there is one only, or where it is
    no request.

    Points of one metric stay together.
    """
    try:
        total = sum(map(len, _lists(signal, _decoded(signal, body))))
    except DecodeError:
        return []
    if total < 2:
        return []
    found = []
    for begin, end in ((0, total // 2), (total // 2, total)):
        part, at, size = _decoded(signal, body), 0, 0
        for items in _lists(signal, part):
            length = len(items)
            kept = list(items[max(0, begin - at) : max(0, end - at)])
            del items[:]
            items.extend(kept)
            size += sum(map(_size, kept))
            at += length
        found.append((part.SerializeToString(), size))
    return found


def _decoded(signal: str, body: bytes) -> Any:
    return REQUESTS[signal][0].FromString(body)


def _lists(signal: str, request: Any) -> list[Any]:
    """The lists of spans, metrics or records in it, one for each resource and scope."""
    _, resources, scopes, items = REQUESTS[signal]
    return [getattr(scope, items) for resource in getattr(request, resources) for scope in getattr(resource, scopes)]


def _size(item: Any) -> int:
    """Points of a metric; 1 for a span or a record."""
    data = item.WhichOneof("data") if item.DESCRIPTOR.name == "Metric" else None
    return len(getattr(item, data).data_points) if data else 1
