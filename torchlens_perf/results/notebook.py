"""Show a watch in a notebook cell: live results during the run, and the report at its end.

The training thread updates the cell at the end of a step, at most once a second. No other process
can write to the notebook, and a separate thread would disturb the job. The sidecar renders the
content, and IPython's display shows it. If a watch is never displayed, this code first runs at the
end of the watch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.results.ask import (
    Results,
    RunHandle,
    count_as_overhead,
    ensure_sidecar_runs,
    missing_results,
    parse_results,
    request_results,
)
from torchlens_perf.run.mailbox import VIEW, Mailbox

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

_MIN_INTERVAL_S = 1.0
_MIN_IDLE_RATIO = 100.0  # Pause between updates, relative to an update's duration.
_FIRST_S = 2.0  # Longest wait for the first results once there are steps.
TOO_MANY = "a job with so many ranks is shown when it is asked for, not live"


def find_notebook_shell() -> Any:
    """Return IPython's shell if this process is a notebook's kernel, else None.

    The function imports no module.
    """
    ipython = sys.modules.get("IPython")
    found = (
        ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    )
    kernel = getattr(found, "kernel", None)
    if kernel is None:
        return None
    # A process that was forked from the kernel must not use the kernel's sockets.
    return (
        found
        if getattr(getattr(kernel, "session", None), "pid", os.getpid()) == os.getpid()
        else None
    )


def to_mime_bundle(found: Results) -> dict[str, str]:
    """Convert results to a dictionary by MIME type for IPython's display."""
    return {"text/plain": found.text, "text/html": f"{found.html}{_build_page_link(found.page)}"}


def _build_page_link(page: str) -> str:
    """Return a link to the run's page; "" if notebooks cannot open it.

    Notebooks open addresses relative to their own folder, in which the kernel runs.
    """
    from urllib.parse import quote

    path = os.path.relpath(page) if page else os.pardir
    if path.startswith(os.pardir):
        return ""
    return f'<p><a href="{quote(os.fsencode(path))}" target="_blank">Page of this run</a></p>'


class NotebookCell:
    """Notebook cell that shows one watch. Used on the training thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: returns seconds."""
        self._clock = clock
        self._handle: Any = None  # IPython's handle of the newest display.
        self._cell: object = None  # The cell in which the final report was shown without a request.
        self._mailbox: Mailbox | None = None
        self._newest: Results | None = None  # The newest results from the mailbox.
        self._due_s = float("-inf")

    @property
    def is_live(self) -> bool:
        return self._mailbox is not None

    def show_results(self, recorded: RunHandle, attach: Callable[[Any], None]) -> None:
        """Display the results in the running cell and update them while the watch is recording.

        attach: function that enters a context until the watch ends. Raise NotImplementedError
        outside a notebook, which makes IPython show the text.
        """
        if find_notebook_shell() is None:
            raise NotImplementedError
        session = recorded.session
        if session is not None and recorded.has_sidecar:
            with count_as_overhead(session):
                if self._mailbox is None:
                    with guard("showing the run while it goes on"):
                        attach(self._update_live(recorded))
                if self._newest is None:
                    self._read_results(_FIRST_S if session.recorder.training_steps else 0.0)
                found = self._newest or missing_results(
                    "recording; the first results come with the next steps"
                )
                if found.missing != TOO_MANY:
                    self._display(found)
                    return
        self._display(request_results(recorded))

    @contextmanager
    def _update_live(self, recorded: RunHandle) -> Iterator[None]:
        session = recorded.session
        assert session is not None
        self._mailbox = Mailbox(session.ring_path, VIEW)
        try:
            ensure_sidecar_runs(recorded)
            with session.run_throttled(
                "updating a notebook's cell", lambda: self._update_display(session)
            ):
                yield
        finally:
            box, self._mailbox = self._mailbox, None
            box.close()

    def _read_results(self, timeout_s: float) -> bool:
        """Read new results of the sidecar after at most `timeout_s`. Return True if there are any."""
        text = None if self._mailbox is None else self._mailbox.wait_for_message(timeout_s)
        if text is not None:
            self._newest = parse_results(text) if text else missing_results(TOO_MANY)
        return text is not None

    def _update_display(self, session: Session) -> None:
        now_s = self._clock()
        if now_s < self._due_s:
            return
        with count_as_overhead(session):
            if (
                self._read_results(0.0)
                and self._newest is not None
                and self._newest.missing != TOO_MANY
            ):
                self._handle.update(to_mime_bundle(self._newest), raw=True)
        self._due_s = now_s + max(_MIN_INTERVAL_S, _MIN_IDLE_RATIO * (self._clock() - now_s))

    def show_final_results(self, found: Results) -> None:
        """Show the final results in the cell that displays the run, or else in the running cell."""
        if self._handle is not None:
            self._handle.update(to_mime_bundle(found), raw=True)
            return
        self._display(found)
        self._cell = _running_cell_id()

    def _display(self, found: Results) -> None:
        from IPython.display import display

        if self._cell is not None and self._cell == _running_cell_id():
            self._handle.update(
                {"text/plain": "", "text/html": ""}, raw=True
            )  # Clear the unrequested report.
        self._cell = None
        self._handle = display(to_mime_bundle(found), raw=True, display_id=True)


def _running_cell_id() -> object:
    """Return an identifier of the cell that is being executed; None outside a cell."""
    found = find_notebook_shell()
    parent = found.get_parent() if hasattr(found, "get_parent") else {}
    return (parent.get("header") or {}).get("msg_id")
