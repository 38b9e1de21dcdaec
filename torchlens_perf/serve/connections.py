"""Connections that a stranger cannot hold for long: limits for a request's head, and for those without a token."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from torchlens_perf.serve.access import LET_IN

HEAD_S = 10.0
"""Between the begin of a connection, or of a request on it, and the end of the request's head."""
MAX_STRANGERS = 128
"""Connections that have sent no request with the token. The oldest is closed for a new one."""


class Connection(H11Protocol):
    """One connection, on the event loop's thread."""

    _open: ClassVar[dict[Connection, None]] = {}
    """All of this process, the oldest first."""
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._open[self] = None
        strangers = [each for each in self._open if not each._is_let_in()]
        for each in strangers[: max(0, len(strangers) - MAX_STRANGERS)]:
            each.transport.abort()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.pop(self, None)
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_nothing()
        elif self._head_timer is None:
            self._expect_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_nothing()  # uvicorn's own limit holds until the next request begins

    def _is_let_in(self) -> bool:
        return self.scope is not None and bool(self.scope.get("state", {}).get(LET_IN))

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._close)

    def _expect_nothing(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close(self) -> None:
        self._head_timer = None
        self.transport.abort()
