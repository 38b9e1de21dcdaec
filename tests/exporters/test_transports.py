"""Classification of responses to a request over HTTP or gRPC."""

from __future__ import annotations

import gzip
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from tests.exporters.test_delivery import KEPT, spans_of
from tests.support.endpoints import answering, grpc_answering, refusing, serving, silent
from tests.support.otlp_environment import sent, transport_for, variables
from tests.support.otlp_receiver import Receiver
from torchlens_perf.exporters.delivery import sdk_exporters
from torchlens_perf.exporters.delivery.answer import SendOutcome, SendResult, parse_retry_after
from torchlens_perf.exporters.delivery.local import build_message
from torchlens_perf.exporters.delivery.sender import count_items

PARTIAL = ExportTraceServiceResponse(
    partial_success=ExportTracePartialSuccess(rejected_spans=3, error_message="no")
)
PROTOBUF = {"Content_Type": "application/x-protobuf"}


def over_http(address: str, timeout_s: int = 5, **told: str) -> SendResult:
    return sent("http/protobuf", spans_of("a"), ENDPOINT=address, TIMEOUT=str(timeout_s), **told)


@pytest.mark.parametrize(
    ("status", "headers", "outcome", "after_s"),
    [
        (200, {}, SendOutcome.DELIVERED, None),
        (202, {}, SendOutcome.DELIVERED, None),
        (400, {}, SendOutcome.REFUSED, None),
        (401, {}, SendOutcome.LATER, None),
        (404, {}, SendOutcome.LATER, None),
        (408, {}, SendOutcome.LATER, None),
        (413, {}, SendOutcome.REFUSED, None),
        (415, {}, SendOutcome.REFUSED, None),
        (429, {"Retry_After": "7"}, SendOutcome.LATER, 7.0),
        (429, {"Retry_After": "whenever"}, SendOutcome.LATER, None),
        (429, {"Retry_After": "Thu, 01 Jan 1970 00:00:00 GMT"}, SendOutcome.LATER, 0.0),
        (500, {}, SendOutcome.LATER, None),
        (502, {}, SendOutcome.LATER, None),
        (503, {"Retry_After": "0"}, SendOutcome.LATER, 0.0),
        (504, {}, SendOutcome.LATER, None),
        (307, {"Location": "http://127.0.0.1:1/"}, SendOutcome.LATER, None),
        (200, {"Content_Type": "text/html"}, SendOutcome.LATER, None),
    ],
)
def test_http_status_decides_between_retry_and_refusal(
    status: int, headers: dict[str, str], outcome: SendOutcome, after_s: float | None
) -> None:
    """OTLP's specification defines the classes.

    If the server is no endpoint or the credentials are wrong, data is kept.
    """
    endpoint = answering(status, **headers)
    with serving(endpoint) as address:
        answer = over_http(address)
    assert (answer.outcome, answer.after_s, endpoint.requests) == (outcome, after_s, 1)


def test_reason_of_a_refusal_is_the_message_of_the_endpoint() -> None:
    """Terminal control characters in the message are removed before it is logged."""
    with serving(
        answering(400, Status(message="bad \x1b[2J field").SerializeToString(), **PROTOBUF)
    ) as address:
        reason = over_http(address).reason
    assert "bad " in reason
    assert "\x1b" not in reason


def test_items_rejected_over_http_are_counted_and_others_delivered() -> None:
    """A response body that is no OTLP is ignored."""
    with serving(answering(200, PARTIAL.SerializeToString(), **PROTOBUF)) as address:
        assert over_http(address) == SendResult(SendOutcome.DELIVERED, rejected=3)
    with serving(answering(200, b"\xff\xff\xff", **PROTOBUF)) as address:
        assert over_http(address) == SendResult(SendOutcome.DELIVERED)


def test_refused_or_broken_connection_is_retried() -> None:
    """A request without a response is retried too."""

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
            assert over_http(address).outcome is SendOutcome.LATER


