"""Run the sidecar as a process, for a rank of a live run or for a user on an existing run."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torchlens_perf.errors import RunStoreError, TorchlensPerfError, guard, printable
from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.run import ownership
from torchlens_perf.run.directory import (
    RunDirectory,
    describe_kept_records,
    is_recording,
    remove_empty_user_folders,
    sidecar_lock_path,
    sidecar_log_path,
)
from torchlens_perf.run.file_checks import is_missing
from torchlens_perf.run.mailbox import REPORT, deliver_text
from torchlens_perf.run.place.node import host_of_node, node_name
from torchlens_perf.run.sidecar_lock import SidecarLock
from torchlens_perf.run.sidecar_status import CANNOT_WRITE, LOADS
from torchlens_perf.sidecar import priority, termination
from torchlens_perf.sidecar.rings.waiting import FILLING
from torchlens_perf.store.file_names import list_nodes
from torchlens_perf.store.without_pandas import block_pandas_import

if TYPE_CHECKING:
    from torchlens_perf.sidecar.rings.waiting import WaitingRing
    from torchlens_perf.sidecar.wake import Wake


ProgressCallback: TypeAlias = Callable[[int, int], object]
"""Progress callback, called as advanced(done, total)."""
_NO_PROGRESS: AbstractContextManager[ProgressCallback] = contextlib.nullcontext(
    lambda done, total: None
)

_MAX_LOG_BYTES = 1 << 20
_CREATE_RETRY_S = 1.0
# A failing sidecar restarts with growing delays. Their sum is about six minutes.
_MAX_RESTARTS, _MAX_RESTART_DELAY_S = 10, 60.0


def read_live_run(
    run_dir: str,
    host: str,
    lock_descriptor: int,
    rings: Mapping[str, WaitingRing],
    wake: Wake,
    *,
    shared: bool = False,
) -> int:
    """Read the node's rings until its ranks have ended. Return the exit code.

    lock_descriptor: descriptor of the lock file. The rank has locked the file.
    rings: the rings' last seen positions by path, see wait.py. wake: the sleep between rounds.
    shared: True if the group may read the run directory.
    """
    _configure_logging()
    block_pandas_import()
    run, lock = RunDirectory(Path(run_dir), shared=shared), None
    try:
        lock = acquire_lock(run, lock_descriptor)
        lock.write_status(f"is making {run.path}")
        if not keep_trying_to_create_run_directory(run, host, lock.write_status):
            run.remove_local_leftovers()
            lock.remove()
            return 1
        lock.write_status(LOADS)
        with ownership.restrict_new_files_like(run.nodes):
            _run_sidecar_until_end(run, host, lock, rings, wake)
    except TorchlensPerfError as error:
        print(f"torchlens-perf: {printable(str(error))}", file=sys.stderr)
        return 2
    finally:
        if lock is not None:
            lock.remove()
        remove_empty_user_folders()
    return 0


def read_or_replay(
    run_dir: Path,
    name: str | None,
    replaying: AbstractContextManager[ProgressCallback] = _NO_PROGRESS,
    *,
    quiet: bool = False,
) -> int:
    """Read a node's rings if there are any, otherwise replay saved records. Return the exit code.

    name: name of the node or of its host, by default this node's. replaying: context of a replay,
    which provides its progress callback. quiet: print only errors. Raises RunStoreError if the
    folder is not a run directory, cannot be written, or already has a sidecar.
    """
    _configure_logging(logging.WARNING if quiet else logging.INFO)
    termination.install_handler()
    run = RunDirectory(run_dir)
    # Rings exist without a run directory if creating the directory has failed.
    if not run.nodes.is_dir() and not run.local_rings():
        raise RunStoreError(run.why_unreadable())
    host = _find_node_name(run, name)
    lock = acquire_lock(run)
    priority.lower_priority()
    try:
        run.create()
        move_log(run, host)
        with ownership.restrict_new_files_like(run.nodes):
            if not any(path.exists() for path in run.registered_rings(host)) and list_nodes(
                run.spans
            ):
                return _replay_records(run, lock, replaying, quiet=quiet)
            _run_sidecar_until_end(run, host, lock, {})
    finally:
        lock.remove()
        remove_empty_user_folders()
    return 0


def _find_node_name(run: RunDirectory, name: str | None) -> str:
    """Return the node's name in file names.

    This name may differ from the current node's name: the node may have restarted, or its processes
    may have run in a container. Raises RunStoreError if several nodes match.
    """
    exact = node_name() if name is None else name
    if run.node_rings_path(exact).exists() or run.local_rings():
        return exact
    host = socket.gethostname() if name is None else name
    known = sorted(
        {path.stem for kind in ("json", "rings") for path in run.nodes.glob(f"*.{kind}")}
    )
    of_host = [node for node in known if host_of_node(node) == host]
    if len(of_host) > 1:
        raise RunStoreError(
            f"{host} has several nodes in this run. Choose one with --host: {', '.join(of_host)}"
        )
    return of_host[0] if of_host else exact


def _configure_logging(level: int = logging.INFO) -> None:
    handler = _CurrentStderrHandler()
    handler.setFormatter(_PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


class _CurrentStderrHandler(logging.Handler):
    """Handler that writes to the current sys.stderr, which a progress display may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            self.handleError(record)


