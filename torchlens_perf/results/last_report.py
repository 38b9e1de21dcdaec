"""Rank 0's report when its run has ended: how it is asked for, and where it is shown.

On a terminal and in a log it is text on stderr, as stdout is the job's. In a notebook it is shown in a cell instead.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import printable
from torchlens_perf.recorder import sidecar

if TYPE_CHECKING:
    from torchlens_perf.config import Config
    from torchlens_perf.results.notebook import Cell
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.run.mailbox import Mailbox

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
    color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    return {
        "columns": shutil.get_terminal_size((0, 0)).columns if sys.stderr.isatty() else 0,
        "color": color and not in_cell,
        "mailbox": "" if mailbox is None else str(mailbox.path),
        "form": CELL if in_cell else "",
    }


def show(run: RunDirectory, node: str, config: Config, mailbox: Mailbox | None, cell: Cell | None) -> str:
    """Waits for the sidecar's report and shows it; else says why it is not there. Returns the text.

    mailbox: None where it could not be made. cell: of a notebook, to show it in; None: on stderr.
    """
    if not config.sidecar:
        text = f"torchlens_perf: recorded. Next: torchlens-perf sidecar {printable(str(run.path))}\n"
    else:
        late = sidecar.LateReport(run, node)
        found = None if mailbox is None else mailbox.wait(config.exit_timeout_s)
        text = found or f"torchlens_perf: {printable(late.line())}\n"
    if cell is None:
        print(text, end="", file=sys.stderr, flush=True)
        return text
    from torchlens_perf.results.ask import parsed

    results = parsed(text)
    cell.end(results)
    return results.text
