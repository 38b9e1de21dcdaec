"""What an OTLP endpoint's answer, or a connection that it cuts, makes of an export: sent again or not, and counted."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import time
from http.server import BaseHTTPRequestHandler

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.exporters.test_otlp_environment import one_step
from tests.support.endpoints import answering, serving
from tests.support.long import long_but
from tests.support.processes import slowdown
from torchlens_perf.exporters.otlp_environment import exporter_from_environment

TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
WITHIN_S = 20.0
SPANS = 2  # of one step
UNDELIVERED = f"{SPANS} of {SPANS} spans were not delivered"


def exported(told: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, float]:
    """Sends a step's spans with these variables. The exporter's notes, and how long it took."""
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    exporter = exporter_from_environment(told)
    assert exporter is not None
    began_s = time.monotonic()
    exporter.export(one_step())
    exporter.force_flush(WITHIN_S)
    took_s = time.monotonic() - began_s
    return "; ".join(exporter.shutdown(WITHIN_S)), took_s


def recording(first: list[int], then: int = 200) -> tuple[type[BaseHTTPRequestHandler], list[bytes]]:
    """A handler that gives these answers, then that one, and the bodies that it gets; 0: it cuts the connection."""
    bodies: list[bytes] = []

    class Endpoint(answering(then)):  # type: ignore[misc]
        def do_POST(self) -> None:
            bodies.append(self.body())
            status = first[len(bodies) - 1] if len(bodies) <= len(first) else then
            if status:
                self.answer(status)
            else:
                cut(self.connection)

    return Endpoint, bodies


def cut(connection: socket.socket) -> None:
    """Resets it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def ids(body: bytes) -> list[tuple[bytes, bytes]]:
    request = ExportTraceServiceRequest.FromString(body)
    return sorted(
        (span.trace_id, span.span_id)
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    )


STATUSES = {500: False, 400: False, 401: False, 413: False, 501: False, 429: True, 502: True, 503: True, 504: True}


@pytest.mark.parametrize("status", long_but({"500", "413", "503"}, list(map(str, STATUSES))))
def test_sent_again_or_not(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What OTLP calls transient is sent again, with the same ids, and arrives; all else once, and it is counted."""
    handler, bodies = recording([int(status)])
    with serving(handler) as address:
        notes, _ = exported({TRACES: f"{address}/v1/traces", "OTEL_EXPORTER_OTLP_TIMEOUT": "5"}, monkeypatch)

    if STATUSES[int(status)]:
        assert len(bodies) == 2
        assert ids(bodies[0]) == ids(bodies[1])
        assert len(ids(bodies[0])) == SPANS
        assert notes == ""
    else:
        assert len(bodies) == 1
        assert UNDELIVERED in notes


@pytest.mark.parametrize("cuts", [1, 100])
def test_cut_before_the_answer(cuts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint has got the spans and the connection ends: they come again, with the same ids; cut for ever, they
    count as not delivered, though each has arrived."""
    handler, bodies = recording([0] * cuts)
    with serving(handler) as address:
        notes, _ = exported({TRACES: f"{address}/v1/traces", "OTEL_EXPORTER_OTLP_TIMEOUT": "2"}, monkeypatch)

    assert len(bodies) >= 2
    assert len({hashlib.sha256(repr(ids(body)).encode()).digest() for body in bodies}) == 1
    assert (UNDELIVERED in notes) == (cuts == 100)


def test_cut_in_the_middle_of_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each request the endpoint takes ten bytes: nothing is taken for delivered, and the export ends in its time."""
    taken, slow = [], slowdown()

    class Endpoint(answering(200)):  # type: ignore[misc]
        def do_POST(self) -> None:
            taken.append(self.rfile.read(10))
            cut(self.connection)

    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "filler=" + "x" * 4_000_000)  # more than sockets hold
    with serving(Endpoint) as address:
        notes, took_s = exported({TRACES: f"{address}/v1/traces", "OTEL_EXPORTER_OTLP_TIMEOUT": "2"}, monkeypatch)

    assert taken
    assert UNDELIVERED in notes
    assert took_s < 2 + 1 * slow


def test_cut_in_the_middle_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A success whose body does not come whole is taken for none."""
    bodies = []

    class Endpoint(answering(200)):  # type: ignore[misc]
        def do_POST(self) -> None:
            bodies.append(self.body())
            if len(bodies) > 1:
                self.answer(200)
                return
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(b"\n")
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    with serving(Endpoint) as address:
        notes, _ = exported({TRACES: f"{address}/v1/traces", "OTEL_EXPORTER_OTLP_TIMEOUT": "3"}, monkeypatch)

    assert len(bodies) > 1 or UNDELIVERED in notes


RETRY_AFTER = (
    "0", "1", "30", "1e9", "1000000000000000000000", "-5", "nan", "inf", "", "soon", "1, 2", "0x10", "1.5",
    "Wed, 21 Oct 2015 07:28:00 GMT", "Fri, 31 Dec 2100 23:59:59 GMT", "Wed, 99 Foo 9999", "\x01",
)  # fmt: skip


@pytest.mark.parametrize("value", long_but({"30", "-5", "nan", "Fri, 31 Dec 2100 23:59:59 GMT"}, RETRY_AFTER))
def test_any_retry_after(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long, and in whatever form: no wait beyond the export's own timeout, and it is counted."""
    with serving(answering(429, Retry_After=value)) as address:
        told = {TRACES: f"{address}/v1/traces", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
        notes, took_s = exported(told, monkeypatch)

    assert UNDELIVERED in notes
    assert took_s < 1 + 1 * slowdown()
