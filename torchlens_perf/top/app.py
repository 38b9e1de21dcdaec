"""The application: a thread that reads the run directory, and screens that show what it has found."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path
from typing import ClassVar

from textual.app import App
from textual.binding import Binding
from textual.message import Message

from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.top.lettering import Lettering
from torchlens_perf.top.live_runs import RunRow, live, runs_in
from torchlens_perf.top.reading import RunReader, View
from torchlens_perf.top.screens import OverviewScreen, RunsScreen, Shown
from torchlens_perf.top.verdict_list import VerdictList

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
        self.folder, self.lettering = folder, lettering
        self._look_s = look_s
        self.runs: list[RunRow] = []
        self._lists_runs = False
        self._awake = threading.Event()
        self._has_ended = False
        self._start_with(run)

    @property
    def waits_for_run(self) -> bool:
        """Whether there is no run yet that is shown."""
        return self._reader is None

    def _start_with(self, run: RunDirectory | None) -> None:
        self._reader = RunReader(run) if run is not None else None
        self.verdicts = VerdictList()
        name, path = (run.run_id, str(run.path)) if run is not None else ("", str(self.folder))
        self.view = View(name, path, None, None, "")

    def on_mount(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit, None, 128 + signal.SIGTERM)
        self.push_screen(OverviewScreen())
        if self.waits_for_run:
            self.push_screen(RunsScreen())
        # A daemon: where a disk does not answer, quitting does not wait for it.
        threading.Thread(target=self._keep_looking, name="reading the run directory", daemon=True).start()

    def on_unmount(self) -> None:
        self._has_ended = True
        self._awake.set()

    def open(self, path: Path) -> None:
        """Shows another run, from its beginning."""
        self._start_with(RunDirectory(path))
        while not isinstance(self.screen, OverviewScreen):
            self.pop_screen()
        self._show()
        self._awake.set()

    def lists_runs(self, on: bool) -> None:
        """Whether the runs of the folder are to be looked for."""
        self._lists_runs = on
        self._awake.set()

    def on_looked(self, message: Looked) -> None:
        self.runs = message.runs
        if message.reader is not self._reader:
            return  # another run is shown since
        if message.view is not None:
            self.view = message.view
            if self.view.report is not None:
                self.verdicts.update(self.view.report, time.time())
        now_live = live(self.runs)
        if self.waits_for_run and now_live:
            self.open(now_live[0].path)
        else:
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
                found = runs_in(self.folder) if self._lists_runs or reader is None else runs
            except Exception as error:
                self.post_message(Failed(error))
                return
            if view is not shown or found != runs:
                self.post_message(Looked(reader, view if view is not shown else None, found))
            shown, runs = view, found
            self._awake.wait(self._look_s)
            self._awake.clear()
