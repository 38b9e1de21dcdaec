"""A real OTLP receiver on loopback: Datadog's test agent in a separate environment.

The agent decodes requests over HTTP or gRPC and returns them as JSON: ids in base64, keys in
snake_case, integers as strings.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.servers import Server, accepts, free_port

PROGRAM = Path(__file__).parents[2] / ".venv-receiver" / "bin" / "ddapm-test-agent"
MISSING = (
    f"no OTLP receiver at {PROGRAM}; get it with: python3 -m venv .venv-receiver && "
    ".venv-receiver/bin/pip install 'ddapm-test-agent>=1.69,<2' (make test does)"
)


@dataclasses.dataclass(frozen=True)
class ReceivedSpan:
    """A received span."""

    trace_id: int
    span_id: int
    parent_id: int | None
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    scope: str
    status: str
    links: tuple[tuple[int, int], ...]
    status_text: str = ""
    events: tuple[tuple[str, int, tuple[tuple[str, Any], ...]], ...] = ()
    """Name, time and attributes of each event."""

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclasses.dataclass(frozen=True)
class ReceivedPoint:
    """A received metric point."""

    metric: str
    unit: str
    form: str
    """histogram, exponential_histogram, sum or gauge"""
    time_ns: int
    temporality: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    count: int
    value: float
    """The value, or the sum of a histogram."""
    bounds: tuple[float, ...]
    buckets: tuple[int, ...]
    scale: int
    """Scale of an exponential histogram. The number of its first bucket follows."""
    offset: int
    exemplars: tuple[tuple[int, int, float], ...]
    """Trace id, span id and value."""
    monotonic: bool = False
    """True for a monotonic sum."""


@dataclasses.dataclass(frozen=True)
class ReceivedEvent:
    """A received log record that has an event name."""

    name: str
    body: str
    severity: str
    time_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    scope: str
    trace_id: int
    """0 without a trace."""
    span_id: int


class Receiver:
    """A running receiver process."""

    def __init__(
        self, folder: Path, http_port: int | None = None, grpc_port: int | None = None
    ) -> None:
        """Start the agent and wait until it answers. The agent's log is written into `folder`."""
        self.http_port, self.grpc_port = http_port or free_port(), grpc_port or free_port()
        command = [
            str(PROGRAM), "--host", "127.0.0.1", "--port", str(free_port()), "--web-ui-port", str(free_port()),
            "--otlp-http-port", str(self.http_port), "--otlp-grpc-port", str(self.grpc_port),
        ]  # fmt: skip
        self._server = Server(command, folder, self._is_ready)

    def endpoint(self, protocol: str) -> str:
        """Return the value of OTEL_EXPORTER_OTLP_ENDPOINT for the protocol."""
        return f"http://127.0.0.1:{self.grpc_port if protocol == 'grpc' else self.http_port}"

    def spans(self) -> list[ReceivedSpan]:
        """Return all spans since the last clear().

        The order of spans depends on the agent's version.
        """
        return [span for request in self._get("traces") for span in spans_of(request)]

    def batches(self) -> list[int]:
        """Return the number of spans in each request."""
        return [sum(1 for _ in spans_of(request)) for request in self._get("traces")]

    def points(self) -> list[ReceivedPoint]:
        """Return all metric points since the last clear(), ordered by time."""
        points = (point for request in self._get("metrics") for point in points_of(request))
        return sorted(points, key=lambda point: point.time_ns)

    def events(self) -> list[ReceivedEvent]:
        """Return all log records since the last clear(), ordered by time."""
        events = (event for request in self._get("logs") for event in events_of(request))
        return sorted(events, key=lambda event: event.time_ns)

    def clear(self) -> None:
        """Discard everything received so far."""
        self._get("clear")

    def close(self) -> None:
        """End the agent. A second call has no effect."""
        self._server.close()

    def _get(self, what: str) -> Any:
        address = f"http://127.0.0.1:{self.http_port}/test/session/{what}"
        with urllib.request.urlopen(address, timeout=20) as answer:
            text = answer.read()
        return json.loads(text) if what != "clear" else None

    def _is_ready(self) -> bool:
        return accepts(self.grpc_port) and self._get("traces") is not None


