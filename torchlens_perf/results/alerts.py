"""Call the callbacks of w.on_verdict() with the sidecar's alerts at the ends of steps.

The sidecar writes its newest alerts to a file next to the ring file. A few times a second, at the
end of a step, the training thread checks the size and time of this file with one system call
(docs/internals/performance.md).
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchlens_perf.errors import guard_user_code
from torchlens_perf.run.mailbox import ALERTS, Mailbox
from torchlens_perf.run.verdicts import Alert as Alert

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session


Callback = Callable[[Alert], object]


class AlertCallbacks:
    """Callbacks for the alerts of one watch. Used on the training thread only."""

    def __init__(self) -> None:
        self.callbacks: list[Callback] = []
        self._mailbox: Mailbox | None = None
        self._known: set[str] = set()
        self._guards: dict[int, guard_user_code] = {}  # by callback

    @contextmanager
    def attached_to(self, session: Session) -> Iterator[None]:
        """Call the callbacks at the ends of steps while this context is active. Raise OSError."""
        self._mailbox = Mailbox(session.ring_path, ALERTS)
        poll = functools.partial(self._poll_alerts, session)
        try:
            with session.run_throttled("calling on_verdict's callbacks", poll):
                yield
        finally:
            self._mailbox.close()
            self._mailbox = None

    def _poll_alerts(self, session: Session) -> None:
        """Read the alerts file and call the callbacks with each new alert."""
        text = None if self._mailbox is None else self._mailbox.read_new_message()
        for row in json.loads(text or "[]"):
            if row["id"] not in self._known:
                self._known.add(row["id"])
                began_ns = time.monotonic_ns()
                try:
                    self._call_callbacks(
                        Alert(
                            **{
                                **row,
                                "ranks": tuple(row["ranks"]),
                                "because": tuple(row["because"]),
                            }
                        )
                    )
                finally:
                    session.add_overhead(time.monotonic_ns() - began_ns, ours=False)

    def _call_callbacks(self, alert: Alert) -> None:
        """Call all callbacks with an alert. The first exception of each callback is logged."""
        for callback in tuple(self.callbacks):
            name = getattr(callback, "__qualname__", type(callback).__name__)
            with self._guards.setdefault(
                id(callback), guard_user_code(name, "a callback of on_verdict()")
            ):
                callback(alert)
