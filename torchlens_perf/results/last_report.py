"""Wait for rank 0's report at the end of a run and show it.

In terminals and logs, the report is text on stderr, because stdout belongs to the job. In notebooks
it is shown in a cell. A report that is not ready after the wait is replaced by one line with its
path.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from torchlens_perf import output
from torchlens_perf.errors import printable
from torchlens_perf.interruption import suppress
from torchlens_perf.recorder import sidecar
from torchlens_perf.run.directory import describe_removed_ring
from torchlens_perf.run.rank_facts import ReportRequest, encode_path

if TYPE_CHECKING:
    from pathlib import Path

    from torchlens_perf.config import Config
    from torchlens_perf.recorder.sidecar import LateReport
    from torchlens_perf.results.notebook import NotebookCell
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.mailbox import Mailbox

SHORT_TIMEOUT_S = 1.0
"""Longest wait if the program may be ended soon, if the sidecar makes no progress, if the disk hangs,
or in jobs on several nodes.
"""
_LONGEST_S = 10.0  # Longest wait while the sidecar makes progress.
_STANDING_S = 0.5  # Longest time without progress after the short timeout.
_POLL_INTERVAL_S = 0.1
_WARNING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU)


def is_in_notebook() -> bool:
    """Return True if this process is a notebook's kernel. Other processes import no module."""
    if "IPython" not in sys.modules:
        return False
    from torchlens_perf.results import notebook

    return notebook.find_notebook_shell() is not None


def build_report_request(mailbox: Mailbox | None, *, in_cell: bool) -> ReportRequest:
    """Return the format in which the sidecar should write the report for rank 0's terminal or cell."""
    terminal = output.is_terminal()
    return ReportRequest(
        mailbox="" if mailbox is None else encode_path(str(mailbox.path)),
        columns=_count_columns() if terminal else 0,
        color=terminal and not in_cell and "NO_COLOR" not in os.environ,
        in_cell=in_cell,
    )


def _count_columns() -> int:
    """Return the width of the terminal; 0 if it is not known.

    shutil.get_terminal_size() would drop the TimeoutError of a signal handler.
    """
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    with suppress(AttributeError, OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns
    return 0


def show_report(
    run: RunDirectory,
    identity: Identity,
    config: Config,
    mailbox: Mailbox | None,
    cell: NotebookCell | None,
    began_s: float,
    *,
    raised: bool = False,
    disk_answers: bool = True,
    removed_ring: Path | None = None,
) -> str:
    """Wait for the sidecar's report, show it or the reason why it is missing, and return the text.

    mailbox: None if it could not be created. cell: notebook cell for the report; None for stderr.
    began_s: monotonic time at which the watch began to end. raised: True if an exception ends the
    watch. disk_answers: False if the disk of the run directory did not respond when the watch began.
    removed_ring: this rank's ring file if another program has removed it.
    """
    removed = "" if removed_ring is None else _explain_removed_ring(run, removed_ring, config)
    if not config.sidecar:
        text = removed or (
            f"torchlens_perf: recorded. Next: torchlens-perf sidecar {printable(str(run.path))}\n"
        )
        if cell is None:
            output.write_to_stderr(text)
    else:
        late = sidecar.LateReport(run, identity.node, began_s)
        if raised and identity.world_size > 1 and cell is None:
            # The launcher ends the other ranks of a failed job, often before the report is ready.
            output.write_to_stderr(f"torchlens_perf: the report will be in {late.report}\n")
        patient = bool(identity.on_one_node) and disk_answers and not raised
        text = ""
        try:
            if mailbox is not None:
                text = (
                    _wait_for_report(
                        mailbox,
                        late,
                        began_s,
                        config._exit_timeout_s,
                        # Many programs save a checkpoint after a signal that schedulers send before
                        # they end a job, and leave the watch without an exception, or by
                        # sys.exit(), of which nothing is left when exit handlers run.
                        patient
                        and not any(callable(signal.getsignal(each)) for each in _WARNING_SIGNALS),
                        quiet=cell is not None,
                    )
                    or ""
                )
        finally:
            # A signal handler of the program may raise SystemExit during the wait.
            text = text or removed or f"torchlens_perf: {printable(late.build_message())}\n"
            if cell is None:
                output.write_to_stderr(text)
    if cell is None:
        return text
    from torchlens_perf.results.ask import parse_results

    results = parse_results(text)
    cell.show_final_results(results)
    return results.text


def _explain_removed_ring(run: RunDirectory, ring: Path, config: Config) -> str:
    why = f"torchlens_perf: {printable(describe_removed_ring(ring))}"
    if not config.sidecar:
        return f"{why}. If it was renamed: torchlens-perf sidecar NEW_RUN_DIRECTORY\n"
    return (
        f"{why}. Records that the sidecar had not read are lost. Next: torchlens-perf report"
        f" {printable(str(run.path))}\n"
    )


def _wait_for_report(
    mailbox: Mailbox,
    late: LateReport,
    began_s: float,
    timeout_s: float | None,
    patient: bool,
    *,
    quiet: bool,
) -> str | None:
    """Wait for the report and return it; None after the timeout of Config._exit_timeout_s.

    Ctrl-C ends only this wait. Training has succeeded, and the program must continue, for example
    to save the model. began_s: time from which the timeouts count. patient: wait as long as the sidecar
    makes progress. quiet: print no message.
    """
    moved_s = time.monotonic()
    longest_s = timeout_s if timeout_s is not None else _LONGEST_S if patient else SHORT_TIMEOUT_S
    least_s = longest_s if timeout_s is not None else SHORT_TIMEOUT_S
    progress, said = late.read_progress(), quiet
    try:
        while (
            text := mailbox.wait_for_message(
                min(_POLL_INTERVAL_S, max(0.0, began_s + longest_s - time.monotonic()))
            )
        ) is None:
            now_s = time.monotonic()
            before, progress = progress, late.read_progress()
            if progress != before:
                moved_s = now_s
            if now_s >= began_s + longest_s or now_s >= max(
                began_s + least_s, moved_s + _STANDING_S
            ):
                break
            if not said and now_s >= began_s + SHORT_TIMEOUT_S:
                said = True
                output.write_to_stderr(
                    f"torchlens_perf: writing the report to {late.report} ... (Ctrl-C to skip)\n"
                )
    except KeyboardInterrupt:
        return mailbox.read_new_message()
    return text