def spans_of(request: dict[str, Any]) -> Iterator[ReceivedSpan]:
    for of_resource in request.get("resource_spans", []):
        resource = _attributes(of_resource["resource"])
        for of_scope in of_resource["scope_spans"]:
            for span in of_scope["spans"]:
                yield ReceivedSpan(
                    trace_id=_id(span["trace_id"]),
                    span_id=_id(span["span_id"]),
                    parent_id=_id(span["parent_span_id"]) if span.get("parent_span_id") else None,
                    name=span["name"],
                    start_ns=int(span["start_time_unix_nano"]),
                    end_ns=int(span["end_time_unix_nano"]),
                    attributes=_attributes(span),
                    resource=resource,
                    scope=f"{of_scope['scope']['name']} {of_scope['scope'].get('version', '')}",
                    status=span.get("status", {}).get("code", ""),
                    links=tuple(
                        (_id(link["trace_id"]), _id(link["span_id"]))
                        for link in span.get("links", [])
                    ),
                    status_text=span.get("status", {}).get("message", ""),
                    events=tuple(
                        (
                            each["name"],
                            int(each["time_unix_nano"]),
                            tuple(_attributes(each).items()),
                        )
                        for each in span.get("events", [])
                    ),
                )


def points_of(request: dict[str, Any]) -> Iterator[ReceivedPoint]:
    for of_resource in request.get("resource_metrics", []):
        resource = _attributes(of_resource["resource"])
        for of_scope in of_resource["scope_metrics"]:
            for metric in of_scope.get("metrics", []):
                for form in ("histogram", "exponential_histogram", "sum", "gauge"):
                    data = metric.get(form, {})
                    for point in data.get("data_points", []):
                        yield ReceivedPoint(
                            metric=metric["name"],
                            unit=metric["unit"],
                            form=form,
                            time_ns=int(point["time_unix_nano"]),
                            temporality=data.get("aggregation_temporality", "")
                            .lower()
                            .rpartition("_")[2],
                            attributes=_attributes(point),
                            resource=resource,
                            count=int(point.get("count", 0)),
                            value=float(
                                point.get("sum", point.get("as_double", point.get("as_int", 0)))
                            ),
                            bounds=tuple(point.get("explicit_bounds", ())),
                            buckets=tuple(
                                int(count)
                                for count in point.get("positive", point).get("bucket_counts", ())
                            ),
                            scale=int(point.get("scale", 0)),
                            offset=int(point.get("positive", {}).get("offset", 0)),
                            exemplars=tuple(
                                (_id(each["trace_id"]), _id(each["span_id"]), each["as_double"])
                                for each in point.get("exemplars", ())
                            ),
                            monotonic=bool(data.get("is_monotonic", False)),
                        )


def events_of(request: dict[str, Any]) -> Iterator[ReceivedEvent]:
    for of_resource in request.get("resource_logs", []):
        resource = _attributes(of_resource["resource"])
        for of_scope in of_resource["scope_logs"]:
            for record in of_scope["log_records"]:
                yield ReceivedEvent(
                    name=record["event_name"],
                    body=record["body"]["string_value"],
                    severity=f"{record['severity_text']} {record['severity_number']}",
                    time_ns=int(record["time_unix_nano"]),
                    attributes=_attributes(record),
                    resource=resource,
                    scope=f"{of_scope['scope']['name']} {of_scope['scope'].get('version', '')}",
                    trace_id=_id(record.get("trace_id", "")),
                    span_id=_id(record.get("span_id", "")),
                )


def _id(text: str) -> int:
    return int.from_bytes(base64.b64decode(text), "big")


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    return {
        attribute["key"]: _plain(attribute["value"]) for attribute in holder.get("attributes", [])
    }


def _plain(held: dict[str, Any]) -> Any:
    ((kind, value),) = held.items()
    if kind == "array_value":
        return [_plain(each) for each in value["values"]]
    return {"string_value": str, "int_value": int, "double_value": float, "bool_value": bool}[kind](
        value
    )
