"""TCPStore connections of our own whose every operation ends within a timeout. Only sidecars use them.

torch's client bounds what `wait` and `connect` take, and nothing else: a `check`, or the greeting of a new connection,
waits for its answer without end when the other side is stopped or the link is cut (verified with torch 2.13). So each
connection here gets SO_RCVTIMEO and SO_SNDTIMEO on its socket, which torch reports as an error, and a greeting that
takes too long has its socket shut down.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

_T = TypeVar("_T")

_KEEPALIVE_S = 30
_one_at_a_time = threading.Lock()  # so that a socket that is new during a connect is that connect's


class BoundedStore:
    """One connection to a TCPStore. One thread uses it; abort() may come from any. Failed once, it is of no more use.

    Every method raises ConnectionError when the store is gone, or has not answered in time.
    """

    def __init__(self, store: Any, own_socket: socket.socket) -> None:
        """own_socket: a duplicate of the descriptor of the store's connection."""
        self._store = store
        self._socket = own_socket

    @property
    def local_host(self) -> str:
        """This node's address, as the store sees it."""
        return _plain(self._socket.getsockname()[0])

    @property
    def remote_host(self) -> str:
        return _plain(self._socket.getpeername()[0])

    def has(self, *keys: str) -> bool:
        """Whether all of these keys are set. When it returns, what was set before has arrived."""
        return bool(_bounded(self._store.check, list(keys)))

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are all set; a missing one takes the whole timeout, and is an error."""
        return list(_bounded(self._store.multi_get, list(keys)))

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """Sends these values, in one message. Does not wait: see has()."""
        _bounded(self._store.multi_set, list(values), list(values.values()))

    def append(self, key: str, value: bytes) -> None:
        """Appends to the value of a key. Does not wait: see has()."""
        _bounded(self._store.append, key, value)

    def close(self, *, discard: bool = False) -> None:
        """Closes the connection. discard: drops what has not been sent, so that it cannot arrive after newer values."""
        if discard:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._store = None
        self._socket.close()

    def abort(self) -> None:
        """Ends an operation that another thread waits in."""
        _shut_down(self._socket)


class StoreServer:
    """A TCPStore that this process hosts. torch runs it on a thread of its own, without the interpreter's lock."""

    def __init__(self, host: str = "", port: int = 0, timeout_s: float = 2.0) -> None:
        """host: the address to listen on; all of the node's if empty. port: any free one if 0. Raises OSError."""
        _allow_many_connections()
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=4096)
        elif socket.has_dualstack_ipv6():
            listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
        else:
            listener = socket.create_server(("", port), backlog=4096)
        # Accepted sockets inherit these: connections of nodes that were cut off do not pile up.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S // 3)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self.port: int = listener.getsockname()[1]
        self.local_host = host or "127.0.0.1"
        arguments = (self.local_host, self.port, None, True, timedelta(seconds=timeout_s), False)
        self._store = _bounded(_tcp_store(), *arguments, master_listen_fd=listener.detach())

    def close(self) -> None:
        """Stops it. Its clients see their connections end."""
        self._store = None


def connect(host: str, port: int, operation_s: float, connect_s: float = 6.0, *, probe: bool = True) -> BoundedStore:
    """A connection to the store at `host`, which may take `connect_s`, and half as long again, for each address.

    operation_s: for each of its operations. probe: first see whether anybody listens there: then a refusal fails at
    once, where torch tries again until `connect_s` is over. The store's thread looks up the name of whom it accepts a
    connection from, and serves nobody meanwhile; so the job's store is not probed.

    It is no worker of the store's: it joins no count and no barrier. Raises OSError. Looking up a host's name, which
    torch does for numbers too, is the system's, and may take longer.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise ConnectionError(f"{host!r} is not a host name") from error
    failed: OSError = ConnectionError(f"{host} has no address")
    for *_, address in addresses:
        numeric = str(address[0])
        try:
            if probe:
                socket.create_connection((numeric, port), operation_s).close()
            return _connect(numeric, port, operation_s, connect_s)
        except OSError as error:
            failed = error
    raise failed


def _connect(host: str, port: int, operation_s: float, connect_s: float) -> BoundedStore:
    tcp_store = _tcp_store()
    with _one_at_a_time:
        others = _sockets_to(host, port)
        for each in others.values():
            each.close()

        def new() -> list[socket.socket]:
            after = _sockets_to(host, port)
            for inode in after.keys() & others.keys():
                after.pop(inode).close()
            return list(after.values())

        def give_up() -> None:
            for each in new():
                with each:
                    _shut_down(each)

        # Later than torch's own timeout: what it then finds is an error and no reason to try again.
        watchdog = threading.Timer(connect_s + 0.1, give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            store = _bounded(tcp_store, host, port, None, False, timedelta(seconds=connect_s), False)
        finally:
            watchdog.cancel()
        found = new()
    if len(found) != 1:
        for each in found:
            each.close()
        raise ConnectionError(f"{len(found)} sockets are connected to {host}:{port}, not one")
    (own,) = found
    store.set_timeout(timedelta(seconds=operation_s))
    limit = struct.pack("ll", int(operation_s), int(operation_s % 1 * 1e6))
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return BoundedStore(store, own)


def _tcp_store() -> Any:
    """torch's TCPStore: imported when a job of several nodes needs it, in a sidecar and nowhere else."""
    if "torch" not in sys.modules:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # neither ourselves nor a device's plugin
        # It would log a stack trace for every refused connection; what matters becomes a note.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from torch.distributed import TCPStore

    return TCPStore


def _bounded(operation: Callable[..., _T], *arguments: Any, **keywords: Any) -> _T:
    try:
        return operation(*arguments, **keywords)
    except RuntimeError as error:  # DistNetworkError and DistStoreError; lines after the first are C++ frames
        raise ConnectionError(str(error).partition("\n")[0]) from error


def _allow_many_connections() -> None:
    """Raises this process's limit of open files as far as it may: there is one connection per node."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _sockets_to(host: str, port: int) -> dict[int, socket.socket]:
    """Duplicates of this process's sockets that are connected to an address, by inode. The caller closes them."""
    found: dict[int, socket.socket] = {}
    for name in os.listdir("/proc/self/fd"):
        duplicate = -1
        try:
            duplicate = os.dup(int(name))
            each = socket.socket(fileno=duplicate)
        except OSError:  # closed in between, or no socket
            if duplicate >= 0:
                os.close(duplicate)
            continue
        inode = os.fstat(duplicate).st_ino
        try:
            peer = each.getpeername()
        except OSError:
            peer = None
        wanted = isinstance(peer, tuple) and (_plain(str(peer[0])), peer[1]) == (host, port)
        if wanted and inode not in found:
            found[inode] = each
        else:
            each.close()
    return found


def _plain(host: str) -> str:
    return host.removeprefix("::ffff:")  # an IPv4 address that was reached through an IPv6 socket


def _shut_down(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
