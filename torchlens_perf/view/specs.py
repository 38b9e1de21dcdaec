"""Tables, stacked bars and texts as values that every renderer draws. Pure."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from torchlens_perf.analysis.statistics.quantities import amount, percent, printable, rounded

NOT_MEASURED = "not measured"
"""A cell whose value is missing. A cell that does not apply is None."""
EMPTY = "-"

_LONGEST_TEXT = 2000
"""Characters of one text: a name may have millions."""


def inert(text: str, longest: int = _LONGEST_TEXT) -> str:
    """Return one line of bounded length, without characters that reverse text or control a terminal."""
    text = printable(text)
    return text if len(text) <= longest else f"{text[:longest]}…"


class Quantity(enum.Enum):
    """What the values of a column are. Durations are seconds, shares between 0 and 1, rates bytes per second."""

    TEXT = "text"
    NUMBER = "number"
    DURATION = "duration"
    SHARE = "share"
    CHANGE = "change"
    """A signed share."""
    BYTES = "bytes"
    RATE = "rate"


Value = float | int | str | None


@dataclasses.dataclass(frozen=True)
class Column:
    """A column with all its values. A text value stands for itself in a column of numbers."""

    title: str
    values: Sequence[Value]
    quantity: Quantity = Quantity.DURATION
    optional: float = 0.0
    """0 for a column that is always shown; of the others, the largest is left out first where there is no room."""
    help: str = ""
    """What the title means, in a sentence, for a reader who asks."""
    unit_of: float = 0.0
    """A duration whose unit the column takes, as the columns beside it do; 0: of its own largest value."""
    marks: Sequence[str] = ()
    """What is written before each value: ">= " for a lower bound, "~ " for an estimate."""

    @property
    def is_text(self) -> bool:
        """Whether the values are names, which are flush left."""
        return self.quantity is Quantity.TEXT and any(isinstance(value, str) for value in self.values)

    @property
    def unit(self) -> str:
        """The one unit of a column of durations; "" for other quantities, which carry theirs."""
        return self._scale()[1] if self.quantity is Quantity.DURATION else ""

    @property
    def heading(self) -> str:
        """The title with the unit: "forward ms"."""
        return f"{self.title} {self.unit}".strip()

    def texts(self) -> list[str]:
        """Return the cells as text, all in the column's one unit, with three digits of the largest value."""
        scale, _ = self._scale()
        largest = max((abs(value) for value in self.values if isinstance(value, (int, float))), default=0.0) / scale
        digits = 0 if largest >= 100 else 1 if largest >= 10 else 2
        texts = [self._text(value, scale, digits) for value in self.values]
        return [f"{mark}{text}" for mark, text in zip(self.marks, texts, strict=True)] if self.marks else texts

    def _scale(self) -> tuple[float, str]:
        if self.quantity is not Quantity.DURATION:
            return 1.0, ""
        largest = self.unit_of or max(
            (abs(value) for value in self.values if isinstance(value, (int, float))), default=0
        )
        for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
            if largest >= scale:
                return scale, unit
        return (1e-9, "ns") if largest else (1e-3, "ms")

    def _text(self, value: Value, scale: float, digits: int) -> str:
        if value is None:
            return EMPTY
        if isinstance(value, str) or self.quantity is Quantity.TEXT:
            return printable(str(value))
        if self.quantity is Quantity.SHARE:
            return percent(value)
        if self.quantity is Quantity.CHANGE:
            return f"{'+' if value >= 0 else '-'}{percent(abs(value))}"
        if self.quantity is Quantity.BYTES:
            return amount(value, "B")
        if self.quantity is Quantity.RATE:
            return amount(value, "B/s")
        if self.quantity is Quantity.NUMBER:
            return f"{value:,}" if isinstance(value, int) else rounded(value)
        smallest = 10.0**-digits
        if 0 < abs(value) / scale < smallest / 2:
            return f"<{smallest:.{digits}f}"  # a measured value is not shown as zero
        return f"{value / scale:.{digits}f}"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a report. All columns have one value for each row."""

    key: str
    """A short name, unique in a report: the anchor in the page, and the name of a CSV file."""
    title: str
    columns: Sequence[Column]
    slow: frozenset[int] = frozenset()
    """Rows, by index, that a verdict is about."""
    first: int | None = None
    """How many rows matter at most; the rest is behind "show all". None: all of them."""
    note: str = ""
    """Sentences below the table."""
    noun: str = "row"
    """What a row is, in the singular."""
    ranged: str = ""
    """The title of the column whose range describes rows that are not shown."""

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.columns[0].values) if self.columns else 0

    def head(self, rows: int) -> Table:
        """Return the table with its first rows only."""
        columns = [
            dataclasses.replace(column, values=column.values[:rows], marks=column.marks[:rows])
            for column in self.columns
        ]
        return dataclasses.replace(self, columns=columns, slow=frozenset(row for row in self.slow if row < rows))

    def rest(self, shown: int) -> str:
        """Return a line on the rows after the first ones, "56 more ranks, compute 245 to 251 ms"; "" for none."""
        left = self.rows - shown
        if left <= 0:
            return ""
        words = f"{left} more {self.noun}{'s' if left > 1 else ''}"
        for column in self.columns:
            values = [value for value in column.values[shown:] if isinstance(value, (int, float))]
            if column.title == self.ranged and values:
                hidden = dataclasses.replace(column, values=[min(values), max(values)], marks=())
                least, most = hidden.texts()
                span = least if least == most else f"{least} to {most}"
                return f"{words}, {column.title} {span} {hidden.unit}".rstrip()
        return words


@dataclasses.dataclass(frozen=True)
class Bar:
    """A stacked bar: seconds by part, in the order to draw."""

    label: str
    seconds: Mapping[str, float]
    rank: int | None = None
    """The rank that a click chooses."""
    slow: bool = False
    heading: str = ""
    """Text above this bar and those that follow."""

    @property
    def total(self) -> float:
        """The length of the bar in seconds."""
        return sum(self.seconds.values())

    def segments(self, longest: float) -> list[tuple[str, float, float]]:
        """Return each part that takes time, where it begins, and its length, as shares of the longest bar."""
        found, begin = [], 0.0
        for part, seconds in self.seconds.items():
            if seconds > 0:
                found.append((part, begin / longest, seconds / longest))
                begin += seconds
        return found