@pytest.mark.parametrize(
    ("compression", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)]
)
def test_body_is_compressed_and_user_headers_are_sent(compression: str, unpack: Any) -> None:
    seen: list[tuple[Any, bytes]] = []

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append((self.headers, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with serving(Endpoint) as address:
        answer = over_http(
            address, COMPRESSION="none", TRACES_COMPRESSION=compression,
            HEADERS="authorization=Bearer%20token,x-tenant=7",
        )  # fmt: skip
    assert answer == SendResult(SendOutcome.DELIVERED)
    ((headers, body),) = seen
    assert unpack(body) == build_message("traces", spans_of("a")).SerializeToString()
    assert (headers["Content-Encoding"], headers["authorization"], headers["x-tenant"]) == (
        compression, "Bearer token", "7",
    )  # fmt: skip
    assert headers["Content-Type"] == "application/x-protobuf"


_PROVIDER = """
import requests
def session():
    made = requests.Session()
    made.headers["Authorization"] = "of the provider"
    return made
def nothing():
    return None
"""


def test_requests_are_sent_by_the_session_of_the_credential_provider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's entry point creates the session, and its responses are classified like any
    other.
    """
    (tmp_path / "of_the_user.py").write_text(_PROVIDER)
    package = tmp_path / "of_the_user-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: of-the-user\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[opentelemetry_otlp_credential_provider]\nmine = of_the_user:session\nempty ="
        " of_the_user:nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[str] = []

    class Redirects(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            seen.append(self.headers["Authorization"])
            self.send_response(307)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    variable = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER"
    with (
        serving(Redirects) as address,
        variables({"OTEL_EXPORTER_OTLP_ENDPOINT": address, variable: "mine"}),
    ):
        transport = sdk_exporters.create_transport("traces", "http/protobuf")
        assert transport.send(spans_of("a")).outcome is SendOutcome.LATER
        transport.close()
    assert seen == ["of the provider"]
    for name in ("empty", "missing"):
        with variables({variable: name}), pytest.raises(RuntimeError, match=name):
            sdk_exporters.create_transport("traces", "http/protobuf")


# -- gRPC


def over_grpc(address: str, spans: int = 1) -> SendResult:
    return sent("grpc", spans_of(*["a"] * spans), ENDPOINT=address, TIMEOUT="2")


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (grpc.StatusCode.OK, SendOutcome.DELIVERED),
        (grpc.StatusCode.INVALID_ARGUMENT, SendOutcome.REFUSED),
        (grpc.StatusCode.UNAVAILABLE, SendOutcome.LATER),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, SendOutcome.LATER),
        (grpc.StatusCode.DEADLINE_EXCEEDED, SendOutcome.LATER),
        (grpc.StatusCode.UNAUTHENTICATED, SendOutcome.LATER),
        (grpc.StatusCode.UNIMPLEMENTED, SendOutcome.LATER),
        (grpc.StatusCode.INTERNAL, SendOutcome.LATER),
    ],
)
def test_grpc_status_decides_between_retry_and_refusal(
    status: grpc.StatusCode, outcome: SendOutcome
) -> None:
    with grpc_answering(status) as address:
        assert over_grpc(address).outcome is outcome


def test_grpc_retry_info_rejections_and_size_limit_are_obeyed() -> None:
    """The server can ask for a pause, accept a part of the items, or limit the size of messages."""
    asked = Status(code=8)
    asked.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=2, nanos=500_000_000)))
    busy = threading.Event()
    busy.set()

    class Spans(TraceServiceServicer):
        def Export(self, request: Any, context: grpc.ServicerContext) -> ExportTraceServiceResponse:
            if busy.is_set():
                context.set_trailing_metadata(
                    [("grpc-status-details-bin", asked.SerializeToString())]
                )
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "later")
            return PARTIAL

    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.max_receive_message_length", 1000)])
    add_TraceServiceServicer_to_server(Spans(), server)
    address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        answer = over_grpc(address)
        assert (answer.outcome, answer.after_s) == (SendOutcome.LATER, 2.5)
        busy.clear()
        assert over_grpc(address) == SendResult(SendOutcome.DELIVERED, rejected=3)
        assert over_grpc(address, spans=100).outcome is SendOutcome.REFUSED
    finally:
        server.stop(0).wait(5)


def test_port_of_the_other_protocol_is_retried() -> None:
    """The data is kept, because the user can correct the port."""
    with grpc_answering(grpc.StatusCode.OK) as address:
        assert over_http(address).outcome is SendOutcome.LATER
    with serving(answering(200)) as address:
        assert over_grpc(address).outcome is SendOutcome.LATER


@pytest.mark.parametrize("signal", KEPT)
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_each_signal_arrives_unchanged_over_http_and_grpc(
    signal: str, protocol: str, receiver: Receiver
) -> None:
    """The endpoint is a real one."""
    answer = sent(protocol, KEPT[signal], signal, ENDPOINT=receiver.endpoint(protocol))
    assert answer == SendResult(SendOutcome.DELIVERED)
    found = {"traces": receiver.spans, "logs": receiver.events, "metrics": receiver.points}[
        signal
    ]()
    assert len(found) == count_items(KEPT[signal])


# -- the wait that an endpoint asks for


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("7", 7.0), (" 0 ", 0.0), ("Thu, 01 Jan 1970 00:00:30 GMT", 20.0),
        ("Thu, 01 Jan 1970 00:00:05 GMT", 0.0), ("soon", None), ("", None), ("1.5", None),
        ("Mon, 01 Jan 2024 00:00:00 +99999999999999999", None),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 253402300799.0 - 10.0),
        ("Fri, 31 Dec 9999 23:59:59 -2359", None),
        ("Mon, 01 Jan 0001 00:00:00 +2359", None),
        ("9" * 400, float("inf")),
        ("1e18", None), ("-7", None), ("nan", None), ("inf", None), ("0x10", None), ("\u0663", 3.0),
    ],
)  # fmt: skip
def test_retry_after_of_any_size_is_accepted(header: str, expected: float | None) -> None:
    found = parse_retry_after(header, unix_s=10.0)
    assert found == expected or (expected is None and found is not None and found >= 0.0)


@pytest.mark.parametrize(
    "header", ["Mon, 01 Jan 2024 00:00:00 +99999999999999999", "1e18", "-7", "NaN", "9" * 400]
)
def test_failure_reason_has_the_http_status_for_any_retry_after(header: str) -> None:
    with serving(answering(429, Retry_After=header)) as address:
        answer = over_http(address)
    assert answer.outcome is SendOutcome.LATER
    assert answer.reason.startswith("HTTP 429")


@pytest.mark.parametrize(
    ("delay", "expected"),
    [
        (Duration(seconds=10**18), 1e18),
        (Duration(seconds=(1 << 63) - 1), float((1 << 63) - 1)),
        (Duration(seconds=-5), 0.0),
        (Duration(seconds=-(1 << 63)), 0.0),
        (Duration(seconds=1, nanos=-(1 << 31)), 0.0),
        (Duration(seconds=3, nanos=500_000_000), 3.5),
    ],
)
def test_grpc_retry_info_of_any_size_is_accepted(delay: Duration, expected: float) -> None:
    packed = AnyMessage()
    packed.Pack(RetryInfo(retry_delay=delay))
    asked = Status(code=8, details=[packed])

    class Busy(TraceServiceServicer):
        def Export(self, request: Any, context: grpc.ServicerContext) -> None:
            context.set_trailing_metadata([("grpc-status-details-bin", asked.SerializeToString())])
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "later")

    endpoint = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Busy(), endpoint)
    port = endpoint.add_insecure_port("127.0.0.1:0")
    endpoint.start()
    try:
        transport = transport_for("grpc", ENDPOINT=f"http://127.0.0.1:{port}", TIMEOUT="30")
        answer = transport.send(spans_of("a"))
        transport.close()
    finally:
        endpoint.stop(None)
    assert (answer.outcome, answer.after_s) == (SendOutcome.LATER, expected)
    assert answer.reason.startswith("gRPC RESOURCE_EXHAUSTED")
