"""Incomplete requests neither keep other clients out nor occupy connections forever."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.busy_machine import PROCESSORS, busy_machine
from tests.support.leftovers import eventually
from tests.support.page_server import PageServer, Viewer
from torchlens_perf.run.processes import process_cpu_time_s
from torchlens_perf.serve.connections import MAX_OWN, MAX_STRANGERS
from torchlens_perf.serve.peers import find_peer_uid, find_uid

pytestmark = pytest.mark.distributed
Connect = Callable[..., socket.socket]
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@contextmanager
def acting_as(user: int) -> Iterator[None]:
    """Act as another user. A socket belongs to the user who creates it."""
    before = os.geteuid()
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def connect(server: PageServer, viewer: Viewer) -> Iterator[Connect]:
    """Return a function that opens a connection, as a user, and sends the given bytes.

    At the end, wait until the server has closed all connections.
    """
    host, port = viewer.host.split(":")
    with ExitStack() as leaving:

        def make(text: str = "", user: int | None = None) -> socket.socket:
            with acting_as(os.geteuid() if user is None else user):
                made = socket.create_connection((host, int(port)), timeout=60)
            leaving.enter_context(made).sendall(text.encode())
            return made

        yield make
    assert eventually(lambda: count_descriptors(server) < MAX_STRANGERS)


def count_descriptors(server: PageServer) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


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
    """The number of requests is higher than the sum of the server's limits.

    An existing viewer and a new one are served.
    """
    held = [connect(begin) for _ in range(600)]
    for _ in range(3):
        assert viewer.ask("/").status == 200
        assert viewer.ask("/api/counts").status == 200
    assert sum(map(is_open, held)) <= MAX_STRANGERS + MAX_OWN
    assert eventually(lambda: not any(map(is_open, held)))


def test_connections_of_viewers_are_not_closed_for_unauthenticated_ones(
    connect: Connect, viewer: Viewer
) -> None:
    head = f"Host: {viewer.host}\r\nTorchlens-Perf-Token: {viewer.token}\r\n"
    connection = connect(f"GET /api/counts HTTP/1.1\r\n{head}\r\n")
    assert connection.recv(15) == b"HTTP/1.1 200 OK"
    strangers = [connect() for _ in range(2 * MAX_STRANGERS + MAX_OWN)]
    assert eventually(lambda: sum(map(is_open, strangers)) <= MAX_STRANGERS + MAX_OWN)
    connection.sendall(f"GET /api/counts HTTP/1.1\r\n{head}\r\n".encode())
    assert is_open(connection)


@as_root
def test_other_users_cannot_close_a_connection_whose_request_has_not_arrived(
    connect: Connect, viewer: Viewer
) -> None:
    """The connection is older than all connections of the other user."""
    early = connect()
    others = [connect(user=NOBODY) for _ in range(3 * MAX_STRANGERS)]
    assert eventually(lambda: sum(map(is_open, others)) <= MAX_STRANGERS)
    early.setblocking(True)
    head = f"Host: {viewer.host}\r\nTorchlens-Perf-Token: {viewer.token}\r\n"
    early.sendall(f"GET /api/counts HTTP/1.1\r\n{head}\r\n".encode())
    assert early.recv(15) == b"HTTP/1.1 200 OK"


@as_root
def test_only_the_servers_user_can_connect_while_strangers_fill_the_table(
    connect: Connect, viewer: Viewer
) -> None:
    """Existing strangers stay connected, and the newest stranger is refused."""
    admitted: list[socket.socket] = []

    def fill_table() -> bool:
        """Return False while clients of an earlier test have all places."""
        if not admitted:
            others = [connect(user=NOBODY) for _ in range(MAX_STRANGERS + 1)]
            assert viewer.ask("/api/counts").status == 200
            admitted.extend(filter(is_open, others))
        return bool(admitted)

    assert eventually(fill_table)
    own = [connect() for _ in range(MAX_OWN // 2)]
    assert viewer.ask("/api/counts").status == 200
    assert all(map(is_open, [*own, *admitted]))


@as_root
def test_viewer_whose_program_runs_as_another_user_gives_its_place_back(
    connect: Connect, viewer: Viewer
) -> None:
    """A proxy is such a program. Connections that sent the token do not count as strangers."""
    head = f"Host: {viewer.host}\r\nTorchlens-Perf-Token: {viewer.token}\r\n\r\n"

    def is_served() -> bool:
        try:
            shown = connect(f"GET /api/counts HTTP/1.1\r\n{head}", user=NOBODY)
            return shown.recv(15) == b"HTTP/1.1 200 OK"
        except OSError:
            return False

    # Places of clients of an earlier test may still be taken.
    assert eventually(is_served)
    assert all(is_served() for _ in range(MAX_STRANGERS + 1))


@as_root
def test_place_of_a_stranger_is_not_free_at_once(connect: Connect, viewer: Viewer) -> None:
    """Otherwise closed connections and quick requests could use all CPU time of the server."""
    text = f"GET / HTTP/1.1\r\nHost: {viewer.host}\r\n\r\n"
    began_s, served = time.monotonic(), 0
    for _ in range(4 * MAX_STRANGERS):
        with contextlib.suppress(OSError):
            asked = connect(text, user=NOBODY)
            served += asked.recv(12) == b"HTTP/1.1 200"
            asked.close()
    assert served <= MAX_STRANGERS * (1 + time.monotonic() - began_s)


@as_root
@pytest.mark.parametrize("listens_on", ["127.0.0.1", "::1", "::"])
@pytest.mark.parametrize("user", [0, NOBODY])
def test_user_of_a_connection_is_found(listens_on: str, user: int) -> None:
    """A socket on :: has IPv4 clients with IPv6 addresses. A closed client is unknown."""
    family = socket.AF_INET6 if ":" in listens_on else socket.AF_INET
    try:
        server = socket.create_server(
            (listens_on, 0), family=family, dualstack_ipv6=listens_on == "::"
        )
    except OSError:
        pytest.skip("this machine has no IPv6")
    address = "127.0.0.1" if listens_on == "::" else listens_on
    with server:
        with acting_as(user):
            client = socket.create_connection((address, server.getsockname()[1]))
        accepted, _ = server.accept()
        with accepted:
            assert find_peer_uid(accepted) == user
            client.close()
            assert eventually(lambda: find_peer_uid(accepted) is None)


def test_listening_socket_is_not_taken_for_a_client_on_another_machine() -> None:
    """The other machine's port can be the number of a port on which this user listens."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        assert find_uid(("127.0.0.1", port), ("127.0.0.1", port)) is None
        assert find_uid(("192.0.2.1", port), ("127.0.0.1", port)) is None


