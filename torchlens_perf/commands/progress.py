"""The progress of a long command: a line on stderr, shown after a second and erased at the end.

The line is shown only on a terminal, and never with --quiet. Functions that do long work
accept a callback, `advanced(done, total)`::

    with Progress("reading the run", quiet=options.quiet) as progress:
        pages = draw(run, advanced=progress)
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from torchlens_perf.output import is_terminal

if TYPE_CHECKING:
    from rich import progress

Advanced: TypeAlias = Callable[[int, "int | None"], object]
"""A callback with the amount of work done and the total amount, or None if that is unknown."""

_AFTER_S = 1.0  # Work that takes less time shows no line.


def ignore_progress(done: int, total: int | None) -> None:
    """Ignore progress: the default callback."""


class Progress:
    """A context manager that is also the callback. Calls are cheap enough for each file or block.

    Without calls the line shows only the elapsed time. A thread of this process draws the line.
    While it runs, other output to the terminal must use sys.stderr.

    Ctrl-C raises KeyboardInterrupt. If that exception gets lost, for example in C code that imports
    a module, the next call raises KeyboardInterrupt again.
    """

    def __init__(self, what: str, *, quiet: bool = False, after_s: float = _AFTER_S) -> None:
        """what: describes the work, for example "reading the run"."""
        self._what = what
        self._done = 0
        self._total: int | None = None
        self._bar: progress.Progress | None = None
        self._interrupted = False
        self._before: Any = None  # previous handler of SIGINT
        self._began_s = time.monotonic()
        self._timer: threading.Timer | None = None
        if is_terminal() and not quiet and os.environ.get("TERM") != "dumb":
            self._timer = threading.Timer(after_s, self._show)
            self._timer.daemon = True

    def __enter__(self) -> Progress:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        if self._timer is not None:
            self._timer.start()
        return self

    def __call__(self, done: int, total: int | None = None) -> None:
        """Report the amount of work done and the total amount, in any unit."""
        if self._interrupted:
            raise KeyboardInterrupt
        self._done, self._total = done, total
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._bar is not None:
            with contextlib.suppress(OSError):  # The terminal may have been closed.
                self._bar.stop()

    def _interrupt(self, *_: object) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def _show(self) -> None:
        from rich import progress
        from rich.console import Console

        class StillCursor(Console):
            """A console that does not hide the cursor, which a killed process could not restore."""

            def show_cursor(self, show: bool = True) -> bool:
                return False

        bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            console=StillCursor(stderr=True, highlight=False),
            transient=True,
            redirect_stdout=False,  # The command's output must reach stdout.
        )
        with contextlib.suppress(OSError):
            bar.add_task(self._what, completed=self._done, total=self._total)
            bar.tasks[0].start_time = self._began_s
            bar.start()
            self._bar = bar
