"""How far a long command is: a line on stderr, there after a second, gone when the work is done.

Shown on a terminal only, and never with --quiet. What does the work takes a function, `advanced(done, total)`, and
need not know who listens::

    with Progress("reading the run", quiet=options.quiet) as progress:
        pages = draw(run, advanced=progress)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from rich import progress

Advanced: TypeAlias = Callable[[int, "int | None"], object]
"""Called as advanced(done, total): how much is done so far, and of how much, None where that is not known."""

_AFTER_S = 1.0  # what takes less needs no line


def nothing(done: int, total: int | None) -> None:
    """For whoever does not want to know."""


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class Progress:
    """A context manager, and the function to call from the work. Calls are cheap: make one for each file or block.

    The work may also call nothing: then the line shows that it goes on, and for how long. The thread that draws it is
    this process's own. Nothing else may write to the terminal meanwhile, but to sys.stderr.

    Ctrl-C raises KeyboardInterrupt. Where something swallows that, as C code does that imports a module, the next call
    raises it once more.
    """

    def __init__(self, what: str, *, quiet: bool = False, after_s: float = _AFTER_S) -> None:
        """what: what is done, as "reading the run"."""
        self._what = what
        self._done = 0
        self._total: int | None = None
        self._bar: progress.Progress | None = None
        self._lock = threading.Lock()  # between the timer's thread and this one
        self._ended = False
        self._interrupted = False
        self._before: Any = None  # the handler of SIGINT
        self._began_s = time.monotonic()
        self._timer: threading.Timer | None = None
        if not quiet and sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            self._timer = threading.Timer(after_s, self._show)
            self._timer.daemon = True

    def __enter__(self) -> Progress:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler and _is_main_thread():
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        if self._timer is not None:
            self._timer.start()
        return self

    def __call__(self, done: int, total: int | None = None) -> None:
        """How much is done by now, and of how much, in any unit."""
        if self._interrupted:
            raise KeyboardInterrupt
        self._done, self._total = done, total
        bar = self._bar
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done, total=total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self._timer is None:
            return
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._bar is not None:
                with contextlib.suppress(OSError):  # the terminal may be gone
                    self._bar.stop()

    def _interrupt(self, *_: object) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def _show(self) -> None:
        from rich import progress
        from rich.console import Console

        class StillCursor(Console):
            """Hides no cursor: who kills the process would have a terminal without one."""

            def show_cursor(self, show: bool = True) -> bool:
                return False

        bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            console=StillCursor(stderr=True, highlight=False),
            transient=True,
            redirect_stdout=False,  # what is asked for goes where it was asked to go
        )
        with self._lock, contextlib.suppress(OSError):
            if self._ended:
                return
            bar.add_task(self._what, completed=self._done, total=self._total)
            bar.tasks[0].start_time = self._began_s
            bar.start()
            self._bar = bar
