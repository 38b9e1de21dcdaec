"""One deadline for a whole request of requests' sessions: name lookup, connecting, TLS, sending, head and body.

The timeouts of requests start again with each byte that arrives, so a server that sends one at a time holds a request
for ever. Here the request runs on a thread of its own, whose socket is shut down at the deadline.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import requests
from requests.adapters import HTTPAdapter

_T = TypeVar("_T")
_running = threading.local()


class DeadlineError(requests.RequestException):
    """There was no whole answer in time."""


class _Attempt(Generic[_T]):
    """One request. `connection` and `is_over` are shared by two threads, under the lock."""

    def __init__(self, send: Callable[[], _T]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._connection: Any = None
        self._is_over = False
        self.result: _T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        _running.attempt = self
        try:
            self.result = self._send()
        except BaseException as error:
            self.error = error

    def uses(self, connection: Any) -> None:
        """Called before each step with a connection. Raises DeadlineError where it would come too late."""
        with self._lock:
            self._connection = connection
            if self._is_over:
                raise DeadlineError("the deadline has passed")

    def end(self) -> None:
        """Wakes the thread, whatever it reads or writes."""
        with self._lock:
            self._is_over = True
            found = getattr(self._connection, "sock", None)
        if isinstance(found, socket.socket):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(found, socket.SHUT_RDWR)


def within(timeout_s: float, send: Callable[[], _T]) -> _T:
    """Return or raise what send() does, with a session of bounded(). Raises DeadlineError after this time."""
    attempt = _Attempt(send)
    thread = threading.Thread(target=attempt.run, name="otlp-request", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        attempt.end()
        raise DeadlineError(f"no whole answer within {timeout_s:g} s")
    if attempt.error is not None:
        raise attempt.error
    return attempt.result  # type: ignore[return-value]


def bounded(session: requests.Session) -> requests.Session:
    """Prepare a session for within(). Adapters of the user's own stay as they are."""
    for prefix, adapter in list(session.adapters.items()):
        if type(adapter) is HTTPAdapter:
            session.mount(prefix, _Adapter())
    return session


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *arguments: Any, **named: Any) -> None:
        super().init_poolmanager(*arguments, **named)
        _track(self.poolmanager)

    def proxy_manager_for(self, *arguments: Any, **named: Any) -> Any:
        manager = super().proxy_manager_for(*arguments, **named)
        _track(manager)
        return manager


def _track(manager: Any) -> None:
    """Connections that the manager's pools make tell the attempt that they are used for."""
    pools = manager.pool_classes_by_scheme
    manager.pool_classes_by_scheme = {
        scheme: pool
        if issubclass(pool.ConnectionCls, _Tracked)
        else type(pool.__name__, (pool,), {"ConnectionCls": type("Connection", (_Tracked, pool.ConnectionCls), {})})
        for scheme, pool in pools.items()
    }


class _Tracked:
    """Mixed into urllib3's connections."""

    def connect(self) -> None:
        _use(self)
        super().connect()  # type: ignore[misc]
        _use(self)

    def putrequest(self, *arguments: Any, **named: Any) -> Any:
        _use(self)
        return super().putrequest(*arguments, **named)  # type: ignore[misc]


def _use(connection: Any) -> None:
    attempt: _Attempt[Any] | None = getattr(_running, "attempt", None)
    if attempt is not None:
        attempt.uses(connection)
