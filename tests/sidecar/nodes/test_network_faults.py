"""Tests of the exchange with hostile or broken peers on loopback.

Each hostile or broken peer costs a bounded amount of memory and time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc import aio

from tests.sidecar.nodes.conftest import FAST, KEY, LONG_S, Nodes, wait_until
from torchlens_perf.sidecar.nodes import transport
from torchlens_perf.sidecar.nodes.endpoints import Endpoints
from torchlens_perf.sidecar.nodes.exchange import Exchange, _get_event_loop
from torchlens_perf.sidecar.nodes.messages import NodeReport, Post, encode
from torchlens_perf.sidecar.nodes.rendezvous import ExchangeAddress, Rendezvous


def publish(nodes: Nodes, port: int) -> None:
    """Publish an address of node 0 in the run directory."""
    Rendezvous(dataclasses.replace(nodes.places, job_store=None), KEY).publish_address(
        ExchangeAddress(port, "ab" * 16, ("127.0.0.1",))
    )


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class RawClient:
    """A client that sends arbitrary calls to node 0."""

    def __init__(self, address: ExchangeAddress) -> None:
        self._address = address
        self.calls = 0

    def send(self, data: bytes, **metadata: Any) -> grpc.StatusCode:
        """Send one message, and return the status with which node 0 ended the call.

        In rare cases grpc reports INTERNAL, because the write follows the call's end by node 0.

        Such a call is repeated.
        """
        for _ in range(20):
            code = self._send(data, metadata)
            if code is not grpc.StatusCode.INTERNAL:
                break
        return code

    def _send(self, data: bytes, metadata: dict[str, Any]) -> grpc.StatusCode:
        self.calls += 1

        async def call() -> grpc.StatusCode:
            options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
            async with aio.insecure_channel(
                f"127.0.0.1:{self._address.port}", options=options
            ) as channel:
                nonce = metadata.get(transport.NONCE, b"n" * transport.NONCE_BYTES)
                proof = transport.make_proof(self._address.token, transport.SENDER, nonce)
                about = {
                    transport.NONCE: nonce, transport.PROOF: proof, transport.SENDER: "feedbeef",
                    transport.NODE: b"n9", **metadata,
                }  # fmt: skip
                stream = channel.stream_stream(transport.REPORT)(
                    metadata=tuple(about.items()), timeout=10
                )
                with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                    await stream.write(data)
                    await stream.read()
                    await stream.done_writing()
                    await stream.read()
                return await stream.code()

        return _in_the_loop(call)


def _in_the_loop(call: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run_coroutine_threadsafe(call(), _get_event_loop()).result(LONG_S)


@pytest.fixture
def pair(nodes: Nodes) -> tuple[Exchange, Exchange]:
    """Return a node and node 0 that have exchanged posts."""
    other, merger = nodes.start("n1"), nodes.start("n0", merges=True)
    other.post({1: b"ours"})
    nodes.wait(merger, lambda: 1 in nodes.seen)
    return other, merger


def still_works(nodes: Nodes, pair: tuple[Exchange, Exchange]) -> None:
    before = len(nodes.seen[1])
    pair[0].post({1: b"ours again"})
    nodes.wait(pair[1], lambda: len(nodes.seen[1]) > before)
    assert set(nodes.seen) == {1}


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame of HTTP/2 (RFC 9113)."""
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


