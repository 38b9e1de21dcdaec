"""Recovery of endpoints: everything is delivered automatically, and at most one request twice.

The real exporter sends to real servers. Each fault costs a pause, so all faults run at the same
time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
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

from tests.exporters.test_exporters import batch_of, identity
from tests.support.certificates import certificate
from tests.support.otlp_environment import exporter_for
from tests.support.servers import wait_for
from torchlens_perf.exporters import Exporter

STEPS, IN_A_REQUEST = 10, 5
SPANS = 5 * STEPS
"""Spans of rank 0: for each step a root, the rank's step and three spans in it."""
PROTOBUF = {"Content-Type": "application/x-protobuf"}
REJECTED = 2


@dataclasses.dataclass
class Taken:
    """The data that an endpoint has accepted, and the number of its requests."""

    spans: collections.Counter[bytes] = dataclasses.field(default_factory=collections.Counter)
    asked: int = 0
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def take(self, body: bytes) -> None:
        message = ExportTraceServiceRequest.FromString(body)
        ids = [
            span.span_id
            for of in message.resource_spans
            for each in of.scope_spans
            for span in each.spans
        ]
        with self.lock:
            self.spans.update(ids)

    def first(self) -> bool:
        """Count a request and return True for the first one."""
        with self.lock:
            self.asked += 1
            return self.asked == 1

    def doubles(self) -> int:
        return sum(count - 1 for count in self.spans.values())


class _Handler(BaseHTTPRequestHandler):
    taken: Taken

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.taken.first():
            self.wrong(body)
        else:
            self.right(body)

    def right(self, body: bytes) -> None:
        self.taken.take(body)
        self.answer(200, **PROTOBUF)

    def wrong(self, body: bytes) -> None:
        self.right(body)

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def answers(status: int, body: bytes = b"", **headers: str) -> type[_Handler]:
    """Return a handler that rejects the first request with the given response."""

    class Handler(_Handler):
        def wrong(self, _: bytes) -> None:
            self.answer(status, body, **headers)

    return Handler


class BreaksOff(_Handler):
    """A handler that closes the connection of the first request without accepting it."""

    def wrong(self, body: bytes) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)


class AnswerIsLost(_Handler):
    """A handler that accepts the first request, but closes the connection before responding."""

    def wrong(self, body: bytes) -> None:
        self.taken.take(body)
        self.connection.shutdown(socket.SHUT_RDWR)


class AnswersInJson(_Handler):
    """A handler that accepts everything and responds in JSON, the other encoding of OTLP."""

    def right(self, body: bytes) -> None:
        self.taken.take(body)
        self.answer(200, b'{"partialSuccess":{}}', **{"Content-Type": "application/json"})


class Rejects(_Handler):
    """A handler that rejects some spans of the first request."""

    def wrong(self, body: bytes) -> None:
        self.taken.take(body)
        partial = ExportTracePartialSuccess(rejected_spans=REJECTED, error_message="on purpose")
        self.answer(
            200, ExportTraceServiceResponse(partial_success=partial).SerializeToString(), **PROTOBUF
        )


HTTP: dict[str, type[_Handler]] = {
    "429": answers(429, **{"Retry-After": "1"}),
    "500": answers(500),
    "502": answers(502),
    "503": answers(503, **{"Retry-After": "1"}),
    "504": answers(504),
    "401": answers(401),
    "404": answers(404),
    "redirect": answers(307, Location="http://127.0.0.1:1/v1/traces"),
    "a web page": answers(200, b"<html>", **{"Content-Type": "text/html; charset=utf-8"}),
    "breaks off": BreaksOff,
    "answer is lost": AnswerIsLost,
    "answers in JSON": AnswersInJson,
    "partial success": Rejects,
}
TLS = ("expired certificate", "asks for another certificate")
GRPC = {
    "grpc UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "grpc RESOURCE_EXHAUSTED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "grpc UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
}
FAULTS = (*HTTP, *TLS, *GRPC)


