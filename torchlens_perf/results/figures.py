"""Write step times and verdicts to the user's loggers that were passed to w.log_to().

The sidecar writes sums over this rank's steps to a file next to the ring file. At the end of a
step, a few times a second, the training thread checks the size and time of this file, and reads it
if it has changed. This module uses no thread, socket or device, but the user's logger may use them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torchlens_perf.errors import ConfigError, guard_user_code
from torchlens_perf.results.loggers import Logger, adapt_logger
from torchlens_perf.run.mailbox import FIGURES, Mailbox

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session
    from torchlens_perf.results.alerts import Alert

PREFIX = "torchlens_perf/"
STEP, DATA, COMMUNICATION = (PREFIX + name for name in ("step_s", "data_wait_s", "communication_s"))
SLOW_RANK, SLOW_RANK_COST = PREFIX + "slow_rank", PREFIX + "slow_rank_cost_s"
VERDICT, REPORT = PREFIX + "verdict", PREFIX + "report"
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class LogRequest(NamedTuple):
    """Arguments of one call of log_to()."""

    logger: Logger
    every_s: float
    step: Callable[[], int] | None
    name: str


def check_log_arguments(
    value: object, every_s: float, step: Callable[[], int] | None
) -> LogRequest:
    """Check the arguments of log_to(). Raise ConfigError if one of them is invalid."""
    if (
        isinstance(every_s, bool)
        or not isinstance(every_s, (int, float))
        or not 0 <= every_s < float("inf")
    ):
        raise ConfigError(f"every_s={every_s!r}: must be a number of seconds")
    if step is not None and not callable(step):
        raise ConfigError(
            f"step={step!r}: must be a function without arguments, which returns the step's number"
        )
    return LogRequest(adapt_logger(value), every_s, step, type(value).__name__)


class _LoggerState:
    """One logger, when its next row is due, and the sums at its last row."""

    def __init__(self, asked: LogRequest) -> None:
        self.asked = asked
        self.due_s = float("-inf")
        self.sums: dict[str, int] = {}
        self.guard = guard_user_code(asked.name, "passed to log_to()")


class FigureLoggers:
    """Loggers of one watch. Used on the training thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: returns seconds."""
        self._clock = clock
        self._logs: list[_LoggerState] = []
        self._session: Session | None = None
        self._mailbox: Mailbox | None = None
        self._newest: dict[str, int] = {}
        self._slow: dict[str, Alert] = {}  # Open alerts on slow ranks, by subject.
        self._last_step = 0
        self._several = False

    @property
    def has_loggers(self) -> bool:
        return bool(self._logs)

    def add_logger(self, asked: LogRequest) -> None:
        self._logs.append(_LoggerState(asked))

    @contextmanager
    def attached_to(self, session: Session) -> Iterator[None]:
        """Write figures at the ends of steps while this context is active. Raise OSError."""
        self._session, self._mailbox = session, Mailbox(session.ring_path, FIGURES)
        self._several = session.identity.has_other_ranks
        try:
            with session.run_throttled(
                "writing figures into the user's logger", self.write_due_figures
            ):
                yield
                self.write_due_figures(last=True)
        finally:
            self._mailbox.close()
            self._session = self._mailbox = None

    def write_due_figures(self, *, last: bool = False) -> None:
        """Write new figures to all loggers whose next row is due. last: write to all loggers."""
        text = None if self._mailbox is None else self._mailbox.read_new_message()
        if text is not None:
            self._newest = json.loads(text)
        now_s = self._clock()
        due = [
            log for log in self._logs if log.sums != self._newest and (last or now_s >= log.due_s)
        ]
        for log in due:
            values, log.sums, log.due_s = (
                self._mean_values(log.sums),
                self._newest,
                now_s + log.asked.every_s,
            )
            self._call_logger(log, _create_figures_writer(values))

    def write_alert(self, alert: Alert) -> None:
        """Write a started, changed or ended alert to all loggers."""
        if alert.kind == "straggler":
            self._slow.pop(alert.about, None)
            if alert.change != "ended":
                self._slow[alert.about] = alert
        self._write_text(VERDICT, f"{alert.change}: {alert.sentence}")

    def write_report(self, report: str) -> None:
        self._write_text(REPORT, _COLORS.sub("", report).strip())

    def _mean_values(self, before: dict[str, int]) -> dict[str, float]:
        """Return mean times in seconds over the steps since `before`, and the slowest rank.

        before: sums at the previous row. Unknown values are left out.
        """
        sums = self._newest
        steps = sums["steps"] - before.get("steps", 0)
        names = {
            "step": STEP,
            "data": DATA,
            **({"communication": COMMUNICATION} if self._several else {}),
        }
        values = {
            name: (sums[key] - before.get(key, 0)) / steps / 1e9 for key, name in names.items()
        }
        slow = max(
            self._slow.values(), key=lambda alert: alert.cost_s_per_step or 0.0, default=None
        )
        if slow is not None and slow.rank is not None:
            values[SLOW_RANK] = float(slow.rank)
            if slow.cost_s_per_step is not None:
                values[SLOW_RANK_COST] = slow.cost_s_per_step
        return values

    def _write_text(self, name: str, text: str) -> None:
        for log in self._logs:
            self._call_logger(log, lambda to, step: to.write_text(name, text, step))

    def _call_logger(self, log: _LoggerState, write: Callable[[Logger, int], None]) -> None:
        """Call `write` with a logger and the step number. Exceptions of the logger are logged."""
        session, began_ns = self._session, time.monotonic_ns()
        try:
            if session is not None:
                self._last_step = session.step.training_steps
            with log.guard:
                write(
                    log.asked.logger,
                    self._last_step if log.asked.step is None else log.asked.step(),
                )
        finally:
            if session is not None and not session.recorder.closed:
                session.add_overhead(time.monotonic_ns() - began_ns, ours=False)


def _create_figures_writer(values: dict[str, float]) -> Callable[[Logger, int], None]:
    return lambda to, step: to.write_figures(values, step)
