"""Tables, stacked bars and texts as values that every renderer draws. Pure."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Mapping, Sequence

from torchlens_perf.analysis.statistics.quantities import (
    format_bytes,
    format_change,
    format_percent,
    format_rounded,
    printable,
)

NOT_MEASURED = "not measured"
"""A cell whose value is missing. A cell that does not apply is None."""
EMPTY = "-"

_LONGEST_TEXT = 2000
"""Most characters of one text. A name from a run directory may have millions."""


def sanitize_line(text: str, longest: int = _LONGEST_TEXT) -> str:
    """Return text as one short line without characters that reverse text or control a terminal."""
    text = printable(text)
    return text if len(text) <= longest else f"{text[:longest]}…"


class Quantity(enum.Enum):
    """The quantity of a column. Durations are in seconds, shares from 0 to 1, rates in bytes/s."""

    TEXT = "text"
    NUMBER = "number"
    DURATION = "duration"
    SHARE = "share"
    CHANGE = "change"
    """A signed share."""
    BYTES = "bytes"
    RATE = "rate"


Value = float | int | str | None
_FORMATS: Mapping[Quantity, Callable[[float], str]] = {
    Quantity.NUMBER: lambda value: (
        f"{value:,}" if isinstance(value, int) else format_rounded(value)
    ),
    Quantity.SHARE: format_percent,
    Quantity.CHANGE: format_change,
    Quantity.BYTES: lambda value: format_bytes(value, "B"),
    Quantity.RATE: lambda value: format_bytes(value, "B/s"),
}
"""The text of a value by its quantity. Durations have the unit of their column."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column with all its values. A text value in a column of numbers is shown as it is."""

    title: str
    values: Sequence[Value]
    quantity: Quantity = Quantity.DURATION
    optional: float = 0.0
    """0 if the column is always shown.

    If there is no room, the column with the largest value is left out first.
    """
    help: str = ""
    """A sentence that explains the title, shown as a tooltip."""
    unit_of: float = 0.0
    """A duration that sets the unit of related columns; 0: the column's largest value sets it."""
    marks: Sequence[str] = ()
    """A prefix for each value: ">= " for a lower bound, "~ " for an estimate."""
    wraps: bool = False
    """True for sentences, which a page wraps. Other long texts are cut."""

    @property
    def is_text(self) -> bool:
        """True if the values are text, which is aligned left."""
        return self.quantity is Quantity.TEXT and any(
            isinstance(value, str) for value in self.values
        )

    @property
    def unit(self) -> str:
        """The common unit of durations; "" for other quantities, whose cells include the unit."""
        return self._scale()[1] if self.quantity is Quantity.DURATION else ""

    @property
    def heading(self) -> str:
        """The title with the unit: "forward ms"."""
        return f"{self.title} {self.unit}".strip()

    def texts(self) -> list[str]:
        """Return the cells as text in the column's unit, with three digits of the largest value."""
        scale, _ = self._scale()
        largest = (
            max(
                (abs(value) for value in self.values if isinstance(value, (int, float))),
                default=0.0,
            )
            / scale
        )
        digits = 0 if largest >= 100 else 1 if largest >= 10 else 2
        return [
            f"{mark}{self._text(value, scale, digits)}"
            for mark, value in zip(self.marks or [""] * len(self.values), self.values, strict=True)
        ]

    def _scale(self) -> tuple[float, str]:
        if self.quantity is not Quantity.DURATION:
            return 1.0, ""
        largest = self.unit_of or max(
            (abs(value) for value in self.values if isinstance(value, (int, float))), default=0
        )
        for scale, unit in ((3600.0, "h"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
            if largest >= scale:
                return scale, unit
        return (1e-9, "ns") if largest else (1e-3, "ms")

    def _text(self, value: Value, scale: float, digits: int) -> str:
        if value is None:
            return EMPTY
        if isinstance(value, str) or self.quantity is Quantity.TEXT:
            return printable(str(value))
        if self.quantity is not Quantity.DURATION:
            return _FORMATS[self.quantity](value)
        smallest = 10.0**-digits
        if 0 < abs(value) / scale < smallest / 2:
            # A measured value must not look like zero.
            return f"<{smallest:.{digits}f}"
        return f"{value / scale:.{digits}f}"


def columns_if(is_shown: object, *columns: Column) -> Sequence[Column]:
    """Return the columns, or no column if the condition is false. Builds tables as one list."""
    return columns if is_shown else ()


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a report. All columns have one value for each row."""

    key: str
    """A short name, unique in a report.

    It is the anchor in the page and the name of the CSV file.
    """
    title: str
    columns: Sequence[Column]
    slow: frozenset[int] = frozenset()
    """Indexes of the rows that a verdict is about."""
    first: int | None = None
    """Number of rows to show at first; the others are behind "show all". None: show all rows."""
    note: str = ""
    """Sentences below the table."""
    noun: str = "row"
    """Noun for a row, in the singular."""
    ranged: str = ""
    """Title of the column whose range describes the hidden rows."""
    hint: str = ""
    """Text behind the numbers of hidden rows and columns. Without it, only rows are counted."""

    @property
    def rows(self) -> int:
        return len(self.columns[0].values) if self.columns else 0

    def first_rows(self, rows: int) -> Table:
        """Return a table with only the first rows."""
        columns = [
            dataclasses.replace(column, values=column.values[:rows], marks=column.marks[:rows])
            for column in self.columns
        ]
        return dataclasses.replace(
            self, columns=columns, slow=frozenset(row for row in self.slow if row < rows)
        )

    def describe_hidden_rows(self, shown: int) -> str:
        """Return text on the hidden rows, such as "56 ranks not shown: compute 245 to 251 ms"."""
        left = self.rows - shown
        if left <= 0:
            return ""
        words = f"{left} {self.noun}{'s' if left > 1 else ''} not shown"
        for column in self.columns:
            values = [value for value in column.values[shown:] if isinstance(value, (int, float))]
            if column.title == self.ranged and values:
                hidden = dataclasses.replace(column, values=[min(values), max(values)], marks=())
                least, most = hidden.texts()
                span = least if least == most else f"{least} to {most}"
                return f"{words}: {column.title} {span} {hidden.unit}".rstrip()
        return words


@dataclasses.dataclass(frozen=True)
class Bar:
    """A stacked bar: seconds by part, in drawing order."""

    label: str
    seconds: Mapping[str, float]
    rank: int | None = None
    """The rank that a click on the bar selects."""
    slow: bool = False

    @property
    def total(self) -> float:
        """The length of the bar in seconds."""
        return sum(self.seconds.values())

    def segments(self, longest: float) -> list[tuple[str, float, float]]:
        """Return name, start and length of each part that takes time.

        Start and length are shares of `longest`.
        """
        shown = {part: seconds for part, seconds in self.seconds.items() if seconds > 0}
        begins = itertools.accumulate(shown.values(), initial=0.0)
        return [
            (part, begin / longest, seconds / longest)
            for (part, seconds), begin in zip(shown.items(), begins, strict=False)
        ]
