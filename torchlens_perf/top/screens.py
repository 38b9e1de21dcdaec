"""The screens: the run at a look, and texts that are looked into from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.screen import Screen

from torchlens_perf.top import overview
from torchlens_perf.top.cells import VIEWS, Cell, legend, rank_cells
from torchlens_perf.top.frame import grid_title
from torchlens_perf.top.help_text import help_lines
from torchlens_perf.top.known import Known
from torchlens_perf.top.live_runs import run_lines
from torchlens_perf.top.rank_lines import rank_lines
from torchlens_perf.top.verdict_lines import verdict_lines
from torchlens_perf.top.widgets import Lines, RankGrid, ScrolledLines

_MIN_PHASES, _WIDE_PHASES = 70, 110  # columns of the terminal, for the typical step to be there, and to have room


class RunChosen(Message):
    """Another run is to be shown."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path


class RunsWanted(Message):
    """The runs of the folder are shown, or no longer."""

    def __init__(self, wanted: bool) -> None:
        super().__init__()
        self.wanted = wanted


class Shown(Screen[None]):
    """A screen that shows what is known."""

    def __init__(self, known: Known) -> None:
        super().__init__()
        self.known = known

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

    def __init__(self, known: Known) -> None:
        super().__init__(known)
        self._host: str | None = None  # of the node whose ranks alone are shown

    def compose(self) -> ComposeResult:
        known = self.known
        yield Lines(lambda width: [overview.title_line(known.view, width, known.lettering)], id="title")
        yield Lines(lambda width: overview.trouble_lines(known.view, width, known.lettering), id="trouble")
        yield Lines(lambda width: overview.pace_lines(known.view, width, known.lettering), id="pace")
        yield Lines(self._verdict_rule, id="verdict-rule")
        yield ScrolledLines(self._verdicts, id="verdicts")
        with Horizontal(id="lower"):
            with Vertical(id="left"):
                yield Lines(self._grid_rule, id="grid-rule")
                yield RankGrid(known.lettering, id="grid")
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
        report, found = self.known.view.report, self.query(RankGrid)
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
        rows = self.known.verdicts
        over = sum(row["is_over"] for row in rows)
        now = "at the end" if self.known.view.has_ended else "now"
        title = f"verdicts: {len(rows) - over} {now}" + (f", {over} over" if over else "") if rows else "verdicts"
        scrolled = self.query_one(ScrolledLines)
        title = f"{title}; {scrolled.part()}" if scrolled.part() else title
        return [overview.rule(title, width, self.known.lettering, chosen=scrolled.has_focus)]

    def _verdicts(self, width: int) -> list[Text]:
        """With the evidence, where there is room for all of it: who sees a hang sees where its rank is."""
        rows, room = self.known.verdicts, self.query_one(ScrolledLines).content_size.height
        whole = verdict_lines(rows, width, self.known.lettering, details=True)
        return whole if len(whole) <= room else verdict_lines(rows, width, self.known.lettering)

    def _grid_rule(self, width: int) -> list[Text]:
        report = self.known.view.report
        if report is None:
            return [overview.rule("ranks", width, self.known.lettering)]
        grid = self.grid.grid
        page = grid.page_of(grid.at(self.grid.chosen.rank)) if self.grid.chosen is not None else ""
        title = grid_title(report, self.grid.view, width, by_node=grid.by_node, page=page)
        if self._host is not None:
            title = f"{self._host}: {title}"
        return [overview.rule(title, width, self.known.lettering, chosen=self.grid.has_focus)]

    def _chosen(self, width: int) -> list[Text]:
        return [Text(self.known.lettering.fitted(self.grid.chosen_text(), width), style="italic")]

    def _phase_rule(self, width: int) -> list[Text]:
        report = self.known.view.report
        title = overview.phase_title(report, width) if report is not None else "typical step"
        return [overview.rule(title, width, self.known.lettering)]

    def _phases(self, width: int) -> list[Text]:
        report = self.known.view.report
        return overview.phase_lines(report, width, self.known.lettering) if report is not None else []

    def _quality(self, width: int) -> list[Text]:
        report = self.known.view.report
        return [overview.quality_line(report, width, self.known.lettering) if report is not None else Text()]

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
            self.app.push_screen(rank_screen(self.known, message.cell.rank))

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
        self.app.push_screen(TextScreen(self.known, "verdicts", _all_verdicts))

    def action_notes(self) -> None:
        self.app.push_screen(TextScreen(self.known, "data quality and notes", _notes))

    def action_help(self) -> None:
        self.app.push_screen(TextScreen(self.known, "help", _help))

    def action_runs(self) -> None:
        self.app.push_screen(RunsScreen(self.known))


