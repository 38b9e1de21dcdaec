"""Each attempt to send ends within its timeout, and a requested wait before a retry is limited."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from tests.exporters.test_delivery import spans_of
from tests.support.certificates import certificate
from tests.support.endpoints import answering, serving
from tests.support.leftovers import eventually
from tests.support.otlp_environment import transport_for
from torchlens_perf.exporters.delivery.answer import SendOutcome, SendResult, parse_retry_after

pytestmark = pytest.mark.distributed

TIMEOUT_S = 2.0
LATE_S = 20.0
"""Much longer than the timeout, also on a busy machine. The servers here never end."""
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\n"
_LARGE = 32 << 20


def drip(connection: socket.socket, data: Iterator[bytes]) -> None:
    for piece in data:
        connection.sendall(piece)
        time.sleep(0.05)


def for_ever(piece: bytes) -> Iterator[bytes]:
    while True:
        yield piece


def bytes_of(text: bytes) -> Iterator[bytes]:
    for byte in text:
        yield bytes([byte])
    yield from for_ever(b"X")


def head_byte_by_byte(connection: socket.socket) -> None:
    drip(connection, bytes_of(_HEAD + b"X-Long: "))


def continue_for_ever(connection: socket.socket) -> None:
    drip(connection, for_ever(b"HTTP/1.1 100 Continue\r\n\r\n"))


def headers_for_ever(connection: socket.socket) -> None:
    connection.sendall(_HEAD)
    drip(connection, for_ever(b"A: b\r\n"))


def body_byte_by_byte(connection: socket.socket) -> None:
    connection.sendall(_HEAD + b"Content-Length: 100000\r\n\r\n")
    drip(connection, for_ever(b"x"))


def chunks_byte_by_byte(connection: socket.socket) -> None:
    connection.sendall(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    drip(connection, for_ever(b"1\r\nx\r\n"))


def chunk_size_byte_by_byte(connection: socket.socket) -> None:
    connection.sendall(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    drip(connection, for_ever(b"0"))


def reads_slowly(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    while connection.recv(64):
        time.sleep(0.05)


def says_nothing(connection: socket.socket) -> None:
    time.sleep(10 * LATE_S)


@contextlib.contextmanager
def server(
    behaves: Callable[[socket.socket], None], context: ssl.SSLContext | None = None
) -> Iterator[int]:
    """Run a server and return its port.

    With a context, the server uses TLS.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if context is not None:
                connection.do_handshake()  # type: ignore[attr-defined]
            behaves(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                if context is not None:
                    connection = context.wrap_socket(
                        connection, server_side=True, do_handshake_on_connect=False
                    )
                # Keep the wrapped socket: an unclosed one warns later, in the middle of another
                # test.
                accepted.append(connection)
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.close()
        for connection in accepted:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def sent(address: str, size: int = 1, **told: str) -> tuple[SendResult, float]:
    """Send once, with a span name of the given size. Return the result and the duration.

    No thread may remain.
    """
    transport = transport_for("http/protobuf", ENDPOINT=address, TIMEOUT=str(TIMEOUT_S), **told)
    began_s = time.monotonic()
    try:
        answer = transport.send(spans_of("x" * size))
    finally:
        took_s = time.monotonic() - began_s
        transport.close()
    assert eventually(
        lambda: not [each for each in threading.enumerate() if each.name == "otlp-deadline"]
    )
    return answer, took_s


@pytest.mark.parametrize(
    "behaves",
    [head_byte_by_byte, continue_for_ever, headers_for_ever, body_byte_by_byte, chunks_byte_by_byte,
     chunk_size_byte_by_byte, reads_slowly, says_nothing],
)  # fmt: skip
def test_send_to_a_slow_server_ends_within_its_timeout(
    behaves: Callable[[socket.socket], None],
) -> None:
    size = _LARGE if behaves is reads_slowly else 1
    with server(behaves) as port:
        answer, took_s = sent(f"http://127.0.0.1:{port}", size)
    assert answer.outcome is SendOutcome.LATER
    assert took_s < LATE_S
    assert "within 2 s" in answer.reason or "timed out" in answer.reason.lower()


@pytest.mark.parametrize("behaves", [head_byte_by_byte, chunks_byte_by_byte, reads_slowly])
def test_send_over_tls_to_a_slow_server_ends_within_its_timeout(
    behaves: Callable[[socket.socket], None], tmp_path: Path
) -> None:
    shown = certificate(tmp_path / "ca")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown.path, shown.key)
    size = _LARGE if behaves is reads_slowly else 1
    with server(behaves, context) as port:
        answer, took_s = sent(f"https://localhost:{port}", size, CERTIFICATE=str(shown.path))
    assert answer.outcome is SendOutcome.LATER
    assert took_s < LATE_S


def test_endless_tls_handshake_ends_within_the_timeout() -> None:
    """The server sends the start of a TLS record one byte at a time."""
    with server(
        lambda connection: drip(connection, bytes_of(b"\x16\x03\x03\x3f\xff\x02\x00\x3f\xfb"))
    ) as port:
        answer, took_s = sent(f"https://127.0.0.1:{port}")
    assert answer.outcome is SendOutcome.LATER
    assert took_s < LATE_S


def test_next_send_works_after_an_attempt_that_was_cut_off() -> None:
    """The transport whose attempt was cut off delivers later requests and reuses connections."""
    slow = threading.Event()
    slow.set()

    def behaves(connection: socket.socket) -> None:
        while connection.recv(1 << 16):
            if slow.is_set():
                head_byte_by_byte(connection)
            connection.sendall(_HEAD + b"Content-Length: 0\r\n\r\n")

    with server(behaves) as port:
        transport = transport_for(
            "http/protobuf", ENDPOINT=f"http://127.0.0.1:{port}", TIMEOUT=str(TIMEOUT_S)
        )
        assert transport.send(spans_of("x")).outcome is SendOutcome.LATER
        slow.clear()
        assert [transport.send(spans_of("x")).outcome for _ in range(3)] == [
            SendOutcome.DELIVERED
        ] * 3
        transport.close()


# -- the wait that an endpoint asks for


@pytest.mark.parametrize(
    ("header", "expected"),
    [
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
        answer, _ = sent(address)
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
