"""perf.role() and perf.event(): what a process of a job with several roles says of its work.

An event is one record in a memory-mapped file. This process starts no thread and opens no socket.
The sidecar that a watched trainer of the same node has started reads the file, or a process that is
started at the first event (node_reader.py).
"""

from __future__ import annotations

import itertools
import os
import threading
from multiprocessing.util import Finalize
from pathlib import Path

from torchlens_perf import config as configuration
from torchlens_perf.errors import ConfigError, guard, unknown_word_text
from torchlens_perf.output import logger
from torchlens_perf.roles import libraries, node_reader
from torchlens_perf.roles.detection import find_role
from torchlens_perf.roles.event_file import CODES, EVENTS, LOCK, NOT_GIVEN, ROLES, EventFile
from torchlens_perf.run import directory
from torchlens_perf.run.identity import run_id_from_environment
from torchlens_perf.run.mailbox import EVENTS as SUFFIX
from torchlens_perf.run.place import launcher
from torchlens_perf.run.place.node import namespace_digest
from torchlens_perf.run.processes import process_start_ticks, read_command_line

ROLE = "TORCHLENS_PERF_ROLE"
_MAX_NAME = 100


class _Process:
    """Role, name and event file of this process."""

    def __init__(self) -> None:
        role, _, self.name = os.environ.get(ROLE, "").partition("/")
        self.is_set, self.is_detected = role in ROLES, False
        """True if the user has set the role, or if it was detected."""
        self.role = role if self.is_set else "other"
        self.others: dict[tuple[str, str], int] = {}
        self.run_id = ""
        """Run of this process's watch, if that is known."""
        self.file: EventFile | None = None
        self.is_off = False
        """True if no file is opened any more."""
        self.lock = threading.RLock()


_process = _Process()
_ids = itertools.count(1)


def role(role: str, name: str = "") -> None:
    """Set the role of this process in its job: trainer, rollout, tool, reward or other.

        perf.role("rollout", name="engine-1")

    name: distinguishes processes of the same role in the report; by default, the order in which they
    started. The variable TORCHLENS_PERF_ROLE=rollout/engine-1 does the same. Known libraries then
    record events (libraries.py). All processes of a job need the same TORCHLENS_PERF_RUN_ID, those on
    nodes without a trainer also TORCHLENS_PERF_DIR, and the trainers a watch(). Raise ConfigError for
    another role.
    """
    if role not in ROLES:
        raise ConfigError(unknown_word_text("role", role, ROLES) + f" Roles: {', '.join(ROLES)}.")
    _set_role(role, name, detected=False)
    libraries.attach()


def detect_role(role: str, name: str = "") -> None:
    """Set the role of this process unless its user has set one. "other" is no role that was detected."""
    if not _process.is_set and role != "other":
        _set_role(role, name, detected=True)


def current_role() -> str:
    """Return the role of this process; "" if it is not known."""
    return _process.role if _process.is_set or _process.role != "other" else ""


@guard("following a trainer")
def follow_trainer(run_id: str) -> None:
    """Record events of the trainer that this process runs. run_id: of its watch."""
    with _process.lock:
        if _process.run_id != run_id:
            _process.run_id, _process.file, _process.is_off = run_id, None, False
            _process.others.clear()
    libraries.attach()


def _set_role(role: str, name: str, *, detected: bool) -> None:
    with _process.lock:
        _process.is_set, _process.is_detected = not detected, detected
        _process.role, _process.name = role, name[:_MAX_NAME]
        if _process.file is not None:
            _process.file.describe_process(role, _process.name, detected=detected)


def event(
    name: str,
    id: object = "",
    *,
    batch: object = "",
    tokens_in: int = NOT_GIVEN,
    tokens_out: int = NOT_GIVEN,
) -> None:
    """Record that something happened now to a sample or to a batch of the job.

        perf.event("sample_sent", id=sample, batch=iteration)
        perf.event("generation_end", id=sample, tokens_in=120, tokens_out=512)
        perf.event("batch_complete", batch=iteration)

    name: one of the events in docs/guides/reinforcement-learning.md. id: of the sample, the same in
    all processes. batch: of the iteration. Only these values are kept, nothing of prompts or answers.
    Ids of more than 48 bytes are shortened. Any thread may call this. It takes a few microseconds and
    never waits. The first call creates a file, and may start a process that reads it. Raise
    ConfigError for an unknown name.
    """
    code = CODES.get(name)
    if code is None:
        raise ConfigError(unknown_word_text("event", name, EVENTS))
    _write(code, id, batch, tokens_in, tokens_out)