_CHURN = """
import encodings.idna, os, socket, stringprep, sys, threading
port, data, user, opened = int(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3]), []
os.seteuid(user)
parent = os.getppid()
def churn():
    while os.getppid() == parent:
        try:
            opened.append(socket.create_connection(("127.0.0.1", port), 5))
            opened[-1].sendall(data)
        except OSError:
            pass
        if len(opened) > 800:
            opened.pop(0).close()
for _ in range(4):
    threading.Thread(target=churn).start()
print(flush=True)
"""


@contextmanager
def churning_clients(port: int, data: bytes, user: int) -> Iterator[int]:
    """Run a program that opens connections as fast as it can and keeps the newest ones open.

    Yield its pid.
    """
    command = [sys.executable, "-c", _CHURN, str(port), data.hex(), str(user)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        try:
            yield running.pid
        finally:
            running.kill()


@as_root
@pytest.mark.long
@pytest.mark.parametrize("user", [0, NOBODY])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n",
        b"\x00\xff\r\n\r\n" * 9,
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nTorchlens-Perf-Token: x\r\n\r\n",
    ],
)
def test_viewer_is_served_while_clients_without_token_connect_all_the_time(
    server: PageServer, viewer: Viewer, data: bytes, user: int
) -> None:
    """All processors are busy too. Each of 50 pages arrives.

    The server needs less CPU time than a program of another user that connects.
    """
    port = server.client_without_token().address.port

    def load_pages() -> float:
        """Return the server's CPU time."""
        before_s = process_cpu_time_s(server.process.pid)
        assert [viewer.ask("/").status for _ in range(50)] == [200] * 50
        return process_cpu_time_s(server.process.pid) - before_s

    pages_s = load_pages()
    with busy_machine(PROCESSORS), churning_clients(port, data, user) as program:
        used_s = load_pages() - 2 * pages_s
        assert user != NOBODY or used_s < process_cpu_time_s(program)
    assert eventually(lambda: count_descriptors(server) < MAX_STRANGERS)


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
