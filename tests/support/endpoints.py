"""Servers on loopback that misbehave on purpose."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run an HTTP server on a free port, and yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


class _Quiet(BaseHTTPRequestHandler):
    requests: int

    def log_message(self, format: str, *args: object) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


def answering(status: int, body: bytes = b"", after_s: float = 0.0, **headers: str) -> type[_Quiet]:
    """Return a handler that counts requests and sends the same answer to each after a delay."""

    class Endpoint(_Quiet):
        requests = 0

        def do_POST(self) -> None:
            Endpoint.requests += 1
            self.body()
            time.sleep(after_s)
            self.answer(status, body, **headers)

    return Endpoint


@contextmanager
def silent() -> Iterator[str]:
    """Yield a TCP port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def dropping() -> Iterator[str]:
    """Yield a TCP port whose full queue makes the kernel drop new connections."""
    with ExitStack() as held:
        server = held.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(8):
            knocking = held.enter_context(socket.socket())
            knocking.settimeout(0.1)
            try:
                knocking.connect(server.getsockname())
            except TimeoutError:
                break
        else:
            raise AssertionError("this kernel lets more connections wait than were asked for")
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def refusing() -> Iterator[str]:
    """Yield a port that refuses connections.

    The port stays bound, so no other program can use it.
    """
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


class Spans(TraceServiceServicer):
    """A gRPC service for spans that sends the same answer to every request after a delay."""

    def __init__(self, status: grpc.StatusCode, after_s: float = 0.0) -> None:
        self._status, self._after_s = status, after_s
        self.seen: list[str] = []
        """Metadata of each request."""

    def Export(
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self.seen.append(repr(context.invocation_metadata()))
        time.sleep(self._after_s)
        if self._status is not grpc.StatusCode.OK:
            context.abort(self._status, "on purpose")
        return ExportTraceServiceResponse()


def add_spans(spans: Spans, server: grpc.Server) -> None:
    """Register the span service with the server."""
    add_TraceServiceServicer_to_server(spans, server)


@contextmanager
def grpc_answering(status: grpc.StatusCode, after_s: float = 0.0) -> Iterator[str]:
    """Run a gRPC server for spans that sends the same answer to every request after a delay."""
    server = grpc.server(ThreadPoolExecutor(4))
    add_spans(Spans(status, after_s), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait(5)
