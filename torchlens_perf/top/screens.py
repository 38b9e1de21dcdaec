"""The screens: the run at a look, and texts that are looked into from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import Screen

from torchlens_perf.top import overview
from torchlens_perf.top.cells import VIEWS, Cell, legend, rank_cells
from torchlens_perf.top.frame import grid_title
from torchlens_perf.top.help_text import help_lines
from torchlens_perf.top.live_runs import run_lines
from torchlens_perf.top.rank_lines import rank_lines
from torchlens_perf.top.widgets import Lines, RankGrid, ScrolledLines

if TYPE_CHECKING:
    from torchlens_perf.top.shown import Top

_MIN_PHASES, _WIDE_PHASES = 70, 110  # columns of the terminal, for the typical step to be there, and to have room


class Shown(Screen[None]):
    """A screen that shows what the application knows."""

    @property
    def top(self) -> Top:
        return cast("Top", self.app)

    def show_anew(self) -> None:
        """Something new is known."""
        for lines in self.query(Lines):
            lines.refresh(layout=True)

    def refresh_lines(self, *names: str) -> None:
        """Those that are there: messages may come before all of the screen is."""
        for name in names:
            for lines in self.query(f"#{name}").results(Lines):
                lines.refresh()

    def keys(self, width: int) -> list[Text]:
        """The bottom line: as many keys as there is room for."""
        text = Text()
        for key, does in self.key_names():
            more = Text.assemble("  " if text else "", (key, "bold"), " ", does)
            if text.cell_len + more.cell_len <= width:
                text.append_text(more)
        return [text]

    def key_names(self) -> Sequence[tuple[str, str]]:
        return [("q", "quit")]


class OverviewScreen(Shown):
    """The run at a look."""

    BINDINGS: ClassVar[list[Binding]] = [  # type: ignore[assignment]
        Binding("v", "view", show=False),
        Binding("w", "next_outstanding", show=False),
        Binding("g", "group", show=False),
        Binding("n", "notes", show=False),
        Binding("r", "runs", show=False),
        Binding("question_mark", "help", show=False),
        Binding("escape", "back", show=False),
        Binding("enter", "verdicts", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._host: str | None = None  # of the node whose ranks alone are shown

    def compose(self) -> ComposeResult:
        top = self.top
        yield Lines(lambda width: [overview.title_line(top.view, width, top.lettering)], id="title")
        yield Lines(lambda width: overview.trouble_lines(top.view, width, top.lettering), id="trouble")
        yield Lines(lambda width: overview.pace_lines(top.view, width, top.lettering), id="pace")
        yield Lines(self._verdict_rule, id="verdict-rule")
        yield ScrolledLines(self._verdicts, id="verdicts")
        with Horizontal(id="lower"):
            with Vertical(id="left"):
                yield Lines(self._grid_rule, id="grid-rule")
                yield RankGrid(top.lettering, id="grid")
                yield Lines(self._chosen, id="chosen")
            with Vertical(id="right"):
                yield Lines(self._phase_rule, id="phase-rule")
                yield Lines(self._phases, id="phases")
        yield Lines(self._quality, id="quality")
        yield Lines(self.keys, id="keys")

    @property
    def grid(self) -> RankGrid:
        return self.query_one(RankGrid)

    def on_mount(self) -> None:
        self.grid.focus()
        self.show_anew()

    def on_resize(self) -> None:
        self.set_class(self.size.width < _MIN_PHASES, "narrow")
        self.set_class(self.size.width >= _WIDE_PHASES, "wide")
        self.set_class(self.size.height < 20, "short")
        self.call_after_refresh(self.show_anew)

    def show_anew(self) -> None:
        report, found = self.top.view.report, self.query(RankGrid)
        if not found:
            return  # it is shown when it is there
        grid = found.first()
        cells = rank_cells(report, grid.view) if report is not None else []
        if self._host is not None:
            cells = [cell for cell in cells if cell.host == self._host] or cells
        grid.show(cells)
        super().show_anew()

    # -- parts

    def _verdict_rule(self, width: int) -> list[Text]:
        entries = self.top.verdicts.entries()
        holding = sum(entry.holds for entry in entries)
        over = len(entries) - holding
        now = "at the end" if self.top.view.has_ended else "now"
        title = f"verdicts: {holding} {now}" + (f", {over} over" if over else "") if entries else "verdicts"
        scrolled = self.query_one(ScrolledLines)
        title = f"{title}; {scrolled.part()}" if scrolled.part() else title
        return [overview.rule(title, width, self.top.lettering, chosen=scrolled.has_focus)]

    def _verdicts(self, width: int) -> list[Text]:
        return overview.verdict_lines(self.top.verdicts.entries(), width, self.top.lettering)

    def _grid_rule(self, width: int) -> list[Text]:
        report = self.top.view.report
        if report is None:
            return [overview.rule("ranks", width, self.top.lettering)]
        grid = self.grid.grid
        page = grid.page_of(grid.at(self.grid.chosen.rank)) if self.grid.chosen is not None else ""
        title = grid_title(report, self.grid.view, width, by_node=grid.by_node, page=page)
        if self._host is not None:
            title = f"{self._host}: {title}"
        return [overview.rule(title, width, self.top.lettering, chosen=self.grid.has_focus)]

    def _chosen(self, width: int) -> list[Text]:
        return [Text(self.top.lettering.fitted(self.grid.chosen_text(), width), style="italic")]

    def _phase_rule(self, width: int) -> list[Text]:
        report = self.top.view.report
        title = overview.phase_title(report, width) if report is not None else "typical step"
        return [overview.rule(title, width, self.top.lettering)]

    def _phases(self, width: int) -> list[Text]:
        report = self.top.view.report
        return overview.phase_lines(report, width, self.top.lettering) if report is not None else []

    def _quality(self, width: int) -> list[Text]:
        report = self.top.view.report
        return [overview.quality_line(report, width, self.top.lettering) if report is not None else Text()]

    def key_names(self) -> Sequence[tuple[str, str]]:
        other = VIEWS[1 - VIEWS.index(self.grid.view)]
        keys = [("q", "quit"), ("?", "help"), ("Enter", "open"), ("v", other), ("w", "next slow"), ("n", "notes")]
        back = [("Esc", "all nodes")] if self._host is not None else []
        return [*keys[:3], *back, *keys[3:], ("Tab", "verdicts"), ("g", "nodes"), ("r", "runs")]

    # -- keys

    def on_rank_grid_moved(self) -> None:
        self.refresh_lines("chosen", "grid-rule")

    def on_scrolled_lines_scrolled(self) -> None:
        self.refresh_lines("verdict-rule", "grid-rule")

    def on_rank_grid_opened(self, message: RankGrid.Opened) -> None:
        if len(message.cell.ranks) > 1:
            self._only(message.cell)
        else:
            self.top.push_screen(rank_screen(message.cell.rank))

    def _only(self, cell: Cell | None) -> None:
        self._host = None if cell is None else cell.host
        self.grid.by_node = None if cell is None else False
        self.show_anew()

    def action_back(self) -> None:
        self._only(None)

    def action_next_outstanding(self) -> None:
        self.grid.focus()
        self.grid.choose_next_outstanding()

    def action_view(self) -> None:
        self.grid.focus()
        self.grid.view = VIEWS[1 - VIEWS.index(self.grid.view)]
        self.show_anew()

    def action_group(self) -> None:
        self.grid.focus()
        self._host = None
        self.grid.by_node = not self.grid.grid.by_node
        self.show_anew()

    def action_verdicts(self) -> None:
        """Enter on the verdicts: all of them, with their evidence."""
        self.top.push_screen(TextScreen("verdicts", _all_verdicts))

    def action_notes(self) -> None:
        self.top.push_screen(TextScreen("data quality and notes", _notes))

    def action_help(self) -> None:
        self.top.push_screen(TextScreen("help", lambda top, width: help_lines(_legend(top), width, top.lettering)))

    def action_runs(self) -> None:
        self.top.push_screen(RunsScreen())


def _all_verdicts(top: Top, width: int) -> list[Text]:
    return overview.verdict_lines(top.verdicts.entries(), width, top.lettering, details=True)


def _notes(top: Top, width: int) -> list[Text]:
    report = top.view.report
    if report is None:
        return []
    line = overview.quality_line(report, width, top.lettering)
    return [line, Text(), *overview.note_lines(report, width, top.lettering)]


def _legend(top: Top) -> list[str]:
    report = top.view.report
    return [legend(rank_cells(report, view), view) for view in VIEWS] if report is not None else []


class TextScreen(Shown):
    """A text that may be longer than the screen."""

    BINDINGS: ClassVar[list[Binding]] = [  # type: ignore[assignment]
        Binding("escape,enter,left", "dismiss", show=False),
    ]

    def __init__(self, title: str, make: Callable[[Top, int], Sequence[Text]]) -> None:
        super().__init__()
        self._title, self._make = title, make

    def compose(self) -> ComposeResult:
        top = self.top
        yield Lines(lambda width: [overview.title_line(top.view, width, top.lettering)], id="title")
        yield Lines(lambda width: overview.trouble_lines(top.view, width, top.lettering), id="trouble")
        yield Lines(self._rule, id="rule")
        yield ScrolledLines(lambda width: self._make(top, width), id="text")
        yield Lines(self.keys, id="keys")

    def _rule(self, width: int) -> list[Text]:
        part = self.query_one(ScrolledLines).part()
        return [overview.rule(f"{self._title}; {part}" if part else self._title, width, self.top.lettering)]

    def on_mount(self) -> None:
        self.query_one(ScrolledLines).focus()

    def on_scrolled_lines_scrolled(self) -> None:
        self.refresh_lines("rule")

    def key_names(self) -> Sequence[tuple[str, str]]:
        return [("Esc", "back"), ("Up, Down, PgUp, PgDn", "scroll"), ("q", "quit")]


def rank_screen(rank: int) -> TextScreen:
    return TextScreen(
        f"rank {rank}", lambda top, width: rank_lines(top.view, rank, top.verdicts.entries(), width, top.lettering)
    )


class RunsScreen(Shown):
    """The runs of the folder, to choose one of."""

    BINDINGS: ClassVar[list[Binding]] = [  # type: ignore[assignment]
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("enter", "open", show=False),
        Binding("escape", "dismiss", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._chosen = 0

    def on_mount(self) -> None:
        self.top.lists_runs(True)

    def on_unmount(self) -> None:
        self.top.lists_runs(False)

    def compose(self) -> ComposeResult:
        yield Lines(self._rule, id="rule")
        yield ScrolledLines(self._lines, id="text")
        yield Lines(self.keys, id="keys")

    def _rule(self, width: int) -> list[Text]:
        hint = "; the next live one opens by itself" if self.top.waits_for_run else ""
        return [overview.rule(f"runs in {self.top.folder}{hint}", width, self.top.lettering)]

    def _lines(self, width: int) -> list[Text]:
        return run_lines(self.top.runs, self._at, width, self.top.lettering)

    @property
    def _at(self) -> int:
        return min(self._chosen, max(0, len(self.top.runs) - 1))

    def action_move(self, by: int) -> None:
        self._chosen = min(max(0, self._at + by), max(0, len(self.top.runs) - 1))
        self.query_one(ScrolledLines).scroll_to(y=self._chosen - self.size.height // 2, animate=False)
        self.show_anew()

    def action_open(self) -> None:
        if self.top.runs:
            self.top.open(self.top.runs[self._at].path)

    def key_names(self) -> Sequence[tuple[str, str]]:
        return [("Enter", "open"), ("Up, Down", "choose"), ("Esc", "back"), ("q", "quit")]
