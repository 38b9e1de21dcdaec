"""Asking for a run's results: its sidecar while it records, a child process afterwards."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens_perf.errors import RunStoreError, guard, printable
from torchlens_perf.recorder import sidecar
from torchlens_perf.results import child
from torchlens_perf.run.directory import find_sidecar_lock
from torchlens_perf.run.mailbox import ANSWER, RESULTS, Mailbox

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session
    from torchlens_perf.run.directory import RunDirectory

COMMAND = "results"
"""Of our command line, see commands/results.py."""
ANSWER_TIMEOUT_S = 5.0  # of the sidecar: a young one imports what it needs first
_WRITE_TIMEOUT_S = 5.0  # for the sidecar to write what is left, once the run has ended
_POLL_INTERVAL_S = 0.02
_WAKE_INTERVAL_S = 0.5


class RunHandle(NamedTuple):
    """What a watch has recorded, as far as results are asked for."""

    run: RunDirectory | None
    """None: nothing is recorded."""
    session: Session | None
    """While it records."""
    has_sidecar: bool
    missing: str
    """Why there is no run."""
    may_settle: bool = True
    """Whether the sidecar is waited for, which still writes a run that has ended."""


class Results(NamedTuple):
    """A run's results, for people and for programs."""

    text: str
    """The report, as in a terminal without colours; where there is none, why."""
    html: str
    """For a notebook's cell."""
    summary: dict[str, Any]
    """See summary.py; empty where there is nothing."""
    missing: str
    """Why there is nothing; "" where there is something."""


def nothing(why: str) -> Results:
    """Results where there are none."""
    import html

    line = f"torchlens_perf: {printable(why)}"
    return Results(line, f"<div>{html.escape(line)}</div>", {}, why)


def parsed(text: str) -> Results:
    """What page/notebook.py has made. Another text is shown as it is: then something went wrong."""
    try:
        value = json.loads(text)
        return Results(value["text"], value["html"], value["summary"], "")
    except (ValueError, KeyError, TypeError):
        return nothing(text.removeprefix("torchlens_perf: ").strip())


def results(recorded: RunHandle) -> Results:
    """The results as they are now. Waits at most ANSWER_TIMEOUT_S and child.TIMEOUT_S. Raises nothing of ours."""
    run, session = recorded.run, recorded.session
    if run is None:
        return nothing(recorded.missing)
    with own_work(session):
        text = ask(recorded, RESULTS)
        if text:
            return parsed(text)
        if session is None and recorded.may_settle:
            wait_until_written(run)
        try:
            return parsed(child.output(COMMAND, str(run.path), "cell").decode())
        except RunStoreError as error:
            why = str(error)
            if not recorded.has_sidecar:
                why = f"no sidecar has read the records. Next: torchlens-perf sidecar {run.path}"
            return nothing(why)


def ask(recorded: RunHandle, question: str) -> str | None:
    """The sidecar's answer; None where there is none, or not in time. Starts a sidecar again that was killed."""
    run, session = recorded.run, recorded.session
    if run is None or session is None or not recorded.has_sidecar:
        return None
    with guard("asking the sidecar"):
        box, deadline_s = Mailbox(session.ring_path, ANSWER, question), time.monotonic() + ANSWER_TIMEOUT_S
        try:
            text = None
            while text is None and (left_s := deadline_s - time.monotonic()) > 0:
                wake(recorded)  # one that is being killed may hold its lock a little longer
                text = box.wait(min(left_s, _WAKE_INTERVAL_S))
            return text
        finally:
            box.close()
    return None


def wake(recorded: RunHandle) -> None:
    """Starts the node's sidecar again, if it was killed. Raises RunStoreError where that cannot be done."""
    if recorded.run is not None and recorded.session is not None:
        session = recorded.session
        sidecar.ensure(recorded.run, session.identity, session.config._exchange_token)


def wait_until_written(run: RunDirectory) -> None:
    """Wait until the node's sidecar has written all of a run that has ended, at most _WRITE_TIMEOUT_S."""
    deadline_s = time.monotonic() + _WRITE_TIMEOUT_S
    while find_sidecar_lock(run.run_id) is not None and time.monotonic() < deadline_s:
        time.sleep(_POLL_INTERVAL_S)


@contextmanager
def own_work(session: Session | None) -> Iterator[None]:
    """Around what takes the training thread's time at the user's word: the step in progress has it as the tool's."""
    if session is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    start_ns = session.recorder.now_ns()
    try:
        yield
    finally:
        if not session.recorder.closed:
            session.add_overhead(session.recorder.now_ns() - start_ns)
