"""Lines of the GPU check: a value, the required value, and the result. Imports nothing heavy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "not run"
COLUMNS = ("part", "what", "value", "bar", "result")


class Line(NamedTuple):
    """A row of the table."""

    part: str
    what: str
    value: str
    bar: str = ""
    result: str = ""
    """PASS, FAIL, NOT_RUN, or "" for a figure without a bar."""

    def markdown(self) -> str:
        """Return the row in Markdown. Values are escaped."""
        return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in self) + " |"


class Checks:
    """Collects the lines of one part and passes each line on at once."""

    def __init__(self, take: Callable[[Line], None], limit_s: float = 20.0) -> None:
        """limit_s: the time after which the part is ended, counted from the part's start."""
        self._take = take
        self._deadline_s = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the part is ended. Measurements in rounds make fewer rounds by it."""
        return self._deadline_s - time.monotonic()

    def value(self, part: str, what: str, value: str) -> None:
        """Add a figure without a bar."""
        self._take(Line(part, what, value))

    def bar(self, part: str, what: str, value: str, bar: str, met: bool) -> None:
        """Add a figure with a bar."""
        self._take(Line(part, what, value, bar, PASS if met else FAIL))

    def missing(self, part: str, what: str, reason: str) -> None:
        """Add a line for a check that could not run, which does not count as PASS."""
        self._take(Line(part, what, reason, "", NOT_RUN))