def _all_verdicts(known: Known, width: int) -> list[Text]:
    return verdict_lines(known.verdicts, width, known.lettering, details=True)


def _notes(known: Known, width: int) -> list[Text]:
    report = known.view.report
    if report is None:
        return []
    line = overview.quality_line(report, width, known.lettering)
    return [line, Text(), *overview.note_lines(report, width, known.lettering)]


def _help(known: Known, width: int) -> list[Text]:
    report = known.view.report
    letters = [legend(rank_cells(report, view), view) for view in VIEWS] if report is not None else []
    return help_lines(letters, width, known.lettering)


class TextScreen(Shown):
    """A text that may be longer than the screen."""

    BINDINGS: ClassVar[list[Binding]] = [  # type: ignore[assignment]
        Binding("escape,enter,left", "dismiss", show=False),
    ]

    def __init__(self, known: Known, title: str, make: Callable[[Known, int], Sequence[Text]]) -> None:
        super().__init__(known)
        self._title, self._make = title, make

    def compose(self) -> ComposeResult:
        known = self.known
        yield Lines(lambda width: [overview.title_line(known.view, width, known.lettering)], id="title")
        yield Lines(lambda width: overview.trouble_lines(known.view, width, known.lettering), id="trouble")
        yield Lines(self._rule, id="rule")
        yield ScrolledLines(lambda width: self._make(known, width), id="text")
        yield Lines(self.keys, id="keys")

    def _rule(self, width: int) -> list[Text]:
        part = self.query_one(ScrolledLines).part()
        return [overview.rule(f"{self._title}; {part}" if part else self._title, width, self.known.lettering)]

    def on_mount(self) -> None:
        self.query_one(ScrolledLines).focus()

    def on_scrolled_lines_scrolled(self) -> None:
        self.refresh_lines("rule")

    def key_names(self) -> Sequence[tuple[str, str]]:
        return [("Esc", "back"), ("Up, Down, PgUp, PgDn", "scroll"), ("q", "quit")]


def rank_screen(known: Known, rank: int) -> TextScreen:
    def lines(known: Known, width: int) -> list[Text]:
        return rank_lines(known.view, rank, width, known.lettering)

    return TextScreen(known, f"rank {rank}", lines)


class RunsScreen(Shown):
    """The runs of the folder, to choose one of."""

    BINDINGS: ClassVar[list[Binding]] = [  # type: ignore[assignment]
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("enter", "open", show=False),
        Binding("escape", "dismiss", show=False),
    ]

    def __init__(self, known: Known) -> None:
        super().__init__(known)
        self._chosen = 0

    def on_mount(self) -> None:
        self.post_message(RunsWanted(True))

    def on_unmount(self) -> None:
        self.app.post_message(RunsWanted(False))

    def compose(self) -> ComposeResult:
        yield Lines(self._rule, id="rule")
        yield ScrolledLines(self._lines, id="text")
        yield Lines(self.keys, id="keys")

    def _rule(self, width: int) -> list[Text]:
        hint = "; the next live one opens by itself" if self.known.opens_next else ""
        return [overview.rule(f"runs in {self.known.folder}{hint}", width, self.known.lettering)]

    def _lines(self, width: int) -> list[Text]:
        return run_lines(self.known.runs, self._at, width, self.known.lettering)

    @property
    def _at(self) -> int:
        return min(self._chosen, max(0, len(self.known.runs) - 1))

    def action_move(self, by: int) -> None:
        self._chosen = min(max(0, self._at + by), max(0, len(self.known.runs) - 1))
        self.query_one(ScrolledLines).scroll_to(y=self._chosen - self.size.height // 2, animate=False)
        self.show_anew()

    def action_open(self) -> None:
        if self.known.runs:
            self.post_message(RunChosen(self.known.runs[self._at].path))

    def key_names(self) -> Sequence[tuple[str, str]]:
        return [("Enter", "open"), ("Up, Down", "choose"), ("Esc", "back"), ("q", "quit")]
