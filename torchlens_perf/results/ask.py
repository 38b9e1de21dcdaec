"""Request the results of a run from its sidecar during the run, or from a child process later."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens_perf.errors import RunStoreError, guard, printable
from torchlens_perf.interruption import ours
from torchlens_perf.recorder import sidecar
from torchlens_perf.results import child
from torchlens_perf.run.directory import find_sidecar_lock
from torchlens_perf.run.mailbox import ANSWER, RESULTS, Mailbox
from torchlens_perf.run.verdicts import Summary, Verdict

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session
    from torchlens_perf.run.directory import RunDirectory

COMMAND = "results"
"""Name of the subcommand in commands/results.py."""
ANSWER_TIMEOUT_S = 5.0  # A sidecar that has just started first imports its modules.
_WRITE_TIMEOUT_S = 5.0  # Time for the sidecar to write the last records.
_POLL_INTERVAL_S = 0.02
_WAKE_INTERVAL_S = 0.5


class RunHandle(NamedTuple):
    """Access to the results of a watch or of a loaded run."""

    run: RunDirectory | None
    """The run directory; None if nothing is recorded."""
    session: Session | None
    """The session of a watch that is recording; None for ended or loaded runs."""
    has_sidecar: bool
    missing: str
    """Reason why nothing is recorded."""
    may_settle: bool = True
    """True to wait until the sidecar has written all data before an ended run is read."""


class Results(NamedTuple):
    """Results of a run as text, HTML and values."""

    text: str
    """The report as plain text, or the reason why it is missing."""
    html: str
    """The report for a notebook cell."""
    summary: dict[str, Any]
    """Values of a Summary; {} if results are missing."""
    missing: str
    """Reason why results are missing; "" if results are available."""
    page: str = ""
    """Path of the run's page; "" if it does not exist yet."""


def missing_results(why: str, line: str = "") -> Results:
    """Return Results that contain only the reason why results are missing. line: how it is shown."""
    import html

    line = line or f"torchlens_perf: {printable(why)}"
    return Results(line, f"<div>{html.escape(line)}</div>", {}, why)


def parse_results(text: str) -> Results:
    """Decode the JSON that page/notebook.py writes. Other text is shown as the message of a failure."""
    try:
        value = json.loads(text)
        return Results(value["text"], value["html"], value["summary"], "", value["page"])
    except ours(ValueError, KeyError, TypeError):
        return missing_results(text.strip(), printable(text.strip()))


def request_results(recorded: RunHandle) -> Results:
    """Return the current results from the sidecar, or else from a child process.

    The call takes at most ANSWER_TIMEOUT_S plus child.TIMEOUT_S. If it fails, the results contain
    the reason.
    """
    run, session = recorded.run, recorded.session
    if run is None:
        return missing_results(recorded.missing)
    with count_as_overhead(session):
        text = ask_sidecar(recorded, RESULTS)
        if text:
            return parse_results(text)
        if session is None and recorded.may_settle:
            wait_until_run_is_written(run)
        try:
            return parse_results(child.run_and_capture(COMMAND, str(run.path), "cell").decode())
        except RunStoreError as error:
            why = str(error)
            if not recorded.has_sidecar:
                why = f"no sidecar has read the records. Next: torchlens-perf sidecar {run.path}"
            return missing_results(why)


def request_summary(recorded: RunHandle) -> Summary:
    """Return the values of the current results, see Watch.summary()."""
    found = request_results(recorded)
    if not found.summary:
        return Summary(missing=found.missing, html=found.html)
    verdicts = tuple(Verdict(**row) for row in found.summary["verdicts"])
    return Summary(**{**found.summary, "verdicts": verdicts, "html": found.html})


def ask_sidecar(recorded: RunHandle, question: str) -> str | None:
    """Return the sidecar's answer to a question; None without a sidecar or after a timeout.

    A sidecar that was killed is started again.
    """
    run, session = recorded.run, recorded.session
    if run is None or session is None or not recorded.has_sidecar:
        return None
    with guard("asking the sidecar"):
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        with closing(Mailbox(session.ring_path, ANSWER, question)) as box:
            text = None
            while text is None and (left_s := deadline_s - time.monotonic()) > 0:
                # Try repeatedly: a sidecar that is being killed may hold its lock a little longer.
                ensure_sidecar_runs(recorded)
                text = box.wait_for_message(min(left_s, _WAKE_INTERVAL_S))
            return text
    return None


def ensure_sidecar_runs(recorded: RunHandle) -> None:
    """Start the node's sidecar unless it is running. Raise RunStoreError if it cannot start."""
    if recorded.run is not None and recorded.session is not None:
        session = recorded.session
        sidecar.ensure_running(recorded.run, session.identity, session.config._exchange_token)


def wait_until_run_is_written(run: RunDirectory) -> None:
    """Wait until the node's sidecar has written an ended run, but at most _WRITE_TIMEOUT_S."""
    deadline_s = time.monotonic() + _WRITE_TIMEOUT_S
    while find_sidecar_lock(run.run_id) is not None and time.monotonic() < deadline_s:
        time.sleep(_POLL_INTERVAL_S)


@contextmanager
def count_as_overhead(session: Session | None) -> Iterator[None]:
    """Context whose time on the training thread counts as this tool's overhead in the step.

    session: None to count nothing.
    """
    if session is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    start_ns = session.recorder.now_ns()
    try:
        yield
    finally:
        if not session.recorder.closed:
            session.add_overhead(session.recorder.now_ns() - start_ns)
