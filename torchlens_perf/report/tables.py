"""Tables as all of the report's are. Where there is little room, some have fewer columns, and whole cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from torchlens_perf.analysis.statistics.quantities import amount

_T = TypeVar("_T")

_UNBOUNDED = 10_000


def or_dash(value: _T | None, show: Callable[[_T], str]) -> str:
    """A cell: a dash for what is not known."""
    return "-" if value is None else show(value)


def in_bytes(count: float) -> str:
    """A cell, as "1.5 GB"."""
    return amount(count, "B")


def note_on_rest(shown: Sequence[object], rows: Sequence[object], which: str) -> list[str]:
    """A line below a table that does not show all rows. which: those that it does."""
    return [f"the {len(shown)} of {len(rows)} {which}"] if len(shown) < len(rows) else []


@dataclasses.dataclass(frozen=True)
class Column:
    """A column with all its cells."""

    header: str
    cells: Sequence[str | Text]
    worth: float = 9.0
    """Columns below 1 may be left out, the least first."""
    left: bool = False
    """Whether it holds names: flush left, and folded where they are too long for any table."""


@dataclasses.dataclass(frozen=True)
class FittingTable:
    """A rich renderable: a table that leaves out columns where it would not fit."""

    title: str
    columns: Sequence[Column]
    notes: Callable[[Sequence[str]], Sequence[str]] = lambda headers: ()
    """The lines below, by the headers of the columns that are shown."""
    bold: int | None = None
    """A row that stands out."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        shown = list(self.columns)
        unbounded = options.update(max_width=_UNBOUNDED)
        while console.measure(self._table(shown), options=unbounded).maximum > options.max_width:
            least = min(shown, key=lambda column: column.worth)
            if least.worth >= 1:
                break
            shown.remove(least)
        headers = [column.header for column in shown]
        notes = list(self.notes(headers))
        if gone := [column.header for column in self.columns if column not in shown]:
            notes.append(f"no room for: {', '.join(gone)}")
        table = self._table(shown)
        table.caption = "\n".join(notes) or None
        yield table

    def _table(self, shown: Sequence[Column]) -> Table:
        table = Table(
            box=SIMPLE_HEAD, title=self.title, title_justify="left", title_style="bold", caption_justify="left",
            pad_edge=False, padding=(0, 1, 0, 0),
        )  # fmt: skip
        for column in shown:
            justify: Literal["left", "right"] = "left" if column.left else "right"
            table.add_column(column.header, justify=justify, no_wrap=not column.left, overflow="fold")
        for row in range(len(self.columns[0].cells)):
            table.add_row(*(column.cells[row] for column in shown), style="bold" if row == self.bold else None)
        return table
