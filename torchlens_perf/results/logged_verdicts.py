"""Write verdicts and the report to the user's loggers that were passed to w.log_to().

This module uses no thread, socket or device, but the user's logger may use them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torchlens_perf.errors import ConfigError, guard_user_code
from torchlens_perf.results.loggers import Logger, adapt_logger

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torchlens_perf.recorder.session import Session
    from torchlens_perf.results.alerts import Alert

VERDICT, REPORT = "torchlens_perf/verdict", "torchlens_perf/report"
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class LogRequest(NamedTuple):
    """Arguments of one call of log_to()."""

    write_text: Logger
    step: Callable[[], int] | None
    guard: AbstractContextManager[object]
    """Logs exceptions of the user's logger."""


def check_log_arguments(value: object, step: Callable[[], int] | None) -> LogRequest:
    """Check the arguments of log_to(). Raise ConfigError if one of them is invalid."""
    if step is not None and not callable(step):
        raise ConfigError(
            f"step={step!r}: must be a function without arguments, which returns the step's number"
        )
    guard = guard_user_code(type(value).__name__, "passed to log_to()")
    return LogRequest(adapt_logger(value), step, guard)


class VerdictLoggers:
    """Loggers of one watch. Used on the training thread only."""

    def __init__(self) -> None:
        self.requests: list[LogRequest] = []
        self._session: Session | None = None
        self._last_step = 0

    @contextmanager
    def attached_to(self, session: Session) -> Iterator[None]:
        """Take step numbers from the session, and count the loggers' time as its overhead."""
        self._session = session
        try:
            yield
        finally:
            self._last_step = session.recorder.training_steps
            self._session = None

    def write_alert(self, alert: Alert) -> None:
        """Write a started, changed or ended alert to all loggers."""
        self._write_text(VERDICT, f"{alert.change}: {alert.sentence}")

    def write_report(self, report: str) -> None:
        self._write_text(REPORT, _COLORS.sub("", report).strip())

    def _write_text(self, name: str, text: str) -> None:
        session = self._session
        if session is not None:
            self._last_step = session.recorder.training_steps
        for request in self.requests:
            began_ns = time.monotonic_ns()
            try:
                with request.guard:
                    step = self._last_step if request.step is None else request.step()
                    request.write_text(name, text, step)
            finally:
                if session is not None and not session.recorder.closed:
                    session.add_overhead(time.monotonic_ns() - began_ns, ours=False)
