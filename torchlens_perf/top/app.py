"""The terminal application: a thread that reads the run directory, and screens that draw lines."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App
from textual.binding import Binding
from textual.screen import Screen

from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.top import overview
from torchlens_perf.top.live_runs import RunRow, build_run_table, list_runs, select_live_runs
from torchlens_perf.top.rank_screen import rank_lines
from torchlens_perf.top.ranks import build_rank_list
from torchlens_perf.top.reading import RunReader, View
from torchlens_perf.top.text import Terminal, draw_rule, lines_around_cursor, unwrapped_line
from torchlens_perf.view.headline import choose_headline

LOOK_S = 1.0
_CSS = "Screen { background: ansi_default; color: ansi_default; overflow: hidden hidden; }"
_MOVES = {"up": -1, "down": 1, "pageup": -10, "pagedown": 10, "home": -(1 << 30), "end": 1 << 30}
_KEYS = (
    ("Up, Down, PgUp, PgDn", "choose a rank, or scroll"),
    ("Enter", "open the rank: activity, phases, modules, collectives, memory"),
    ("Esc", "back"),
    ("v", "show all findings, with the Python stacks of a hang"),
    ("c", "copy the suggested command, if the terminal has a clipboard"),
    ("o", "sort ranks by number or by compute time"),
    ("n", "show missing data and the reasons"),
    ("r", "list the other runs in the folder"),
    ("q, Ctrl-C", "quit; the job is not affected"),
)
_HELP = (
    (
        "compute: a typical step without comm wait and CPU contention. vs others: the"
        " difference from the median of the other ranks that do the same work. latest excess, its"
        " bar, and over the run: this difference as a share, in the latest window of steps and in"
        " all windows; 30 % is a full block."
    ),
    (
        "All figures come from the run directory, which a sidecar on each node updates every few"
        " seconds, or more rarely for many ranks. The time after LIVE is that of the newest update."
    ),
    (
        "The time left is shown if the run reports its total number of steps, as the callbacks for"
        " Lightning and the Hugging Face Trainer do: the steps left times the mean step time, and"
        " times the recent step time if it differs."
    ),
)


class Top(App[None]):
    """`torchlens-perf top` on a terminal."""

    CSS = _CSS
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[Any]] = [
        Binding("q,ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]

    def __init__(
        self, run: RunDirectory | None, folder: Path, terminal: Terminal, *, look_s: float = LOOK_S
    ) -> None:
        """run: None to choose a run, or to open the next live one.

        folder: the folder whose runs are listed.

        look_s: time between two looks at the files.
        """
        super().__init__(ansi_color=True)
        self.terminal, self.folder = terminal, folder
        self.view, self.runs = View(""), list[RunRow]()
        self.opens_next = run is None
        """True until a run is shown: the next live run is then opened automatically."""
        self._look_s = look_s
        self._reader: RunReader | None = None
        self._awake, self._has_ended = threading.Event(), False
        if run is not None:
            self._start_reading(run)

    def _start_reading(self, run: RunDirectory) -> None:
        self.view, self.opens_next = View(run.run_id), False
        self._reader = RunReader(run)

    def on_mount(self) -> None:
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGTERM, self.exit, None, 128 + signal.SIGTERM
        )
        self.push_screen(OverviewScreen(self))
        if self.opens_next:
            self.push_screen(RunsScreen(self))
        # A daemon thread, so that quitting does not wait for a hanging disk.
        threading.Thread(
            target=self._poll_repeatedly, name="reading the run directory", daemon=True
        ).start()

    def on_unmount(self) -> None:
        self._has_ended = True
        self._awake.set()

    def open_run(self, path: Path) -> None:
        """Show a run."""
        self._start_reading(RunDirectory(path))
        self.poll_now()
        while not isinstance(self.screen, OverviewScreen):
            self.pop_screen()
        self._show()

    def _show_poll_result(
        self, reader: RunReader | None, view: View | None, runs: list[RunRow]
    ) -> None:
        """Show the result of a poll. view: None if the view has not changed."""
        self.runs = runs
        if reader is not self._reader:
            # The user has chosen another run in the meantime.
            return
        self.view = view or self.view
        now_live = select_live_runs(runs)
        if self.opens_next and len(now_live) == 1:
            self.open_run(now_live[0].path)
        # If several runs are live, the user must choose one.
        self.opens_next &= not now_live
        self._show()

    def _exit_with_error(self, error: Exception) -> None:
        raise error

    def poll_now(self) -> None:
        """Start the next poll now."""
        self._awake.set()

    def _show(self) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, LinesScreen) and screen.is_mounted:
                screen.update_view()

    def _poll_repeatedly(self) -> None:
        """Read the run repeatedly.

        A poll needs a thread, since it takes seconds for a large job, or hangs with the disk.
        """
        shown: View | None = None
        runs: list[RunRow] = []
        while not self._has_ended:
            self._awake.clear()
            try:
                reader = self._reader
                view = reader.poll() if reader is not None else None
                lists_runs = reader is None or isinstance(self.screen, RunsScreen)
                found = list_runs(self.folder) if lists_runs else runs
            except Exception as error:
                # Without new polls the screen would become outdated, so the application ends.
                self.call_later(self._exit_with_error, error)
                return
            if view is not shown or found != runs:
                self.call_later(
                    self._show_poll_result, reader, view if view is not shown else None, found
                )
            shown, runs = view, found
            self._awake.wait(self._look_s)


class LinesScreen(Screen[None]):
    """A screen of text lines, with a line of key bindings at the bottom."""

    BINDINGS: ClassVar[list[Any]] = [
        *(Binding(key, f"move({by})", show=False) for key, by in _MOVES.items()),
        Binding("enter", "open", show=False),
        Binding("escape", "back", show=False),
    ]
    KEYS: ClassVar[Sequence[tuple[str, str]]] = ()

    def __init__(self, top: Top) -> None:
        super().__init__()
        self.top, self.at = top, 0
        """at: the selected row, or the first visible line."""

    def update_view(self) -> None:
        """Draw the current data."""
        self.refresh()

    def render(self) -> Text:
        """Return the lines of the screen as one text."""
        width, height = self.size
        terminal, keys, room = self.top.terminal, unwrapped_line(), max(0, height - 1)
        for key, does in (("q", "quit"), *self.KEYS):
            more = unwrapped_line("  " if keys else "", (key, "bold"), f" {does}")
            keys = unwrapped_line(keys, more) if len(keys) + len(more) <= width else keys
        lines = terminal.lines(self.lines(width, room), width)[:room] if width else []
        lines += [unwrapped_line()] * (room - len(lines))
        return Text("\n", no_wrap=True, end="").join(
            [*lines, *terminal.lines([keys], width)][:height]
        )

    def lines(self, width: int, height: int) -> Sequence[Text]:
        """Return the lines for a screen of this size."""
        raise NotImplementedError

    def action_move(self, by: int) -> None:
        self.at = max(0, self.at + by)
        self.update_view()

    def action_back(self) -> None:
        self.dismiss()


class OverviewScreen(LinesScreen):
    """The first screen: an overview of the run."""

    KEYS = (
        ("?", "help"), ("Enter", "open rank"), ("v", "findings"), ("c", "copy"), ("o", "order"), ("n", "notes"),
        ("r", "runs"),
    )  # fmt: skip

    def __init__(self, top: Top) -> None:
        super().__init__(top)
        self._by_number = False
        self._table, self._ranks = build_rank_list(top.view)

    def on_mount(self) -> None:
        self.update_view()

    def update_view(self) -> None:
        """Draw the newest view.

        The cursor stays on its rank; a cursor on the first row stays there.
        """
        rank = self._ranks[self.at] if self.at else None
        self._table, self._ranks = build_rank_list(self.top.view, by_number=self._by_number)
        self.at = self._ranks.index(rank) if rank in self._ranks else 0
        super().update_view()

    def lines(self, width: int, height: int) -> Sequence[Text]:
        return overview.build_overview(
            self.top.view, width, height, self.top.terminal, self._table, self.at
        )

    def action_move(self, by: int) -> None:
        self.at = max(0, min(self.at + by, len(self._ranks) - 1))
        super().update_view()

    def action_open(self) -> None:
        if self._ranks:
            rank = self._ranks[self.at]
            self._open(f"rank {rank}", lambda view, width: rank_lines(view, rank, width))

    def action_back(self) -> None:
        """Do nothing, since this is the bottom screen."""

    def key_v(self) -> None:
        self._open("findings", overview.all_finding_lines)

    def key_n(self) -> None:
        self._open("data quality", overview.note_lines)

    def key_question_mark(self) -> None:
        keys = [unwrapped_line((f"  {key:<22}", "bold"), does) for key, does in _KEYS]
        self._open("help", lambda view, width: [*keys, *(Text(f"\n{text}") for text in _HELP)])

    def key_r(self) -> None:
        self.top.push_screen(RunsScreen(self.top))

    def key_c(self) -> None:
        first = choose_headline(self.top.view.headlines)
        if first is not None and first.command:
            self.top.copy_to_clipboard(first.command)

    def key_o(self) -> None:
        self._by_number, self.at = not self._by_number, 0
        self.update_view()

    def _open(self, title: str, make: Callable[[View, int], Sequence[Text]]) -> None:
        self.top.push_screen(TextScreen(self.top, title, make))


class TextScreen(LinesScreen):
    """A text that scrolls."""

    KEYS = (("Esc", "back"), ("Up, Down, PgUp, PgDn", "scroll"))

    def __init__(self, top: Top, title: str, make: Callable[[View, int], Sequence[Text]]) -> None:
        super().__init__(top)
        self._title, self._make = title, make

    def lines(self, width: int, height: int) -> Sequence[Text]:
        view, terminal = self.top.view, self.top.terminal
        head = terminal.lines(
            [overview.title_line(view, width), *overview.trouble_lines(view)], width
        )
        text = terminal.lines(self._make(view, width), width)
        room = max(1, height - len(head) - 1)
        self.at = max(0, min(self.at, len(text) - room))
        part = f"; lines {self.at + 1}-{self.at + room} of {len(text)}" if len(text) > room else ""
        return [*head, draw_rule(f"{self._title}{part}", width), *text[self.at : self.at + room]]

    def action_open(self) -> None:
        self.dismiss()


class RunsScreen(LinesScreen):
    """The list of runs in the folder."""

    KEYS = (("Enter", "open"), ("Up, Down", "choose"), ("Esc", "back"))

    def on_mount(self) -> None:
        self.top.poll_now()

    def lines(self, width: int, height: int) -> Sequence[Text]:
        top, hint = self.top, "; the next live run opens by itself" if self.top.opens_next else ""
        title = draw_rule(f"runs in {top.folder}{hint}", width)
        if not top.runs:
            return [title, unwrapped_line(("  no run here yet; looking again every second", "dim"))]
        self.at = min(self.at, len(top.runs) - 1)
        return [title, *lines_around_cursor(build_run_table(top.runs), width, height - 1, self.at)]

    def action_open(self) -> None:
        if self.top.runs:
            self.top.open_run(self.top.runs[self.at].path)