@contextlib.contextmanager
def over_http(
    handler: type[_Handler], taken: Taken, contexts: tuple[ssl.SSLContext, ...] = ()
) -> Iterator[str]:
    """Run an HTTP endpoint.

    `contexts` has one TLS context for each connection; the last one is reused.
    """

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        connections = 0

        def get_request(self) -> tuple[Any, Any]:
            connection, address = super().get_request()
            if not contexts:
                return connection, address
            context = contexts[min(self.connections, len(contexts) - 1)]
            self.connections += 1
            try:
                return context.wrap_socket(connection, server_side=True), address
            except OSError:  # The client closes the connection, as expected.
                connection.close()
                taken.first()
                raise

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), type("Handler", (handler,), {"taken": taken}))
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield f"{'https' if contexts else 'http'}://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def over_grpc(status: grpc.StatusCode, taken: Taken) -> Iterator[str]:
    """Run a gRPC endpoint that fails the first request and asks for a retry in a second."""

    class Endpoint(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: grpc.ServicerContext) -> Any:
            if taken.first():
                details = Status(code=status.value[0])
                details.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=1)))
                context.set_trailing_metadata(
                    (("grpc-status-details-bin", details.SerializeToString()),)
                )
                context.abort(status, "on purpose")
            taken.take(request.SerializeToString())
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Endpoint(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait(5)


@dataclasses.dataclass
class Delivered:
    """The final state of one exporter and its endpoint."""

    taken: Taken
    by_itself: bool
    """True if everything was delivered before the exporter was closed."""
    notes: list[str]


def _secured(folder: Path) -> Iterator[tuple[str, tuple[ssl.SSLContext, ...], dict[str, str]]]:
    """Yield each TLS fault, the contexts of its endpoint, and the user's variables."""
    folder.mkdir()
    good, expired = certificate(folder / "good"), certificate(folder / "expired", expired=True)
    own, another = (
        certificate(folder / "own", "DNS:client"),
        certificate(folder / "another", "DNS:client"),
    )
    trusted = folder / "trusted"
    trusted.write_bytes(good.path.read_bytes() + expired.path.read_bytes())
    told = {
        "OTEL_EXPORTER_OTLP_CERTIFICATE": str(trusted),
        "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": str(own.path), "OTEL_EXPORTER_OTLP_CLIENT_KEY": str(own.key),
    }  # fmt: skip

    def shows(pair: Any, clients: Any = None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # With TLS 1.3, a client learns only after sending its request that its certificate was
        # refused.
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(pair.path, pair.key)
        if clients is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(clients.path)
        return context

    yield TLS[0], (shows(expired), shows(good)), told
    yield TLS[1], (shows(good, another), shows(good, own)), told


@pytest.fixture(scope="module")
def delivered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Delivered]]:
    """Run all faults at the same time and return the results by fault."""
    folder = tmp_path_factory.mktemp("endpoints")
    taken = {fault: Taken() for fault in FAULTS}
    exporters: dict[str, Exporter] = {}
    with contextlib.ExitStack() as serving:

        def start(fault: str, endpoint: str, told: dict[str, str]) -> None:
            exporter = exporter_for(
                {
                    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_TIMEOUT": "10",
                    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": str(IN_A_REQUEST), "OTEL_BSP_SCHEDULE_DELAY": "10", **told,
                }
            )  # fmt: skip
            exporter.export(batch_of(identity(), range(STEPS)))
            exporters[fault] = exporter

        for fault, handler in HTTP.items():
            start(fault, serving.enter_context(over_http(handler, taken[fault])), {})
        for fault, contexts, told in _secured(folder / "tls"):
            start(fault, serving.enter_context(over_http(_Handler, taken[fault], contexts)), told)
        for fault, status in GRPC.items():
            address = serving.enter_context(over_grpc(status, taken[fault]))
            start(fault, address, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})

        def all_of(fault: str) -> Callable[[], bool]:
            return lambda: len(taken[fault].spans) == SPANS

        ended = {}
        for fault, exporter in exporters.items():
            by_itself = wait_for(all_of(fault), 30)
            notes = exporter.shutdown(10)
            ended[fault] = Delivered(taken[fault], by_itself, notes)
        yield ended


@pytest.mark.parametrize("fault", FAULTS)
def test_all_spans_arrive_after_the_endpoint_recovers(
    delivered: dict[str, Delivered], fault: str
) -> None:
    """The spans arrive while the exporter is open. Nothing is left in the notes."""
    ended = delivered[fault]
    assert ended.taken.asked > 1, "the fault did not occur"
    assert ended.by_itself
    assert len(ended.taken.spans) == SPANS
    rejected = f"OTLP: {REJECTED} of {SPANS} spans were not delivered"
    assert ended.notes[:1] == ([rejected] if fault == "partial success" else [])


@pytest.mark.parametrize("fault", FAULTS)
def test_only_a_request_with_a_lost_response_arrives_twice(
    delivered: dict[str, Delivered], fault: str
) -> None:
    """The spans of both deliveries have the same ids."""
    doubles = delivered[fault].taken.doubles()
    assert doubles == (IN_A_REQUEST if fault == "answer is lost" else 0)