def call_headers(method: str, stream: int = 1, **more: str) -> bytes:
    """Return a frame that begins a call, with literal fields (RFC 7541)."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "x",
        "te": "trailers",
    }
    fields |= {"content-type": "application/grpc"} | {
        name.replace("_", "-"): value for name, value in more.items()
    }
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    return frame(1, 4, stream, block)


def connected(port: int, data: bytes) -> socket.socket:
    """Return a connection that has sent the preface of HTTP/2 and these bytes."""
    made = socket.create_connection(("127.0.0.1", port))
    made.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + data)
    return made


def is_open(connection: socket.socket) -> bool:
    """Return True if the peer has not closed the connection."""
    connection.setblocking(False)
    with contextlib.suppress(ConnectionError):
        try:
            while connection.recv(1 << 16):
                pass
        except BlockingIOError:
            return True
    return False


class TestNode0:
    def test_payload_of_a_caller_without_the_token_is_dropped(
        self, nodes: Nodes, pair: tuple[Exchange, Exchange], open_at_end: ExitStack
    ) -> None:
        """Two hundred calls with a wrong proof send a megabyte each and stay open."""
        port, before_mb = nodes.address().port, resident_mb()
        about = {"nonce_bin": "bm5ubm5ubm5ubm5ubm5ubg", "proof_bin": "bm5ubm5ubm5ubm5ubm5ubg"}
        message = b"\0" + struct.pack(">I", 1 << 20) + b"x" * ((1 << 20) - 100)
        pieces = [message[at : at + 16_000] for at in range(0, len(message), 16_000)]
        connections = [
            open_at_end.enter_context(
                connected(
                    port,
                    b"".join(
                        call_headers(transport.REPORT, stream, **about) for stream in (1, 3, 5, 7)
                    ),
                )
            )
            for _ in range(50)
        ]
        for piece in pieces:
            for connection in connections:
                connection.settimeout(0.01)
                with contextlib.suppress(OSError):  # Node 0 has ended the call.
                    for stream in (1, 3, 5, 7):
                        connection.sendall(frame(0, 0, stream, piece))
        assert resident_mb() - before_mb < 60
        still_works(nodes, pair)

    @pytest.mark.slow
    def test_open_calls_without_the_token_are_ended_soon(
        self, nodes: Nodes, pair: tuple[Exchange, Exchange], open_at_end: ExitStack
    ) -> None:
        """Calls of every kind are started without a token and left open. The node's own connection
        stays open.
        """
        port = nodes.address().port
        headers = call_headers(transport.REPORT, nonce_bin="bm5ubm5ubm5ubm5ubm5ubg")
        calls = {
            "no call": b"",
            "report without a nonce": call_headers(transport.REPORT),
            "report without a proof": headers,
            "report with a wrong proof": call_headers(
                transport.REPORT, proof_bin="bm5ubm5ubm5ubm5ubm5ubg"
            ),
            "unknown method": call_headers("/nonsense"),
            "unfinished headers": frame(1, 0, 1, headers[9:40]),
            "half a frame": headers[:30],
        }
        connections = {
            name: open_at_end.enter_context(connected(port, data)) for name, data in calls.items()
        }
        connections["no preface"] = open_at_end.enter_context(
            socket.create_connection(("127.0.0.1", port))
        )
        wait_until(lambda: [name for name, each in connections.items() if is_open(each)] == [])
        still_works(nodes, pair)

    def test_call_with_a_wrong_token_is_refused_and_counted(
        self, nodes: Nodes, pair: tuple[Exchange, Exchange]
    ) -> None:
        """Node 0 does not read the payload of such a call and adds no node."""
        data = encode(NodeReport(1.0, 0, False, [Post(0.0, {9: b"theirs"})]))
        address = nodes.address()
        strangers = [
            RawClient(dataclasses.replace(address, token=token))
            for token in ("0" * 32, address.token[:-1], "")
        ]
        for stranger in strangers:
            assert stranger.send(data) is grpc.StatusCode.UNAUTHENTICATED
        still_works(nodes, pair)

        assert set(nodes.contacts) == {"n1"}
        assert pair[1].notes() == [
            f"{sum(stranger.calls for stranger in strangers)} calls without this job's token were"
            " refused"
        ]

    def test_call_without_a_name_or_full_nonce_is_refused(
        self, nodes: Nodes, pair: tuple[Exchange, Exchange]
    ) -> None:
        """Both calls have the right token."""
        stranger = RawClient(nodes.address())

        assert (
            stranger.send(b"", **{transport.SENDER: "not a sender"})
            is grpc.StatusCode.INVALID_ARGUMENT
        )
        assert stranger.send(b"", **{transport.NONCE: b"short"}) is grpc.StatusCode.UNAUTHENTICATED
        still_works(nodes, pair)
        assert set(nodes.contacts) == {"n1"}

    def test_unreadable_message_ends_only_its_own_call(
        self, nodes: Nodes, pair: tuple[Exchange, Exchange]
    ) -> None:
        """The message is counted for its node. Payloads of other nodes are not lost."""
        pair[0].post({1: b"meanwhile"})

        stranger = RawClient(nodes.address())
        assert stranger.send(b"\xff" * 100) is grpc.StatusCode.INVALID_ARGUMENT
        still_works(nodes, pair)
        assert nodes.contacts["n1"].missed == 0
        assert pair[1].notes() == [f"{stranger.calls} reports of node n9 could not be read"]

    def test_message_of_10_mb_is_refused_before_it_is_read(
        self, nodes: Nodes, pair: tuple[Exchange, Exchange]
    ) -> None:
        assert (
            RawClient(nodes.address()).send(b"x" * 10_000_000) is grpc.StatusCode.RESOURCE_EXHAUSTED
        )
        still_works(nodes, pair)

    def test_bytes_of_other_protocols_do_not_affect_node_0(
        self, nodes: Nodes, pair: tuple[Exchange, Exchange]
    ) -> None:
        port = nodes.address().port
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x02\x00",
            b"\xff" * 100_000,
            preface + b"\xff" * 99,
        ):
            with (
                socket.create_connection(("127.0.0.1", port)) as connection,
                contextlib.suppress(OSError),
            ):
                connection.sendall(garbage)
        still_works(nodes, pair)
        assert pair[1].notes() == []

    def test_memory_is_bounded_with_a_thousand_idle_connections(
        self, nodes: Nodes, pair: tuple[Exchange, Exchange], open_at_end: ExitStack
    ) -> None:
        """The connections are silent or have a wrong token. Posts of the nodes still arrive."""
        address = nodes.address()
        before_mb = resident_mb()
        for _ in range(1000):
            open_at_end.enter_context(socket.create_connection(("127.0.0.1", address.port)))
        wrong = RawClient(dataclasses.replace(address, token="0" * 32))
        for _ in range(100):
            wrong.send(b"x" * 100_000)
        still_works(nodes, pair)

        assert resident_mb() - before_mb < 100
        assert wrong.calls >= 100
        assert pair[1].notes() == [f"{wrong.calls} calls without this job's token were refused"]

    def test_call_of_a_silent_node_is_ended_by_node_0(self, nodes: Nodes) -> None:
        """The link may have been cut. When it works again, the node's posts arrive."""
        merger = nodes.start("n0", merges=True, timing=dataclasses.replace(FAST, silent_s=0.5))
        other = nodes.start("n1", timing=dataclasses.replace(FAST, beat_s=2.0))
        for number in range(3):
            other.post({1: b"%d" % number})
            nodes.wait(merger, lambda number=number: len(nodes.seen.get(1, ())) == number + 1)
            time.sleep(1.0)

        assert nodes.contacts["n1"].missed == 0
        wait_until(lambda: any("errors in the exchange" in note for note in other.notes()))


