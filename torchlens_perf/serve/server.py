"""Runs the server until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

import uvicorn

from torchlens_perf.errors import ConfigError
from torchlens_perf.serve.access import Guard, new_token
from torchlens_perf.serve.app import Server
from torchlens_perf.serve.connections import Connection

_EXIT_S = 1  # of answers that are under way when the server ends
_LAST_S = 2.0


def serve(server: Server, listening: socket.socket, host: str) -> None:
    """Prints the address with the token, and answers until it is ended. host: as it was asked for."""
    port, token = listening.getsockname()[1], new_token()
    names = {"localhost", host} if is_loopback(host) else {"localhost", host, socket.gethostname(), socket.getfqdn()}
    guard = Guard(server.app(), token, names)
    config = uvicorn.Config(
        guard, log_config=None, lifespan="off", access_log=False, proxy_headers=False, server_header=False,
        date_header=False, timeout_graceful_shutdown=_EXIT_S, http=Connection, ws="none",
    )  # fmt: skip
    logging.getLogger("uvicorn.error").addFilter(_said_by_us)
    shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    # Readers are Python processes that look for modules where they are started: not in whatever folder this is.
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    os.chdir("/")
    _Ended(config, server, f"http://{shown}:{port}/#token={token}").run(sockets=[listening])


class _Ended(uvicorn.Server):
    """Ends at the first SIGINT or SIGTERM, with exit code 0: that is how it is meant to end."""

    def __init__(self, config: uvicorn.Config, server: Server, address: str) -> None:
        """address: printed as soon as it can be ended so."""
        super().__init__(config)
        self._server, self._address = server, address

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end)
        print(self._address, flush=True)
        try:
            yield
        finally:
            self._server.close()
            last = threading.Timer(_LAST_S, os._exit, (0,))  # a reader that sleeps in the kernel outlives being killed
            last.daemon = True
            last.start()

    def _end(self) -> None:
        self._server.close()
        self.should_exit = True


def _said_by_us(record: logging.LogRecord) -> bool:
    """Of what uvicorn logs, errors of ours: not that a viewer has spoken no HTTP, or that we end while one loads."""
    return record.levelno >= logging.ERROR and record.exc_info is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """port: 0 for a free one. Raises ConfigError where that cannot be."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        both = family == socket.AF_INET6  # :: is all addresses, those of IPv4 too
        return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:
        reason = str(error).partition(" (while attempting")[0]
        raise ConfigError(f"cannot listen on {host}, port {port}: {reason}. --port 0 takes a free one") from None


def warn(host: str) -> None:
    """Of who can reach it."""
    print(
        f"torchlens-perf: {host} can be reached from other machines, and nothing is encrypted: whoever hears the "
        "address or a request on its way sees all runs here, and may ask for captures. An SSH tunnel needs no --host: "
        "ssh -L 8000:127.0.0.1:PORT",
        file=sys.stderr,
    )