class _PrintableFormatter(logging.Formatter):
    """Formatter that prints a message as one line, followed by the lines of its traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(printable, super().formatException(ei).splitlines()))


def acquire_lock(run: RunDirectory, lock_descriptor: int | None = None) -> SidecarLock:
    """Acquire the node's lock for a sidecar of the run. Raises RunStoreError if it is taken."""
    lock = SidecarLock(sidecar_lock_path(run.run_id), lock_descriptor)
    if not lock.acquire():
        raise RunStoreError(f"a sidecar for {run.run_id} runs on this node already")
    return lock


def _run_sidecar_until_end(
    run: RunDirectory,
    host: str,
    lock: SidecarLock,
    rings: Mapping[str, WaitingRing],
    wake: Wake | None = None,
) -> None:
    # A user who starts a sidecar waits for its results, so it works at normal priority.
    is_live = wake is not None
    # A single low-priority thread does all work.
    background = (
        ThreadPoolExecutor(1, initializer=priority.lower_thread_priority) if is_live else None
    )
    if background is not None and not (
        run.find_local_mailboxes(REPORT)
        or any(each.fill_level >= FILLING for each in rings.values())
    ):
        background.submit(__import__, "torchlens_perf.sidecar.node").result()
    from torchlens_perf.exporters.otlp_environment import (
        create_exporter_from_environment,
        read_enabled_signals,
    )
    from torchlens_perf.page.run_results import render_live_results, write_report
    from torchlens_perf.sidecar.loop import run_sidecar
    from torchlens_perf.sidecar.metrics_port import MetricsPort
    from torchlens_perf.sidecar.node import Sidecar

    again, failures = True, 0
    open_exporter = (
        functools.partial(create_exporter_from_environment, run, host)
        if read_enabled_signals(os.environ)
        else None
    )
    while again:
        sidecar, port = None, MetricsPort()
        try:
            sidecar = Sidecar(run, host, None, write_report, rings, open_exporter=open_exporter)
            again = run_sidecar(sidecar, lock, render_live_results, port, background, wake)
        except Exception:
            failures += 1
            # If a user has started the sidecar, show the error.
            if not is_live or failures > _MAX_RESTARTS:
                raise
            rest_s = min(_MAX_RESTART_DELAY_S, 2.0**failures)
            logger.exception("the sidecar has failed and restarts in %g s", rest_s)
            lock.write_status(f"has failed {failures} times and restarts (see its log)")
            if sidecar is not None:
                with guard("giving the exporter up"):
                    if sidecar.exporter is not None:
                        sidecar.exporter.shutdown(0)
                # Otherwise other nodes would continue to send reports to the failed sidecar.
                with guard("leaving the other nodes"):
                    sidecar.leave_cluster()
            time.sleep(rest_s)
        finally:
            with guard("ending /metrics"):
                port.close(lingers=not again)