def make_id() -> str:
    """Return an id that no other process uses, for a generation whose sample is not known."""
    return f"{namespace_digest()}-{os.getpid()}-{next(_ids)}"


def record(
    name: str,
    id: object = "",
    *,
    batch: object = "",
    tokens_in: int = NOT_GIVEN,
    tokens_out: int = NOT_GIVEN,
    of: tuple[str, str] | None = None,
    time_ns: int = 0,
) -> None:
    """Record an event that was seen in a library, if the role of this process is known.

    of: role and name of another process, or of a function, that the event is of. time_ns: time of
    CLOCK_MONOTONIC; 0 for the present time.
    """
    if current_role():
        _write(CODES[name], id, batch, tokens_in, tokens_out, of, time_ns)


@guard("recording an event", passes=())  # An invalid variable must not reach a followed library.
def _write(
    code: int,
    sample: object,
    batch: object,
    tokens_in: int,
    tokens_out: int,
    of: tuple[str, str] | None = None,
    time_ns: int = 0,
) -> None:
    file = _process.file
    if file is None:
        file = _open_file()
        if file is None:
            return
    other = _process.others.get(of, 0) if of else 0
    if of and not other:
        with _process.lock:
            other = _process.others[of] = file.number_of_other(*of)
    file.write(code, sample, batch, tokens_in, tokens_out, other, time_ns)


def _open_file() -> EventFile | None:
    """Create this process's file at its first event. Return None if nothing is recorded."""
    with _process.lock:
        if _process.file is None and not _process.is_off:
            # If this attempt fails, no other is made.
            _process.is_off = True
            if configuration.is_recording_switched_on(os.environ) is False:
                return None
            run_id = _process.run_id or run_id_from_environment(
                os.environ, launcher.detect_place(os.environ, None)
            )
            if not run_id:
                logger.warning(
                    "torchlens_perf: events are not recorded: set TORCHLENS_PERF_RUN_ID to the same"
                    " value in all processes of the job"
                )
                return None
            _process.file = _create_file(run_id)
        return _process.file


def _create_file(run_id: str) -> EventFile:
    pid = os.getpid()
    if not _process.is_set and _process.role == "other":
        detect_role(find_role(read_command_line(pid)), "")
    name = f"{_process.role}-{pid}-{process_start_ticks(pid) or 0}{SUFFIX}"
    made = directory.call_in_local_folder(run_id, lambda folder: EventFile(folder / name))
    made.describe_process(_process.role, _process.name, detected=_process.is_detected)
    if _process.role != "trainer":
        # A trainer's watch starts the sidecar.
        node_reader.ensure_running(run_id, made.path.parent)
    # This also runs at the end of processes that multiprocessing has forked.
    Finalize(None, _remove_file, (made.path,), exitpriority=50)
    for folder, _ in directory.find_local_run_folders():
        if folder != made.path.parent and folder.name.endswith(f".{namespace_digest()}"):
            _remove_dead_files(folder)
    return made


@guard("removing the file of events")
def _remove_file(path: Path) -> None:
    """Remove this process's file at its end, if no process reads it."""
    if not node_reader.is_read(path.parent):
        path.unlink(missing_ok=True)
        directory.remove_if_empty(path.parent)


def _remove_dead_files(folder: Path) -> None:
    """Remove what killed processes of another run have left, if no process reads it."""
    if not node_reader.is_read(folder):
        for path in [*folder.glob(f"*{SUFFIX}"), *folder.glob(LOCK)]:
            if not directory.is_writer_running(path):
                path.unlink(missing_ok=True)
                directory.remove_if_empty(folder)


def _start_again_in_child() -> None:
    """Give a forked child a file of its own."""
    global _process
    kept, _process = _process, _Process()
    _process.role, _process.name = kept.role, kept.name
    _process.is_set, _process.is_detected = kept.is_set, kept.is_detected


os.register_at_fork(after_in_child=_start_again_in_child)
