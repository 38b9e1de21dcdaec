"""Runs the server until Ctrl-C or SIGTERM: the address with the token is printed once it listens."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from torchlens_perf.errors import ConfigError
from torchlens_perf.serve.access import Guard, new_token
from torchlens_perf.serve.app import Server

_EXIT_S = 1


def serve(server: Server, host: str, port: int, *, quiet: bool = False) -> None:
    """Listens on the address and answers until it is ended. port: 0 for a free one. Raises ConfigError where it
    cannot."""
    listening = _listen(host, port)
    token, port = new_token(), listening.getsockname()[1]
    loopback = is_loopback(host)
    names = {f"{each}:{port}" for each in ("127.0.0.1", "localhost", "[::1]")} if loopback else set()
    guard = Guard(server.app(), token, names)
    config = uvicorn.Config(
        guard, log_config=None, lifespan="off", access_log=False, server_header=False, date_header=False,
        timeout_graceful_shutdown=_EXIT_S, ws="none",
    )  # fmt: skip
    running = _Uvicorn(config)
    server.ending = lambda: running.should_exit
    if not loopback and not quiet:
        print(
            f"torchlens-perf: {host} can be reached from other machines. The address is sent in the clear: whoever "
            "hears it, or sees it, sees all runs and may ask for captures. An SSH tunnel to 127.0.0.1 needs no --host.",
            file=sys.stderr,
        )
    shown = f"[{host}]" if ":" in host else host
    print(f"http://{shown}:{port}/?token={token}", flush=True)
    try:
        running.run(sockets=[listening])
    finally:
        server.close()
        listening.close()


class _Uvicorn(uvicorn.Server):
    """One that ends by itself: uvicorn's own sends the signal on when it has ended, before anything is cleaned up."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end)
        yield

    def _end(self) -> None:
        self.force_exit = bool(self.should_exit)  # a second one does not wait
        self.should_exit = True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"cannot listen on {host}, port {port}: {reason}. Choose another one by --port") from None
    return listening


def folder_of(path: Path | None) -> Path:
    """The folder of runs: what was asked for, else where runs are made. Raises ConfigError where there is none."""
    folder = Path("torchlens-perf") if path is None else path
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name one with runs: torchlens-perf serve DIR")
    return folder.absolute()
