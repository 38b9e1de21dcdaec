"""One request over HTTP or gRPC to endpoints that answer as they like: what the answer is taken for."""

from __future__ import annotations

import gzip
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from tests.support.endpoints import answering, grpc_answering, refusing, serving, silent
from torchlens_perf.exporters.delivery.answer import Answer, Outcome
from torchlens_perf.exporters.delivery.grpc_channel import GrpcTransport
from torchlens_perf.exporters.delivery.http import HttpTransport
from torchlens_perf.exporters.delivery.settings import Destination, destination

BODY = ExportTraceServiceRequest().SerializeToString() or b""
PARTIAL = ExportTraceServiceResponse(partial_success=ExportTracePartialSuccess(rejected_spans=3, error_message="no"))
PROTOBUF = {"Content_Type": "application/x-protobuf"}


def over_http(address: str, **settings: Any) -> Answer:
    transport = HttpTransport(Destination("traces", f"{address}/v1/traces", timeout_s=5.0, **settings))
    try:
        return transport.send(BODY)
    finally:
        transport.close()


@pytest.mark.parametrize(
    ("status", "headers", "outcome", "after_s"),
    [
        (200, {}, Outcome.DELIVERED, None),
        (202, {}, Outcome.DELIVERED, None),
        (400, {}, Outcome.REFUSED, None),
        (401, {}, Outcome.LATER, None),
        (404, {}, Outcome.LATER, None),
        (408, {}, Outcome.LATER, None),
        (413, {}, Outcome.TOO_LARGE, None),
        (415, {}, Outcome.REFUSED, None),
        (429, {"Retry_After": "7"}, Outcome.LATER, 7.0),
        (429, {"Retry_After": "whenever"}, Outcome.LATER, None),
        (429, {"Retry_After": "Thu, 01 Jan 1970 00:00:00 GMT"}, Outcome.LATER, 0.0),
        (500, {}, Outcome.LATER, None),
        (502, {}, Outcome.LATER, None),
        (503, {"Retry_After": "0"}, Outcome.LATER, 0.0),
        (504, {}, Outcome.LATER, None),
        (307, {"Location": "http://127.0.0.1:1/"}, Outcome.LATER, None),
        (200, {"Content_Type": "text/html"}, Outcome.LATER, None),
    ],
)
def test_what_http_answers_mean(status: int, headers: dict[str, str], outcome: Outcome, after_s: float | None) -> None:
    """By the specification; and what is no endpoint, or not with these credentials, keeps the data."""
    endpoint = answering(status, **headers)
    with serving(endpoint) as address:
        answer = over_http(address)
    assert (answer.outcome, answer.after_s, endpoint.requests) == (outcome, after_s, 1)


def test_reason_of_a_refusal() -> None:
    """The endpoint's words reach the log, where it has any, without what could drive a terminal."""
    with serving(answering(400, Status(message="bad \x1b[2J field").SerializeToString(), **PROTOBUF)) as address:
        reason = over_http(address).reason
    assert "bad " in reason
    assert "\x1b" not in reason


def test_partial_success_over_http() -> None:
    """Delivered, but for those that the endpoint rejects; what is no answer of OTLP says nothing."""
    with serving(answering(200, PARTIAL.SerializeToString(), **PROTOBUF)) as address:
        assert over_http(address) == Answer(Outcome.DELIVERED, rejected=3)
    with serving(answering(200, b"\xff\xff\xff", **PROTOBUF)) as address:
        assert over_http(address) == Answer(Outcome.DELIVERED)


def test_connections_that_break() -> None:
    """Nobody there, no answer, or one that breaks off: all to be tried again."""

    class BreaksOff(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"some")
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    for context in (refusing(), silent(), serving(BreaksOff)):
        with context as address:
            assert over_http(address).outcome is Outcome.LATER


