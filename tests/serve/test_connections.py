"""Incomplete requests neither keep other clients out nor occupy connections forever."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.leftovers import eventually
from tests.support.page_server import Viewer
from torchlens_perf.serve.connections import MAX_STRANGERS

pytestmark = pytest.mark.distributed
Connect = Callable[..., socket.socket]


@pytest.fixture
def connect(viewer: Viewer) -> Iterator[Connect]:
    """Return a function that opens a connection and sends the given bytes."""
    host, port = viewer.host.split(":")
    with ExitStack() as leaving:

        def make(text: str = "") -> socket.socket:
            made = leaving.enter_context(socket.create_connection((host, int(port)), timeout=60))
            made.sendall(text.encode())
            return made

        yield make


def is_open(connection: socket.socket) -> bool:
    """Return True if the server has not closed the connection."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    return False


@pytest.mark.parametrize(
    "begin",
    ["", "GET / HTTP/1.1\r\nHost: x\r\nX: ", "POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n"],
)
def test_hundreds_of_unfinished_requests_do_not_block_viewers(
    connect: Connect, viewer: Viewer, begin: str
) -> None:
    """The number of requests is higher than each limit of the server.

    An existing viewer and a new one are served.
    """
    held = [connect(begin) for _ in range(600)]
    for _ in range(3):
        assert viewer.ask("/").status == 200
        assert viewer.ask("/api/counts").status == 200
    assert sum(map(is_open, held)) <= MAX_STRANGERS
    assert eventually(lambda: not any(map(is_open, held)))


def test_connections_of_viewers_are_not_closed_for_unauthenticated_ones(
    connect: Connect, viewer: Viewer
) -> None:
    head = f"Host: {viewer.host}\r\nTorchlens-Perf-Token: {viewer.token}\r\n"
    connection = connect(f"GET /api/counts HTTP/1.1\r\n{head}\r\n")
    assert connection.recv(15) == b"HTTP/1.1 200 OK"
    strangers = [connect() for _ in range(2 * MAX_STRANGERS)]
    assert eventually(lambda: sum(map(is_open, strangers)) <= MAX_STRANGERS)
    connection.sendall(f"GET /api/counts HTTP/1.1\r\n{head}\r\n".encode())
    assert is_open(connection)


@pytest.mark.parametrize(
    "second",
    [
        "",
        "G",
        "GET / HTTP/1.1\r\nHost: {host}\r\n",
        "POST /runs/done/api/captures HTTP/1.1\r\nHost: {host}\r\n",
    ],
)
def test_unfinished_second_request_of_a_viewer_is_closed(
    connect: Connect, viewer: Viewer, second: str
) -> None:
    """The first request on the connection had the token and was answered."""
    head = f"Host: {viewer.host}\r\nTorchlens-Perf-Token: {viewer.token}\r\n"
    connection = connect(f"GET /api/counts HTTP/1.1\r\n{head}\r\n")
    assert connection.recv(15) == b"HTTP/1.1 200 OK"
    connection.sendall(second.format(host=viewer.host).encode())
    assert eventually(lambda: not is_open(connection))


def test_response_does_not_wait_for_the_request_body(connect: Connect, viewer: Viewer) -> None:
    """No valid request has a body.

    The server responds without reading the body and closes the connection.
    """
    head = (
        f"Host: {viewer.host}\r\nTorchlens-Perf-Token: {viewer.token}\r\nOrigin:"
        f" http://{viewer.host}\r\n"
    )
    connection = connect(
        f"POST /runs/done/api/captures HTTP/1.1\r\n{head}Content-Length: 100\r\n\r\nranks=0"
    )
    assert connection.recv(12) == b"HTTP/1.1 400"
    assert eventually(lambda: not is_open(connection))


def test_single_bytes_do_not_extend_the_time_limit_of_request_headers(
    connect: Connect, viewer: Viewer
) -> None:
    connection = connect("GET / HTTP/1.1\r\n")

    def goes_on() -> bool:
        try:
            connection.sendall(b"X")
        except OSError:
            return False
        return is_open(connection)

    assert eventually(lambda: not goes_on())
