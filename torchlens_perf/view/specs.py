"""Tables as values that every renderer draws: columns with a quantity each, and the rows that matter. Pure."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from torchlens_perf.analysis.statistics.quantities import amount, percent, printable

NOT_MEASURED = "not measured"
"""A cell whose value is missing. A cell that does not apply is None."""
EMPTY = "-"


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

    @property
    def unit(self) -> str:
        """The one unit of a column of durations, by its largest value; "" for other quantities, which carry theirs."""
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
        return [self._text(value, scale, digits) for value in self.values]

    def _scale(self) -> tuple[float, str]:
        if self.quantity is not Quantity.DURATION:
            return 1.0, ""
        largest = max((abs(value) for value in self.values if isinstance(value, (int, float))), default=0.0)
        for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
            if largest >= scale:
                return scale, unit
        return (1e-9, "ns") if largest else (1e-3, "ms")

    def _text(self, value: Value, scale: float, digits: int) -> str:
        if value is None:
            return EMPTY
        if isinstance(value, str):
            return printable(value)
        if self.quantity is Quantity.SHARE:
            return percent(value)
        if self.quantity is Quantity.CHANGE:
            return f"{'+' if value >= 0 else '-'}{percent(abs(value))}"
        if self.quantity is Quantity.BYTES:
            return amount(value, "B")
        if self.quantity is Quantity.RATE:
            return amount(value, "B/s")
        if self.quantity is Quantity.NUMBER:
            return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
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
    """How many rows matter; the rest is behind "show all". None: all of them."""
    note: str = ""
    """A sentence below the table."""

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.columns[0].values) if self.columns else 0

    def head(self, rows: int) -> Table:
        """Return the table with its first rows only."""
        columns = [dataclasses.replace(column, values=column.values[:rows]) for column in self.columns]
        return dataclasses.replace(self, columns=columns, slow=frozenset(row for row in self.slow if row < rows))