def _replay_records(
    run: RunDirectory,
    lock: SidecarLock,
    replaying: AbstractContextManager[ProgressCallback],
    *,
    quiet: bool,
) -> int:
    from torchlens_perf.config import from_environment
    from torchlens_perf.exporters.otlp_environment import (
        create_exporter_from_environment,
        read_enabled_signals,
    )
    from torchlens_perf.sidecar.replay import find_undelivered, replay

    # A full replay would repeat data that the backend has already accepted.
    waiting = find_undelivered(run).signals
    enabled = frozenset(read_enabled_signals(os.environ))
    signals = enabled & waiting if waiting else enabled
    exporter = create_exporter_from_environment(run, only=signals)
    with replaying as advanced:
        trace_every = from_environment(os.environ).get("trace_every")
        replayed = replay(run, exporter, trace_every, advanced, signals)
    where = "; sent only what an endpoint had not accepted" if waiting else ""
    if exporter is None:
        why = (
            f"none of the undelivered signals ({', '.join(sorted(waiting))}) is enabled"
            if enabled and not signals
            else "no OTLP endpoint is configured"
        )
        where = f"; {why}, so nothing was sent"
    if not quiet:
        print(f"replayed {replayed.steps} steps, {replayed.records} records{where}")
    for note in replayed.notes:
        print(f"  - {printable(note)}")
    lock.remove()
    return 1 if replayed.notes else 0


def keep_trying_to_create_run_directory(
    run: RunDirectory, host: str, write_status: Callable[[str], None] = lambda doing: None
) -> bool:
    """Create the run directory. Return False if that fails for as long as a rank records.

    Ranks must not wait for a slow disk, so the sidecar creates the directory. After an error, it
    tries again while a rank records. Ranks that wait for a report get the error. If the directory
    exists but has become read-only, the rings are kept. If the directory has never existed, the
    rings are removed. The caller must own the lock. May block for as long as the disk does not
    respond.
    """
    last_error = ""
    while True:
        try:
            run.create()
            _redirect_output(move_log(run, host))
            return True
        except (OSError, RunStoreError) as error:
            if str(error) != last_error:
                last_error = str(error)
                logger.error("%s", last_error)
        write_status(CANNOT_WRITE)
        # If the disk fails, the folder may exist: keep the rings.
        kept = "" if is_missing(run.nodes) else describe_kept_records(run)
        for mailbox in run.find_local_mailboxes(REPORT):
            with contextlib.suppress(OSError):
                deliver_text(
                    str(mailbox), f"torchlens_perf: no report: {printable(last_error)}{kept}\n"
                )
        if not any(map(is_recording, run.local_rings())):
            for path in [] if kept else run.local_rings():
                run.remove_ring(path)
            return False
        time.sleep(_CREATE_RETRY_S)


def move_log(run: RunDirectory, host: str) -> Path:
    """Move the end of the log of this node's sidecars into the run directory. Return its new path."""
    log, local_log = run.node_log_path(host), sidecar_log_path(sidecar_lock_path(run.run_id))
    with contextlib.suppress(FileNotFoundError):
        with open(ownership.open_to_read(local_log), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_LOG_BYTES))
            text = file.read(_MAX_LOG_BYTES)
        with open(log, "ab", buffering=0, opener=ownership.open_to_append) as file:
            file.write(text)
        local_log.unlink()
    return log


def _redirect_output(log: Path) -> None:
    """Append stdout and stderr of this process to a log from now on."""
    descriptor = ownership.open_to_append(log)
    try:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(descriptor, stream.fileno())
    finally:
        os.close(descriptor)
