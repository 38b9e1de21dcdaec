"""An HTTP server for GET /metrics with one thread and limits on time and size.

prometheus_client's own server starts a thread for each request, and waits for slow clients without
a limit.
"""

from __future__ import annotations

import contextlib
import email
import re
import socket
import threading
import time
from collections.abc import Callable
from email.message import Message
from http import HTTPStatus
from typing import NamedTuple

from torchlens_perf.errors import guard

PATH = "/metrics"
_MAX_HEAD_BYTES = 8192
_BACKLOG = 8
_LOOPBACK = "127.0.0.1"
_LOOPBACK_NAME = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])?(:[0-9]+)?")


class MetricsResponse(NamedTuple):
    """Body and content type of a response."""

    content_type: str
    body: bytes


class ListenAddress(NamedTuple):
    """A numeric IP address and a port. Port 0 selects a free port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> ListenAddress:
        """Parse "9464" (on loopback), "0.0.0.0:9464", "[::1]:9464" or "localhost:9464"."""
        host, _, port = text.strip().rpartition(":")
        host = host.strip("[]")
        return cls(_LOOPBACK if host in ("", "localhost") else host, int(port))

    @property
    def is_loopback(self) -> bool:
        return self.host == "::1" or self.host.startswith("127.")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class MetricsServer:
    """The HTTP server, which listens from its creation until close()."""

    def __init__(
        self,
        address: ListenAddress,
        answer: Callable[[str], MetricsResponse],
        request_timeout_s: float = 3.0,
        answer_timeout_s: float = 10.0,
    ) -> None:
        """Start to listen. Raises OSError if the port is in use or not permitted.

        - answer: callback on the server's thread that renders /metrics for an Accept header.
        - request_timeout_s: time limit for receiving all headers.
        - answer_timeout_s: time limit for sending the response. The default is Prometheus's.
        """
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._socket = socket.create_server(
            (address.host, address.port),
            family=family,
            backlog=_BACKLOG,
            dualstack_ipv6=family == socket.AF_INET6 and socket.has_dualstack_ipv6(),
        )
        self.address = ListenAddress(address.host, self._socket.getsockname()[1])
        self._answer = answer
        self._request_timeout_s, self._answer_timeout_s = request_timeout_s, answer_timeout_s
        self._closing = False
        self.scrapes: list[float] = []
        """Start times (time.monotonic()) of the last two complete responses with metrics."""
        self._thread = threading.Thread(
            target=self._serve, name="torchlens-perf-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Close the port. A request in progress may continue until its timeout."""
        self._closing = True
        with contextlib.suppress(OSError):
            # This wakes the thread.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(1)

    # -- on the server's thread

    def _serve(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if not self._closing:
                    # The process may be out of file descriptors for a while.
                    time.sleep(0.1)
                continue
            with connection, contextlib.suppress(OSError), guard("answering a scrape"):
                self._handle_connection(connection)

    def _handle_connection(self, connection: socket.socket) -> None:
        began_s = time.monotonic()
        head = _read_head(connection, began_s + self._request_timeout_s)
        if not head:
            return
        # The timeout limits the whole of sendall().
        connection.settimeout(self._answer_timeout_s)
        # The names of the headers are case-insensitive, and their lines may be malformed.
        first, _, lines = head.decode("latin-1").partition("\r\n")
        method, _, rest = first.partition(" ")
        path = rest.partition(" ")[0]
        status, answer = self._make_response(method, path, email.message_from_string(lines))
        found = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            "Connection: close",
            "X-Content-Type-Options: nosniff",
        ]
        connection.sendall(
            "\r\n".join([*found, "", ""]).encode() + (answer.body if method != "HEAD" else b"")
        )
        connection.shutdown(socket.SHUT_WR)
        if status is HTTPStatus.OK:
            self.scrapes = [*self.scrapes[-1:], began_s]

    def _make_response(
        self, method: str, path: str, headers: Message
    ) -> tuple[HTTPStatus, MetricsResponse]:
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, _text_response("GET /metrics\n")
        host = headers.get("host", "").lower()
        if self.address.is_loopback and not _LOOPBACK_NAME.fullmatch(host):
            # Prevent DNS rebinding: another website's host name may resolve to this address.
            return HTTPStatus.MISDIRECTED_REQUEST, _text_response(
                "The Host header is not a name of this machine's loopback.\n"
            )
        if path.partition("?")[0] != PATH:
            return HTTPStatus.NOT_FOUND, _text_response("GET /metrics\n")
        with guard("making /metrics"):
            return HTTPStatus.OK, self._answer(headers.get("accept", ""))
        return HTTPStatus.INTERNAL_SERVER_ERROR, _text_response(
            "The sidecar's log has the error.\n"
        )


def _read_head(connection: socket.socket, deadline_s: float) -> bytes:
    """Read the request line and headers. Return b"" if they are incomplete, late or too long."""
    found = b""
    while b"\r\n\r\n" not in found:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or len(found) > _MAX_HEAD_BYTES:
            return b""
        connection.settimeout(left_s)
        more = connection.recv(_MAX_HEAD_BYTES)
        if not more:
            return b""
        found += more
    return found.partition(b"\r\n\r\n")[0]


def _text_response(text: str) -> MetricsResponse:
    return MetricsResponse("text/plain; charset=utf-8", text.encode())
