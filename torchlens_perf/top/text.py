"""Lines that fit a terminal's width and character set."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from torchlens_perf.run.children import environment_at_start
from torchlens_perf.view.specs import Column, Quantity, Table, sanitize_line
from torchlens_perf.view.terminal import table_lines

BLOCKS, _EIGHTHS = " ▁▂▃▄▅▆▇█", " ▏▎▍▌▋▊▉█"
_ASCII = str.maketrans("─│▶…·▁▂▃▄▅▆▇█▏▎▍▌▋▊▉▓▒░▚", "-|>~._.-~=+*#...--==%+-x")
_console = Console(width=80)


@dataclasses.dataclass(frozen=True)
class Terminal:
    """The capabilities of a terminal."""

    ascii_only: bool = False
    color: bool = True

    def lines(self, texts: Iterable[Text], width: int) -> list[Text]:
        """Return texts as lines that are at most `width` wide.

        Texts with `no_wrap` are cut off, others are wrapped.
        """
        lines = []
        for text in texts:
            for line in [text] if text.no_wrap else _wrap_lines(text, max(1, width)):
                if self.ascii_only and not line.plain.isascii():
                    plain = line.plain.translate(_ASCII)
                    line.plain = "".join(
                        c if c.isascii() else "?" * (cell_len(c) > 0) for c in plain
                    )
                line.no_wrap = True
                line.truncate(width, overflow="crop" if self.ascii_only else "ellipsis")
                lines.append(line)
        return lines


def _wrap_lines(text: Text, width: int) -> Iterable[Text]:
    """Yield the lines of a text, indented like its first line."""
    indent = min(len(text.plain) - len(text.plain.lstrip(" ")), width // 2)
    for line in text[indent:].wrap(_console, width - indent):
        line.pad_left(indent)
        yield line


def unwrapped_line(*parts: str | tuple[str, str] | Text) -> Text:
    """Return a line that is cut off instead of wrapped if it is too long."""
    return Text.assemble(*parts, no_wrap=True)


def draw_bar(columns: float) -> str:
    """Return a bar with a resolution of 1/8 column. A value above 0 has at least 1/8 column."""
    whole, rest = divmod(max(1, round(columns * 8)) if columns > 0 else 0, 8)
    return "█" * whole + _EIGHTHS[rest].rstrip()


def build_difference_column(
    title: str, values: Sequence[float | None], unit_of: float, help: str = ""
) -> Column:
    """Return a column of differences.

    A value that the column rounds to "<0.01" or the like has no sign.
    """
    column = Column(title, values, unit_of=unit_of, help=help)
    pairs = zip(values, column.texts(), strict=True)
    return dataclasses.replace(
        column,
        marks=["+" if value and value > 0 and text[0] != "<" else "" for value, text in pairs],
    )


def join_fitting(parts: Sequence[str], width: int) -> str:
    """Return the parts that fit the width, in their order."""
    text = ""
    for part in filter(None, parts):
        longer = f"{text}   {part}" if text else part
        if not text or len(longer) <= width:
            text = longer
    return text


def select_rows(table: Table, rows: Sequence[int]) -> Table:
    """Return a table with only these rows, in this order. Columns of durations keep their unit."""
    columns = [
        dataclasses.replace(
            column,
            values=[column.values[row] for row in rows],
            marks=[column.marks[row] for row in rows] if column.marks else (),
            unit_of=column.unit_of
            or max((abs(each) for each in column.values if isinstance(each, float)), default=0.0),
        )
        for column in table.columns
    ]
    slow = frozenset(at for at, row in enumerate(rows) if row in table.slow)
    return dataclasses.replace(table, columns=columns, slow=slow)


def lines_around_cursor(table: Table, width: int, height: int, at: int) -> list[Text]:
    """Return a table with as many rows as fit, including the selected row, which is marked."""
    rows = min(table.rows, height - 2)
    while rows > 0:
        first = max(0, min(at - rows // 2, table.rows - rows))
        title = f"{table.title}, {at + 1} of {table.rows}" if rows < table.rows else table.title
        shown = select_rows(table, range(first, first + rows))
        mark = Column("", ["▶" if row == at - first else " " for row in range(rows)], Quantity.TEXT)
        shown = dataclasses.replace(shown, title=title, columns=[mark, *shown.columns])
        heading, *lines = table_lines(shown, width + 3, rows)
        if len(lines) < height or rows == 1:
            # The column of marks replaces the table's left margin.
            return [heading, *(unwrapped_line(each.plain[2], each[4:]) for each in lines)][:height]
        # Long names are folded to several lines, so fewer rows fit.
        rows = max(1, rows * (height - 1) // len(lines))
    return []


def draw_rule(title: str, width: int) -> Text:
    """Return a separator line with the title of the part below it."""
    found = unwrapped_line(("── ", "dim"), (sanitize_line(title), "bold"), " ")
    return found.append("─" * max(0, width - found.cell_len), style="dim")


def detect_terminal() -> Terminal:
    """Return the capabilities of this process's terminal, from the locale (Unicode only for UTF-8)
    and NO_COLOR.
    """
    # Python may have replaced the C locale by UTF-8 in os.environ.
    environ = environment_at_start()
    locale = next(
        filter(None, (environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG"))), ""
    )
    return Terminal("utf8" not in locale.lower().replace("-", ""), not os.environ.get("NO_COLOR"))