@pytest.mark.parametrize(("compression", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_compression_and_headers(compression: str, unpack: Any) -> None:
    """The body is packed as its header says, and the user's headers are there."""
    seen: list[tuple[Any, bytes]] = []

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append((self.headers, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    environ = {
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": compression,
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20token,x-tenant=7",
    }  # fmt: skip
    with serving(Endpoint) as address:
        to = destination("traces", "http/protobuf", {**environ, "OTEL_EXPORTER_OTLP_ENDPOINT": address})
        assert HttpTransport(to).send(b"body" * 100).outcome is Outcome.DELIVERED
    ((headers, body),) = seen
    assert unpack(body) == b"body" * 100
    assert (headers["Content-Encoding"], headers["authorization"], headers["x-tenant"]) == (
        compression, "Bearer token", "7",
    )  # fmt: skip
    assert headers["Content-Type"] == "application/x-protobuf"


# -- gRPC


def over_grpc(address: str, body: bytes = BODY) -> Answer:
    to = destination("traces", "grpc", {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_EXPORTER_OTLP_TIMEOUT": "2"})
    transport = GrpcTransport(to)
    try:
        return transport.send(body)
    finally:
        transport.close()


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (grpc.StatusCode.OK, Outcome.DELIVERED),
        (grpc.StatusCode.INVALID_ARGUMENT, Outcome.REFUSED),
        (grpc.StatusCode.UNAVAILABLE, Outcome.LATER),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Outcome.LATER),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Outcome.LATER),
        (grpc.StatusCode.UNAUTHENTICATED, Outcome.LATER),
        (grpc.StatusCode.UNIMPLEMENTED, Outcome.LATER),
        (grpc.StatusCode.INTERNAL, Outcome.LATER),
    ],
)
def test_what_grpc_answers_mean(status: grpc.StatusCode, outcome: Outcome) -> None:
    with grpc_answering(status) as address:
        assert over_grpc(address).outcome is outcome


def test_grpc_asks_to_wait_rejects_and_finds_too_large() -> None:
    """RetryInfo says how long; a partial success what was left out; a request beyond the server's limit is halved."""
    asked = Status(code=8)
    asked.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=2, nanos=500_000_000)))
    busy = threading.Event()
    busy.set()

    class Spans(TraceServiceServicer):
        def Export(self, request: Any, context: grpc.ServicerContext) -> ExportTraceServiceResponse:
            if busy.is_set():
                context.set_trailing_metadata([("grpc-status-details-bin", asked.SerializeToString())])
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "later")
            return PARTIAL

    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.max_receive_message_length", 1000)])
    add_TraceServiceServicer_to_server(Spans(), server)
    address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        answer = over_grpc(address)
        assert (answer.outcome, answer.after_s) == (Outcome.LATER, 2.5)
        busy.clear()
        assert over_grpc(address) == Answer(Outcome.DELIVERED, rejected=3)
        assert over_grpc(address, bytes(2000)).outcome is Outcome.TOO_LARGE
    finally:
        server.stop(0).wait(5)


# -- settings


@pytest.mark.parametrize(
    ("protocol", "environ", "endpoint"),
    [
        ("http/protobuf", {}, "http://localhost:4318/v1/traces"),
        ("http/protobuf", {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:1/base/"}, "https://c:1/base/v1/traces"),
        ("http/protobuf", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c:1/as/it/is"}, "https://c:1/as/it/is"),
        ("grpc", {}, "localhost:4317"),
        ("grpc", {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:1"}, "c:1"),
        ("grpc", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "c:1"}, "c:1"),
    ],
)
def test_endpoints(protocol: str, environ: dict[str, str], endpoint: str) -> None:
    assert destination("traces", protocol, environ).endpoint == endpoint


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_EXPORTER_OTLP_COMPRESSION": "zstd"},
        {"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"},
        {"OTEL_EXPORTER_OTLP_TIMEOUT": "-1"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "ftp://c"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"},
    ],
)
def test_settings_that_cannot_be_used(environ: dict[str, str]) -> None:
    """A ValueError that names what to mend: the signal is off then."""
    with pytest.raises(ValueError, match=r"OTEL_EXPORTER_OTLP|endpoint"):
        destination("traces", "http/protobuf", environ)