class TestOthers:
    @pytest.fixture
    def silent(self) -> Iterator[tuple[int, list[socket.socket]]]:
        """Return the port of a server that never sends data, and the list of its connections."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        accepted: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(listener.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1], accepted
        listener.shutdown(socket.SHUT_RDWR)
        for each in (listener, *accepted):
            each.close()

    def test_node_continues_if_node_0_never_answers(
        self, nodes: Nodes, silent: tuple[int, list[socket.socket]]
    ) -> None:
        """Each attempt ends without a leak, and close() returns soon."""
        port, accepted = silent
        publish(nodes, port)
        other = nodes.start("n1", timing=dataclasses.replace(FAST, connect_s=0.5, last_retry_s=0.1))
        wait_until(lambda: other._errors >= 2)
        files = len(os.listdir("/proc/self/fd")) - len(accepted)
        other.post({1: b"x"})
        wait_until(lambda: other._errors >= 6)
        began_s = time.monotonic()
        assert other.close(LONG_S)

        assert time.monotonic() - began_s < LONG_S / 4
        wait_until(lambda: len(os.listdir("/proc/self/fd")) - len(accepted) <= files)

    def test_closed_port_of_node_0_is_noted_with_its_address(self, nodes: Nodes) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        publish(nodes, port)
        other = nodes.start("n1")
        wait_until(lambda: any(f"127.0.0.1:{port}: UNAVAILABLE" in note for note in other.notes()))

    def test_other_grpc_server_at_node_0s_address_is_noted(self, nodes: Nodes) -> None:
        async def serve() -> tuple[aio.Server, int]:
            server = aio.server()
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            return server, port

        server, port = _in_the_loop(serve)
        publish(nodes, port)
        other = nodes.start("n1")
        wait_until(
            lambda: any("something else, or another version" in note for note in other.notes())
        )
        _in_the_loop(lambda: server.stop(None))

    @pytest.mark.parametrize("proof", [b"", b"x" * 32])
    def test_server_without_the_token_receives_neither_payload_nor_token(
        self, nodes: Nodes, proof: bytes
    ) -> None:
        received: list[Any] = []

        async def accept(requests: Any, context: Any) -> None:
            received.extend(context.invocation_metadata())
            shown = ((transport.INSTANCE, b"i" * 8), (transport.PROOF, proof)) if proof else ()
            await context.send_initial_metadata(shown)
            while (data := await context.read()) is not aio.EOF:
                received.append(data)

        class Impostor(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(self, call: grpc.HandlerCallDetails) -> Any:
                return grpc.stream_stream_rpc_method_handler(accept)

        async def serve() -> tuple[aio.Server, int]:
            server = aio.server(handlers=[Impostor()])
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            return server, port

        server, port = _in_the_loop(serve)
        publish(nodes, port)
        other = nodes.start("n1", timing=dataclasses.replace(FAST, operation_s=0.2))
        other.post({1: b"a payload"})
        note = "does not have this job's token" if proof else "does not answer"
        wait_until(lambda: any(note in each for each in other.notes()) and other._errors >= 3)
        assert other.close(LONG_S)
        _in_the_loop(lambda: server.stop(None))

        assert received
        assert all(isinstance(each, tuple) and "ab" * 16 not in map(str, each) for each in received)

    def test_last_posts_arrive_after_a_silently_cut_link(
        self, nodes: Nodes, open_at_end: ExitStack
    ) -> None:
        """Sent bytes are lost without an error.

        The node detects the loss and sends the posts again once the link works.
        """
        merger = nodes.start("n0", merges=True)
        address = nodes.address()
        link = Link(address.port)
        open_at_end.callback(link.close)
        file = next(iter(nodes.places.folder.iterdir()))  # type: ignore[union-attr]
        file.write_bytes(dataclasses.replace(address, port=link.port).encode())
        other = nodes.start("n1", places=Endpoints(None, nodes.places.folder))
        other.post({1: b"0"})
        nodes.wait(merger, lambda: 1 in nodes.seen)
        link.cut = True
        for number in range(1, 5):
            other.post({1: b"%d" % number})
        wait_until(lambda: any("does not answer" in note for note in other.notes()))
        link.cut = False
        nodes.wait(merger, lambda: len(nodes.seen[1]) == 5)

        assert nodes.seen[1] == [b"%d" % number for number in range(5)]
        assert nodes.contacts["n1"].missed == 0


class Link:
    """Forwards bytes to a port.

    While the link is cut, connections stay open and their bytes are dropped.
    """

    def __init__(self, to: int) -> None:
        self._to, self.cut = to, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._to))
                self._sockets += ends
                for pair in (ends, ends[::-1]):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, to: socket.socket) -> None:
        lost = False
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                lost |= self.cut  # A connection that has lost bytes is never used again.
                if not lost:
                    to.sendall(data)
            to.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for each in (self._listener, *self._sockets):
            each.close()
