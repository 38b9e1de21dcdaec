"""Run the server until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator

import uvicorn

from torchlens_perf.errors import ConfigError
from torchlens_perf.serve.access import AccessGuard
from torchlens_perf.serve.app import Server
from torchlens_perf.serve.connections import LimitedConnection, ListeningSocket

# On a core that training occupies, the server gets at most a tenth: enough to answer, and to start
# readers, which have a lower priority. At nice 19 it would get one seventieth.
_NICE = 10
# Time for running responses to finish when the server ends.
_GRACEFUL_EXIT_S = 1
# After this time the process exits even if a reader cannot be killed.
_FORCED_EXIT_S = 2.0


def run_until_signal(server: Server, listening: socket.socket, host: str) -> None:
    """Print the address with the token, and serve until a signal ends the process.

    host: the value of --host.
    """
    port, token = listening.getsockname()[1], secrets.token_urlsafe(32)
    names = (
        {"localhost", host}
        if is_loopback(host)
        else {"localhost", host, socket.gethostname(), socket.getfqdn()}
    )
    guard = AccessGuard(server.create_app(), token, names)
    config = uvicorn.Config(
        guard, log_config=None, lifespan="off", access_log=False, proxy_headers=False, server_header=False,
        date_header=False, timeout_graceful_shutdown=_GRACEFUL_EXIT_S, http=LimitedConnection, ws="none",
        loop="asyncio",
    )  # fmt: skip
    # Other records are about clients that send invalid HTTP, or requests that are running when the
    # server ends.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: record.levelno >= logging.ERROR and record.exc_info is not None
    )
    shown = (
        socket.gethostname()
        if host in ("0.0.0.0", "::", "")
        else f"[{host}]"
        if ":" in host
        else host
    )
    # Readers are Python processes, which would import modules from the current folder. That folder
    # may belong to another user.
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    os.chdir("/")
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    with ListeningSocket(fileno=listening.detach()) as admitting:
        _StoppableServer(config, server, f"http://{shown}:{port}/#token={token}").run(
            sockets=[admitting]
        )


class _StoppableServer(uvicorn.Server):
    """A uvicorn server that exits with code 0 at the first SIGINT or SIGTERM."""

    def __init__(self, config: uvicorn.Config, server: Server, address: str) -> None:
        """address: the text to print as soon as the signal handlers are installed."""
        super().__init__(config)
        self._server, self._address = server, address

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._request_exit)
        print(self._address, flush=True)
        try:
            yield
        finally:
            self._server.close()
            # A reader blocked in the kernel survives a kill, and would keep this process alive.
            last = threading.Timer(_FORCED_EXIT_S, os._exit, (0,))
            last.daemon = True
            last.start()

    def _request_exit(self) -> None:
        self._server.close()
        self.should_exit = True


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the host address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. port: 0 selects a free port. Raise ConfigError on failure."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # A socket on :: should also accept connections to IPv4 addresses.
        both = family == socket.AF_INET6
        return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:
        reason = str(error).partition(" (while attempting")[0]
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {reason}. --port 0 selects a free port"
        ) from None
