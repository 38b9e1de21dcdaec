"""Limit the connections of clients without the token in time and in number.

A client is a stranger until it sends the token. While `MAX_STRANGERS` strangers are connected, only
processes of the server's own user can connect: no stranger replaces another connection. A stranger
gets one response per connection, and its place is free after _PLACE_S at the earliest. This limits
the CPU time that strangers can use.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import OrderedDict
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from torchlens_perf.serve.access import ON_TOKEN
from torchlens_perf.serve.peers import find_peer_uid

HEAD_S = 10.0
"""Time limit from the start of a connection, or of a request on it, to the end of the request's
head.
"""
MAX_STRANGERS = 128
"""Maximal number of connections that have sent no request with the token."""
MAX_OWN = 256
"""Maximal number of connections of the server's user beyond MAX_STRANGERS without the token.

A new connection of this user closes the oldest one.
"""
_PLACE_S = 1.0
# Accepting more connections at once would close the oldest ones before their requests are read.
_MAX_ACCEPTED_AT_ONCE = 16


class ListeningSocket(socket.socket):
    """A listening socket for asyncio that closes refused connections before asyncio sees them.

    An asyncio transport costs ten times the CPU time of a refusal.
    """

    _accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """Return an admitted connection.

        Raise BlockingIOError after some connections, so that the event loop handles other events
        before it continues.
        """
        while self._accepted < _MAX_ACCEPTED_AT_ONCE:
            self._accepted += 1
            accepted, address = super().accept()
            if LimitedConnection.may_open(accepted):
                return accepted, address
            accepted.close()
        self._accepted = 0
        raise BlockingIOError


class LimitedConnection(H11Protocol):
    """An HTTP/1.1 connection. Used only on the event loop's thread."""

    # Ordered dicts, because the oldest key of a dict is slow to find after many deletions.
    _strangers: ClassVar[OrderedDict[LimitedConnection, None]] = OrderedDict()
    _own: ClassVar[OrderedDict[LimitedConnection, None]] = OrderedDict()
    """Connections of the server's user that were opened while there were MAX_STRANGERS."""
    _group: OrderedDict[LimitedConnection, None] | None = None
    """The group of connections without the token to which this connection belongs."""
    _opened_s = 0.0
    _head_timer: asyncio.TimerHandle | None = None

    @classmethod
    def may_open(cls, connection: Any) -> bool:
        """Return True if a connection, a socket or its transport, is admitted at this time."""
        return len(cls._strangers) < MAX_STRANGERS or find_peer_uid(connection) == os.geteuid()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if not self.may_open(transport.get_extra_info("socket")):
            transport.abort()
            return
        self._group = self._strangers if len(self._strangers) < MAX_STRANGERS else self._own
        self._group[self], self._opened_s = None, self.loop.time()
        if len(self._own) > MAX_OWN:
            oldest, _ = self._own.popitem(last=False)
            oldest._group = None
            oldest.transport.abort()
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._group is not None:
            self.loop.call_at(self._opened_s + _PLACE_S, self._leave_group)
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._start_head_timer()

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            # The request's task has not started yet, so AccessGuard finds the function.
            self.scope["state"][ON_TOKEN] = self._leave_group

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Until the next request begins, uvicorn's keep-alive limit applies.
        self._stop_head_timer()
        if self._group is not None:
            self.transport.close()

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.pop(self, None)
            self._group = None

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close(self) -> None:
        self._head_timer = None
        self.transport.abort()
