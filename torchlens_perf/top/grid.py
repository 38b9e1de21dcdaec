"""Lays out the cells of ranks: with their numbers where there is room, else a character each, else one a node. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from torchlens_perf.run.rank_ranges import ranges
from torchlens_perf.top.cells import Cell, node_cells
from torchlens_perf.top.lettering import Lettering

_MOST_WIDE = 64  # cells with their numbers: of more, a picture says it sooner
_GROUP, _EVEN = 8, 4  # cells that stand together; with their numbers, so many or twice as many in a line
_NUMBER = 6  # cells wide, as " +124%"
_LONGEST_NAME = 20  # of a node
_GAP = 2  # between two cells with their numbers
STEPS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""By key: lines and columns."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Cells in lines of `columns`, and so many lines on a page."""

    cells: Sequence[Cell]
    by_node: bool
    wide: bool
    """Whether each has its number beside it."""
    columns: int
    lines_a_page: int
    name_width: int
    """Of a rank's number, or of a node's name."""
    lettering: Lettering

    @property
    def pages(self) -> int:
        return -(-len(self.cells) // self._on_a_page)

    @property
    def _on_a_page(self) -> int:
        return self.columns * self.lines_a_page

    def at(self, rank: int | None) -> int:
        """The index of the cell that has a rank in it; of the first one where none has."""
        found = (index for index, cell in enumerate(self.cells) if rank == cell.rank or rank in cell.ranks)
        return next(found, 0)

    def moved(self, index: int, key: str) -> int:
        """Where a key leads from a cell: left, right, up, down, pageup, pagedown, home, end."""
        last = len(self.cells) - 1
        if key in STEPS:
            lines, columns = STEPS[key]
            to = index + lines * self.columns + columns
            return to if 0 <= to <= last else index
        pages = {"pageup": -self._on_a_page, "pagedown": self._on_a_page, "home": -index, "end": last}
        return min(last, max(0, index + pages.get(key, 0)))

    def next_outstanding(self, index: int) -> int:
        """The next cell after this one that stands out, after the last one the first; the same where none does.

        -1: before all of them.
        """
        order = [*range(index + 1, len(self.cells)), *range(index + 1)]
        return next((at for at in order if self.cells[at].stands_out), max(0, index))

    def page_of(self, index: int) -> str:
        """Which of the cells are shown; "" where all are."""
        if self.pages < 2:
            return ""
        first = index // self._on_a_page * self._on_a_page
        shown = self.cells[first : first + self._on_a_page]
        what = "nodes" if self.by_node else "ranks"
        return f"{what} {first + 1}-{first + len(shown)} of {len(self.cells)}"

    def lines(self, index: int | None, *, marked: bool = False) -> list[Text]:
        """The page that a cell is on, which may be marked; None: all pages."""
        pages = range(self.pages) if index is None else [index // self._on_a_page]
        lines = []
        for page in pages:
            end = min(len(self.cells), (page + 1) * self._on_a_page)
            for first in range(page * self._on_a_page, end, self.columns):
                lines.append(self._line(first, min(end, first + self.columns), index if marked else None))
        return lines

    def _line(self, first: int, end: int, marked: int | None) -> Text:
        line = Text(no_wrap=True)
        if not self.wide:
            cell = self.cells[first]
            line.append(f"{min(cell.ranks, default=cell.rank):>{self.name_width}} ", style="dim")
        for place, index in enumerate(range(first, end)):
            cell = self.cells[index]
            mark = " reverse" if index == marked else ""
            if self.wide:
                line.append(" " * (_GAP if place else 0))
                line.append(self._name(cell), style=f"dim{mark}" if not cell.stands_out else f"bold{mark}")
                line.append(f" {cell.letter}{cell.text:>{_NUMBER}}", style=cell.style + mark)
            else:
                line.append(" " if place and place % _GROUP == 0 else "")
                line.append(cell.letter, style=cell.style + mark)
        return line

    def _name(self, cell: Cell) -> str:
        if self.by_node:
            return self.lettering.fitted(cell.host or "(not known)", self.name_width)
        return f"{cell.rank:>{self.name_width}}"


def laid_out(ranks: Sequence[Cell], width: int, height: int, lettering: Lettering, by_node: bool | None = None) -> Grid:
    """The grid for so many columns and lines of a terminal.

    ranks: see rank_cells(). by_node: one cell a node; None: where the ranks would need more than a page.
    """
    nodes = node_cells(ranks)
    grid = _grid(ranks, width, height, lettering, by_node=False)
    if by_node or (by_node is None and grid.pages > 1 and len(nodes) > 1):
        return _grid(nodes, width, height, lettering, by_node=True)
    return grid


def _grid(cells: Sequence[Cell], width: int, height: int, lettering: Lettering, *, by_node: bool) -> Grid:
    height = max(1, height)
    number = max((len(str(cell.rank)) for cell in cells), default=1)
    name = number
    if by_node:
        name = min(_LONGEST_NAME, max((cell_len(lettering.inert(cell.host)) for cell in cells), default=1))
    most = max(1, (width + _GAP) // (name + 2 + _NUMBER + _GAP))
    even = most if most < _EVEN else min(_GROUP, most // _EVEN * _EVEN)
    for columns in (even, most) if len(cells) <= _MOST_WIDE else ():
        if -(-len(cells) // columns) <= height:
            return Grid(cells, by_node, True, columns, height, name, lettering)
    room = max(1, width - number - 1)
    groups = (room + 1) // (_GROUP + 1)
    return Grid(cells, by_node, False, groups * _GROUP or room, height, number, lettering)


def described(cell: Cell, meaning: str, number: str) -> str:
    """One cell in words, for the line below the grid. meaning: of its letter; number: in words; each may be ""."""
    known = ", ".join(filter(None, (meaning, number)))
    if len(cell.ranks) > 1:
        return f"{cell.host or '(not known)'}, ranks {ranges(cell.ranks)}; rank {cell.rank}: {known}"
    return f"rank {cell.rank}{f' on {cell.host}' if cell.host else ''}: {known}"
