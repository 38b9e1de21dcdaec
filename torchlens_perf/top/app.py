"""The application: a thread that reads the run directory, and screens that show what it has found."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import ClassVar

from textual.app import App
from textual.binding import Binding
from textual.message import Message

from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.top.known import Known
from torchlens_perf.top.lettering import Lettering
from torchlens_perf.top.live_runs import RunRow, live, runs_in
from torchlens_perf.top.reading import RunReader, View
from torchlens_perf.top.screens import OverviewScreen, RunChosen, RunsScreen, RunsWanted, Shown

LOOK_S = 1.0
_CSS = """
Screen { background: ansi_default; color: ansi_default; overflow: hidden hidden; }
Lines { height: auto; width: 100%; background: ansi_default; color: ansi_default; }
#title, #verdict-rule, #grid-rule, #phase-rule, #quality, #keys, #rule, #chosen { height: 1; }
#pace { height: 2; }
ScrolledLines { height: 1fr; background: ansi_default; scrollbar-size: 0 0; }
ScrolledLines:focus { background-tint: ansi_default 0%; }
#verdicts { min-height: 3; }
#lower { height: 40%; min-height: 9; }
#left { width: 1fr; }
#right { width: 38; padding-left: 1; }
.wide #right { width: 54; }
.narrow #right { display: none; }
.short #verdicts { min-height: 1; }
.short #lower { min-height: 3; }
.short #quality { display: none; }
RankGrid { height: 1fr; background: ansi_default; color: ansi_default; }
#keys { dock: bottom; }
"""


class Looked(Message):
    """The reading thread has found something new; what is None is as before."""

    def __init__(self, reader: RunReader | None, view: View | None, runs: list[RunRow]) -> None:
        super().__init__()
        self.reader, self.view, self.runs = reader, view, runs


class Failed(Message):
    """The reading thread has made a mistake: without it nothing is true that is shown."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class Top(App[None]):
    """`torchlens-perf top` on a terminal."""

    CSS = _CSS
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[Binding]] = [  # type: ignore[assignment]
        Binding("q,ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]

    def __init__(self, run: RunDirectory | None, folder: Path, lettering: Lettering, *, look_s: float = LOOK_S) -> None:
        """run: to show; None: one is chosen, or the next live one in the folder. folder: whose runs are listed.

        look_s: between two looks at the files.
        """
        super().__init__(ansi_color=True)
        self._known = Known(folder, lettering, View("", str(folder), None, None, ""), opens_next=run is None)
        self._look_s = look_s
        self._reader: RunReader | None = None
        self._wants_runs = False
        self._awake = threading.Event()
        self._has_ended = False
        if run is not None:
            self._start_with(run)

    def _start_with(self, run: RunDirectory) -> None:
        self._known.start_with(run)
        self._reader = RunReader(run)

    def on_mount(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit, None, 128 + signal.SIGTERM)
        self.push_screen(OverviewScreen(self._known))
        if self._known.opens_next:
            self.push_screen(RunsScreen(self._known))
        # A daemon: where a disk does not answer, quitting does not wait for it.
        threading.Thread(target=self._keep_looking, name="reading the run directory", daemon=True).start()

    def on_unmount(self) -> None:
        self._has_ended = True
        self._awake.set()

    def on_run_chosen(self, message: RunChosen) -> None:
        """Shows another run, from its beginning."""
        self._start_with(RunDirectory(message.path))
        while not isinstance(self.screen, OverviewScreen):
            self.pop_screen()
        self._show()
        self._awake.set()

    def on_runs_wanted(self, message: RunsWanted) -> None:
        self._wants_runs = message.wanted
        self._awake.set()

    def on_looked(self, message: Looked) -> None:
        known = self._known
        known.runs = message.runs
        if message.reader is not self._reader:
            return  # another run is shown since
        if message.view is not None:
            known.view = message.view
        now_live = live(known.runs)
        if known.opens_next and len(now_live) == 1:
            self.on_run_chosen(RunChosen(now_live[0].path))
            return
        known.opens_next &= not now_live  # of several, one is to be chosen
        self._show()

    def on_failed(self, message: Failed) -> None:
        raise message.error

    def _show(self) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, Shown) and screen.is_mounted:
                screen.show_anew()

    def _keep_looking(self) -> None:
        """In a thread: a look takes milliseconds, or seconds of a large job, and a disk may not answer."""
        shown: View | None = None
        runs: list[RunRow] = []
        while not self._has_ended:
            try:
                reader = self._reader
                view = reader.look() if reader is not None else None
                found = runs_in(self._known.folder) if self._wants_runs or reader is None else runs
            except Exception as error:
                self.post_message(Failed(error))
                return
            if view is not shown or found != runs:
                self.post_message(Looked(reader, view if view is not shown else None, found))
            shown, runs = view, found
            self._awake.wait(self._look_s)
            self._awake.clear()
