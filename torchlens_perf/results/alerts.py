"""w.on_verdict(): the user's callbacks, called at steps' ends with what the sidecar has named.

The sidecar writes its newest alerts into a file beside the ring. Once in 50 ms at most, at a step's end, the training
thread asks for that file's size and time, which is one call to the system (docs/internals/performance.md).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchlens_perf.errors import users_code
from torchlens_perf.run.mailbox import ALERTS, Mailbox
from torchlens_perf.run.verdicts import Alert as Alert

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session


Callback = Callable[[Alert], object]


class Alerts:
    """The callbacks of one watch. Training thread."""

    def __init__(self) -> None:
        self.callbacks: list[Callback] = []
        self._session: Session | None = None
        self._mailbox: Mailbox | None = None
        self._known: set[str] = set()
        self._guards: dict[int, users_code] = {}  # by callback

    @contextmanager
    def listening(self, session: Session) -> Iterator[None]:
        """While this is entered, the callbacks are called at steps' ends. Raises OSError."""
        self._session, self._mailbox = session, Mailbox(session.ring_path, ALERTS)
        try:
            with session.throttled("calling on_verdict's callbacks", self.look):
                yield
        finally:
            self._mailbox.close()
            self._session = self._mailbox = None

    def look(self) -> None:
        """Calls them with what is new."""
        text = None if self._mailbox is None else self._mailbox.news()
        if text is None or self._session is None:
            return
        session = self._session
        for row in json.loads(text):
            if row["id"] not in self._known:
                self._known.add(row["id"])
                began_ns = time.monotonic_ns()
                try:
                    self._call(Alert(**{**row, "ranks": tuple(row["ranks"]), "because": tuple(row["because"])}))
                finally:
                    session.add_overhead(time.monotonic_ns() - began_ns, ours=False)

    def _call(self, alert: Alert) -> None:
        """An exception ends no job and is logged, once for each callback; it is called again all the same."""
        for callback in tuple(self.callbacks):
            name = getattr(callback, "__qualname__", type(callback).__name__)
            with self._guards.setdefault(id(callback), users_code(name, "a callback of on_verdict()")):
                callback(alert)
