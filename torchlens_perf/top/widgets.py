"""What the screens are made of: lines of text that fit their place, and the grid with its cursor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widget import Widget

from torchlens_perf.top.cells import EXCESS, Cell, meaning
from torchlens_perf.top.grid import STEPS, Grid, described, laid_out
from torchlens_perf.top.lettering import Lettering, clipped

if TYPE_CHECKING:
    from textual.geometry import Size

Make = Callable[[int], Sequence[Text]]
"""Makes the lines for so many columns."""


class Lines(Widget):
    """Lines that are made anew for the width that there is."""

    def __init__(self, make: Make, id: str | None = None) -> None:
        super().__init__(id=id)
        self._make = make

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._make(width))

    def render(self) -> Text:
        width = self.content_size.width
        return joined(clipped(self._make(width), width))


class ScrolledLines(VerticalScroll):
    """The same, of which a part is seen at a time. No bar says which, as not every terminal could show one."""

    class Scrolled(Message):
        """Another part is seen, or has the focus."""

    def __init__(self, make: Make, id: str | None = None) -> None:
        super().__init__(Lines(make), id=id)

    def part(self) -> str:
        """Which part is seen; "" where all is."""
        lines, seen = self.virtual_size.height, self.content_size.height
        first = round(self.scroll_y)
        return f"lines {first + 1}-{min(lines, first + seen)} of {lines}" if 0 < seen < lines else ""

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self.post_message(self.Scrolled())

    def watch_virtual_size(self) -> None:
        self.post_message(self.Scrolled())

    def on_focus(self) -> None:
        self.post_message(self.Scrolled())

    def on_blur(self) -> None:
        self.post_message(self.Scrolled())


def joined(lines: Sequence[Text]) -> Text:
    return Text("\n", no_wrap=True, end="").join(lines)


class RankGrid(Widget, can_focus=True):
    """The cells of ranks or nodes, one of which is chosen."""

    BINDINGS: ClassVar[list[Binding]] = [  # type: ignore[assignment]
        *(Binding(key, f"move('{key}')", show=False) for key in (*STEPS, "pageup", "pagedown", "home", "end")),
        Binding("enter", "open", show=False),
    ]

    class Opened(Message):
        """The chosen cell is to be looked into."""

        def __init__(self, cell: Cell) -> None:
            super().__init__()
            self.cell = cell

    class Moved(Message):
        """Another cell is chosen."""

    def __init__(self, lettering: Lettering, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lettering = lettering
        self._cells: Sequence[Cell] = ()
        self._rank: int | None = None
        self.by_node: bool | None = None
        """One cell a node; None: where there is no room for the ranks."""
        self.view = EXCESS
        self._laid_out: tuple[object, Grid] | None = None

    def show(self, cells: Sequence[Cell]) -> None:
        """These ranks from now on. The chosen one stays, if it is among them."""
        self._cells = cells
        self.refresh()

    @property
    def grid(self) -> Grid:
        key = id(self._cells), self.size, self.by_node
        if self._laid_out is None or self._laid_out[0] != key:
            grid = laid_out(self._cells, self.size.width, self.size.height, self._lettering, self.by_node)
            self._laid_out = key, grid
        return self._laid_out[1]

    @property
    def chosen(self) -> Cell | None:
        grid = self.grid
        return grid.cells[grid.at(self._rank)] if grid.cells else None

    def chosen_text(self) -> str:
        """The chosen cell in words."""
        cell = self.chosen
        if cell is None:
            return ""
        number = f"{cell.text} work" if self.view == EXCESS else f"waits {cell.text}"
        return described(cell, meaning(cell.letter, self.view), number if cell.text else "")

    def render(self) -> Text:
        grid = self.grid
        if not grid.cells:
            return Text()
        return joined(clipped(grid.lines(grid.at(self._rank), marked=self.has_focus), self.size.width))

    def action_move(self, key: str) -> None:
        grid = self.grid
        if grid.cells:
            self._choose(grid.moved(grid.at(self._rank), key))

    def choose_next_outstanding(self) -> None:
        """The next cell that stands out, whichever is chosen."""
        grid = self.grid
        if grid.cells:
            self._choose(grid.next_outstanding(grid.at(self._rank) if self._rank is not None else -1))

    def action_open(self) -> None:
        cell = self.chosen
        if cell is not None:
            self.post_message(self.Opened(cell))

    def _choose(self, index: int) -> None:
        self._rank = self.grid.cells[index].rank
        self.refresh()
        self.post_message(self.Moved())
