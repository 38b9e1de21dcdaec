"""The server for /metrics: local only by default, bounded in size and time, and robust."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from tests.support.servers import wait_for
from torchlens_perf.exporters.prometheus.endpoint import (
    ListenAddress,
    MetricsResponse,
    MetricsServer,
)

BODY = b"x" * 1000


@pytest.fixture
def endpoint() -> Iterator[MetricsServer]:
    made = MetricsServer(
        ListenAddress.parse("0"), lambda accept: MetricsResponse("text/plain", BODY)
    )
    yield made
    made.close()


def ask(endpoint: MetricsServer, request: bytes, timeout_s: float = 20) -> bytes:
    """Send the given bytes and return the complete response."""
    found = b""
    with socket.create_connection(endpoint.address, timeout=timeout_s) as client:
        client.sendall(request)
        with contextlib.suppress(ConnectionResetError):
            while more := client.recv(65536):
                found += more
    return found


def get(path: str = "/metrics", host: str = "localhost:1", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_endpoint_listens_on_loopback_unless_an_address_is_set(endpoint: MetricsServer) -> None:
    """Other machines cannot connect."""
    assert endpoint.address.host == "127.0.0.1"
    assert endpoint._socket.getsockname()[0] == "127.0.0.1"
    assert ListenAddress.parse("localhost:9464") == ("127.0.0.1", 9464)
    assert ListenAddress.parse("0.0.0.0:9464") == ("0.0.0.0", 9464)
    assert not ListenAddress.parse("0.0.0.0:9464").is_loopback
    assert str(ListenAddress.parse("[::1]:9464")) == "[::1]:9464"


def test_get_returns_the_content_and_head_only_its_length(endpoint: MetricsServer) -> None:
    head, _, body = ask(endpoint, get()).partition(b"\r\n\r\n")
    assert (status(head), body) == (200, BODY)
    assert b"Content-Length: 1000" in head
    head, _, body = ask(endpoint, get(method="HEAD")).partition(b"\r\n\r\n")
    assert (status(head), body) == (200, b"")
    assert wait_for(lambda: len(endpoint.scrapes) == 2, 5)


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (get("/"), 404),
        (get("/metrics/../etc/passwd"), 404),
        (get(method="POST"), 405),
        (get(host="evil.example:9464"), 421),  # DNS rebinding: the name resolves to this address.
        (get(host="127.0.0.1.evil.example"), 421),
        (get(host="[::1]:9464"), 200),
        (get("/metrics?name[]=up"), 200),
        (b"\xff\xfe nonsense\r\n\r\n", 405),
    ],
)
def test_requests_other_than_get_metrics_are_rejected(
    endpoint: MetricsServer, request_: bytes, wanted: int
) -> None:
    """The host name in the request must be one of this machine."""
    answer = ask(endpoint, request_)
    assert status(answer) == wanted
    assert (BODY in answer) == (wanted == 200)


def test_malformed_request_is_dropped_and_the_next_one_served(endpoint: MetricsServer) -> None:
    assert ask(endpoint, b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 100_000) == b""
    with socket.create_connection(endpoint.address) as client:
        client.sendall(b"GET /met")
    assert status(ask(endpoint, get())) == 200


def test_client_that_sends_slowly_is_cut_off() -> None:
    """A client sends single bytes until the timeout. The next client is served."""
    endpoint = MetricsServer(
        ListenAddress.parse("0"),
        lambda accept: MetricsResponse("text/plain", BODY),
        request_timeout_s=0.5,
    )
    try:
        with socket.create_connection(endpoint.address) as slow:
            slow.sendall(b"G")
            began_s = time.monotonic()
            assert status(ask(endpoint, get())) == 200
            assert time.monotonic() - began_s > 0.3
            slow.settimeout(5)
            assert slow.recv(10) == b""
    finally:
        endpoint.close()


def test_client_that_does_not_read_is_cut_off() -> None:
    """The kernel's buffers limit the memory for its response."""
    large = MetricsServer(
        ListenAddress.parse("0"),
        lambda accept: MetricsResponse("text/plain", b"x" * (64 << 20)),
        answer_timeout_s=0.5,
    )
    try:
        with socket.create_connection(large.address) as deaf:
            deaf.sendall(get())
            assert status(ask(large, get("/other"))) == 404
    finally:
        large.close()


def test_second_server_on_a_port_gets_an_error(endpoint: MetricsServer) -> None:
    """The kernel must not divide the requests between two servers."""
    with pytest.raises(OSError, match="in use"):
        MetricsServer(endpoint.address, lambda accept: MetricsResponse("", b""))


def test_port_can_be_reused_at_once_after_close(endpoint: MetricsServer) -> None:
    """A client may still be connected."""
    ask(endpoint, get())
    with socket.create_connection(endpoint.address) as hanging:
        hanging.sendall(b"G")
        began_s = time.monotonic()
        endpoint.close()
        assert time.monotonic() - began_s < 2.5
    again = MetricsServer(endpoint.address, lambda accept: MetricsResponse("text/plain", BODY))
    assert status(ask(again, get())) == 200
    again.close()
