"""Limit the connections of clients without the token in time and in number."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from torchlens_perf.serve.access import TOKEN_ACCEPTED

HEAD_S = 10.0
"""Time limit from the start of a connection, or of a request on it, to the end of the request's
head.
"""
MAX_STRANGERS = 128
"""Maximal number of connections that have sent no request with the token.

A new connection closes the oldest one.
"""


class LimitedConnection(H11Protocol):
    """An HTTP/1.1 connection. Used only on the event loop's thread."""

    _open: ClassVar[dict[LimitedConnection, None]] = {}
    """All open connections of this process, oldest first. The dict is used as an ordered set."""
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._open[self] = None
        strangers = [each for each in self._open if not each._has_token()]
        for each in strangers[: max(0, len(strangers) - MAX_STRANGERS)]:
            each.transport.abort()
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.pop(self, None)
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._start_head_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Until the next request begins, uvicorn's keep-alive limit applies.
        self._stop_head_timer()

    def _has_token(self) -> bool:
        return self.scope is not None and bool(self.scope.get("state", {}).get(TOKEN_ACCEPTED))

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close(self) -> None:
        self._head_timer = None
        self.transport.abort()
