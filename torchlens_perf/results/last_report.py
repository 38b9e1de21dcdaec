"""Rank 0's report when its run has ended: how it is asked for, and where it is shown.

On a terminal and in a log it is text on stderr, as stdout is the job's. In a notebook it is shown in a cell instead.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

from torchlens_perf import output
from torchlens_perf.errors import printable
from torchlens_perf.recorder import sidecar

if TYPE_CHECKING:
    from torchlens_perf.config import Config
    from torchlens_perf.recorder.sidecar import LateReport
    from torchlens_perf.results.notebook import Cell
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.mailbox import Mailbox

SHORT_TIMEOUT_S = 1.0
"""Longest wait for the report of a sidecar that stands still, where the disk hangs, and in jobs of several nodes."""
_LONGEST_S = 10.0  # while it makes progress
_STANDING_S = 0.5  # without progress, when the short timeout has passed
_POLL_INTERVAL_S = 0.1

CELL = "cell"
"""The form of a report for a notebook, see page/notebook.py; else it is text."""


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel. Imports nothing where it is none."""
    if "IPython" not in sys.modules:
        return False
    from torchlens_perf.results import notebook

    return notebook.shell() is not None


def wanted(mailbox: Mailbox | None, *, in_cell: bool) -> dict[str, Any]:
    """What the report should look like: the sidecar writes it, but does not see rank 0's terminal."""
    terminal = output.is_terminal()
    color = terminal and "NO_COLOR" not in os.environ
    return {
        "columns": shutil.get_terminal_size((0, 0)).columns if terminal else 0,
        "color": color and not in_cell,
        "mailbox": "" if mailbox is None else str(mailbox.path),
        "form": CELL if in_cell else "",
    }


def show(
    run: RunDirectory,
    identity: Identity,
    config: Config,
    mailbox: Mailbox | None,
    cell: Cell | None,
    ended_by: type[BaseException] | None = None,
    *,
    disk_answers: bool = True,
) -> str:
    """Wait for the sidecar's report and show it, or why it is not there. Return the text.

    mailbox: None where it could not be made. cell: the notebook's cell to show it in; None: on stderr. ended_by: the
    exception that leaves the watch. Its traceback comes after this text, and nobody waits long before it. disk_answers:
    False if the disk of the run directory did not answer when the watch began.
    """
    if not config.sidecar:
        text = f"torchlens_perf: recorded. Next: torchlens-perf sidecar {printable(str(run.path))}\n"
    else:
        late = sidecar.LateReport(run, identity.node)
        patient = bool(identity.on_one_node) and ended_by is None and disk_answers
        timeout_s, quiet = config._exit_timeout_s, cell is not None
        found = None if mailbox is None else _wait(mailbox, late, timeout_s, patient, quiet=quiet)
        after = "" if ended_by is None else f"training ended with {ended_by.__name__}; "
        text = found or f"torchlens_perf: {after}{printable(late.line())}\n"
    if cell is None:
        output.say(text)
        return text
    from torchlens_perf.results.ask import parsed

    results = parsed(text)
    cell.end(results)
    return results.text


def _wait(mailbox: Mailbox, late: LateReport, timeout_s: float | None, patient: bool, *, quiet: bool) -> str | None:
    """Wait for the report, see Config._exit_timeout_s. Return None if it has not come.

    patient: whether it is waited for while the sidecar makes progress. Ctrl-C ends this wait and nothing else: training
    has succeeded, and what the program does next, as saving the model, must not be lost.
    """
    began_s = moved_s = time.monotonic()
    longest_s = timeout_s if timeout_s is not None else _LONGEST_S if patient else SHORT_TIMEOUT_S
    least_s = longest_s if timeout_s is not None else SHORT_TIMEOUT_S
    progress, said = late.progress(), quiet
    try:
        while (text := mailbox.wait(min(_POLL_INTERVAL_S, max(0.0, began_s + longest_s - time.monotonic())))) is None:
            now_s = time.monotonic()
            before, progress = progress, late.progress()
            if progress != before:
                moved_s = now_s
            if now_s >= began_s + longest_s or now_s >= max(began_s + least_s, moved_s + _STANDING_S):
                break
            if not said and now_s >= began_s + SHORT_TIMEOUT_S:
                said = True
                output.say("torchlens_perf: writing the report ... (Ctrl-C skips it)\n")
    except KeyboardInterrupt:
        return mailbox.news()
    return text
