"""The sidecar as a process: started by a rank, or by hand on a run whose rings or records are there."""

from __future__ import annotations

import contextlib
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

from torchlens_perf.errors import RingError, RunStoreError, TorchlensPerfError, guard, printable
from torchlens_perf.run import ownership, ring
from torchlens_perf.run.directory import RunDirectory, leave_node, sidecar_lock, sidecar_log, where_kept, writer_lives
from torchlens_perf.run.mailbox import REPORT, deliver
from torchlens_perf.run.place.node import host_of, node_name
from torchlens_perf.run.ring import Reader, State
from torchlens_perf.run.sidecar_lock import SidecarLock
from torchlens_perf.run.sidecar_status import CANNOT_WRITE, LOADS
from torchlens_perf.sidecar import priority, termination
from torchlens_perf.store.file_names import nodes_of
from torchlens_perf.store.without_pandas import hide_pandas

if TYPE_CHECKING:
    from torchlens_perf.sidecar.rings.waiting import WaitingRing

logger = logging.getLogger("torchlens_perf.sidecar")

Advanced: TypeAlias = Callable[[int, int], object]
"""Called as advanced(done, total)."""
_UNHEARD: AbstractContextManager[Advanced] = contextlib.nullcontext(lambda done, total: None)

_MAX_LOG_BYTES = 1 << 20
_AGAIN_S = 1.0  # between two tries to make the run directory
_MAX_FAILURES, _LONGEST_REST_S = 10, 60.0  # of a sidecar that begins anew, ever more rarely: ten minutes in all


def attend(
    run_dir: str, host: str, lock_descriptor: int, rings: Mapping[str, WaitingRing], *, shared: bool = False
) -> int:
    """Reads the node's rings until its ranks have ended. Returns the exit code.

    lock_descriptor: of the lock file, which the rank has locked that started this process. rings: how far they were
    last, by path, see wait.py. shared: the run directory is for its group to read, too.
    """
    _log()
    hide_pandas()
    run, lock = RunDirectory(Path(run_dir), shared=shared), None
    try:
        lock = locked(run, lock_descriptor)
        lock.write_status(f"is making {run.path}")
        if not settle(run, host, lock.write_status):
            run.clear_local()
            lock.remove()
            return 1
        lock.write_status(LOADS)
        with ownership.as_private_as(run.nodes):
            _read(run, host, lock, rings, attends=True)
    except TorchlensPerfError as error:
        print(f"torchlens-perf: {printable(str(error))}", file=sys.stderr)
        return 2
    finally:
        if lock is not None:
            lock.remove()
        leave_node()
    return 0


def by_hand(
    run_dir: Path, name: str | None, replaying: AbstractContextManager[Advanced] = _UNHEARD, *, quiet: bool = False
) -> int:
    """Reads a node's rings if there are any, else replays what is kept. Returns the exit code.

    name: the node's, or its host's; None: this node's. replaying: entered for a replay; it gets to know how far that
    is. quiet: nothing is printed but what went wrong.
    Raises RunStoreError for what is no run directory, or cannot be written, or has a sidecar already.
    """
    _log(logging.WARNING if quiet else logging.INFO)
    termination.install()
    run = RunDirectory(run_dir)
    if not run.nodes.is_dir() and not run.local_rings():  # nobody may have been able to make it
        raise RunStoreError(run.why_unreadable())
    host = _known_node(run, name)
    lock = locked(run)
    priority.lower()
    try:
        run.create()
        keep_log(run, host)
        with ownership.as_private_as(run.nodes):
            if not any(path.exists() for path in run.registered_rings(host)) and nodes_of(run.spans):
                return _replay(run, lock, replaying, quiet=quiet)
            _read(run, host, lock, {})
    finally:
        lock.remove()
        leave_node()
    return 0


def _known_node(run: RunDirectory, name: str | None) -> str:
    """The node's name in file names. Its processes may have run before it was started anew, or in a container."""
    exact = node_name() if name is None else name
    if run.node_rings(exact).exists() or run.local_rings():
        return exact
    host = socket.gethostname() if name is None else name
    known = sorted({path.stem for kind in ("json", "rings") for path in run.nodes.glob(f"*.{kind}")})
    of_host = [node for node in known if host_of(node) == host]
    if len(of_host) > 1:
        raise RunStoreError(f"{host} is several nodes here, name one by --host: {', '.join(of_host)}")
    return of_host[0] if of_host else exact


def _log(level: int = logging.INFO) -> None:
    handler = _Stderr()
    handler.setFormatter(_PrintableLines("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


class _Stderr(logging.Handler):
    """Writes to what sys.stderr is then: while progress is shown, that is what writes above it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            self.handleError(record)


class _PrintableLines(logging.Formatter):
    """A message is one line; what follows it are a traceback's."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(printable, super().formatException(ei).splitlines()))


def locked(run: RunDirectory, lock_descriptor: int | None = None) -> SidecarLock:
    """The node's lock for a sidecar of the run. Raises RunStoreError where another sidecar has it."""
    lock = SidecarLock(sidecar_lock(run.run_id), lock_descriptor)
    if not lock.acquire():
        raise RunStoreError(f"a sidecar for {run.run_id} runs on this node already")
    return lock


def _read(
    run: RunDirectory, host: str, lock: SidecarLock, rings: Mapping[str, WaitingRing], *, attends: bool = False
) -> None:
    # One thread for all of it: the kernel ends the child that builds the tap together with the thread that started it.
    beside_the_job = ThreadPoolExecutor(1, initializer=priority.lower_thread) if attends else None
    if beside_the_job is not None and not run.local_mailboxes(REPORT):
        beside_the_job.submit(__import__, "torchlens_perf.sidecar.node").result()
    from torchlens_perf.exporters.otlp_environment import DeferredExporter, exporter_from_environment, wanted_signals
    from torchlens_perf.sidecar.loop import run_sidecar
    from torchlens_perf.sidecar.metrics_port import MetricsPort
    from torchlens_perf.sidecar.node import Sidecar
    from torchlens_perf.sidecar.tap_for_next_run import TapForNextRun

    tap = TapForNextRun(builds=attends)
    again, failures = True, 0
    while again:
        wanted = bool(wanted_signals(os.environ))
        exporter = DeferredExporter(lambda: exporter_from_environment(run, host)) if wanted else None
        sidecar, port = None, MetricsPort(exporter.spans_sent if exporter is not None else dict)
        try:
            sidecar = Sidecar(run, host, exporter, write_report, rings, tap)
            again = run_sidecar(sidecar, lock, exporter, live_results, port, beside_the_job)
        except Exception:
            failures += 1
            if not attends or failures > _MAX_FAILURES:  # by hand, somebody sees what is wrong
                raise
            rest_s = min(_LONGEST_REST_S, _AGAIN_S * 2**failures)
            logger.exception("the sidecar has failed, and begins anew in %g s", rest_s)
            lock.write_status(f"has failed {failures} times, and begins anew (see its log)")
            if exporter is not None:
                with guard("giving the exporter up"):
                    exporter.shutdown(0)
            if sidecar is not None:
                with guard("leaving the other nodes"):  # else they would go on to send to the exchange of this one
                    sidecar.leave_cluster()
            time.sleep(rest_s)
        finally:
            with guard("ending /metrics"):
                port.finish(lingers=not again)
    with guard("building the native tap on collectives"):
        tap.finish()


def _replay(run: RunDirectory, lock: SidecarLock, replaying: AbstractContextManager[Advanced], *, quiet: bool) -> int:
    from torchlens_perf.config import from_environment
    from torchlens_perf.exporters.delivery.outbox import found, outbox
    from torchlens_perf.exporters.otlp_environment import exporter_from_environment, wanted_signals
    from torchlens_perf.sidecar.replay import delivered, replay

    waits = any(found(outbox(run.path), signal) for signal in wanted_signals(os.environ))
    exporter = exporter_from_environment(run)
    with replaying as advanced:
        if exporter is not None and waits:
            # Else a backend that has taken the other steps would get them twice.
            notes = delivered(run, exporter)
            done = f"sent {'a part of ' if notes else ''}what an endpoint had not taken"
        else:
            replayed = replay(run, exporter, from_environment(os.environ).get("trace_every"), advanced)
            where = "" if exporter is not None else "; no OTLP endpoint is configured, so nothing was sent"
            done, notes = f"replayed {replayed.steps} steps, {replayed.records} records{where}", replayed.notes
    if not quiet:
        print(done)
    for note in notes:
        print(f"  - {printable(note)}")
    lock.remove()
    return 1 if notes else 0


def write_report(run: RunDirectory, asked: dict[str, Any]) -> None:
    """Send the short report to rank 0 if that waits, for its terminal or a notebook's cell, and write report.txt."""
    from torchlens_perf.report.run_report import run_report
    from torchlens_perf.view.terminal import render, render_short

    report = run_report(run)
    mailbox = asked.get("mailbox", "")
    if mailbox:  # first: the disk of the run directory may be slow
        page = str(run.report.with_suffix(".html")) if asked.get("writes_page") else ""  # which is written after this
        look = {"columns": asked.get("columns", 0), "color": asked.get("color", False)}
        short = render_short(report, str(run.path), page=page, **look)
        if asked.get("form") == "cell":
            from torchlens_perf.page.notebook import results

            short = results(report, str(run.path), short)
        deliver(mailbox, short)
    partial = run.report.with_suffix(".partial")
    ownership.write(partial, render(report, str(run.path), columns=0, color=False), like=run.nodes)
    os.replace(partial, run.report)


def live_results(run: RunDirectory) -> str:
    """For those who look at the run while it goes on, see LiveResults. Raises RunStoreError."""
    from torchlens_perf.page.notebook import results_of

    return results_of(run)


def settle(run: RunDirectory, host: str, write_status: Callable[[str], None] = lambda doing: None) -> bool:
    """Make the run directory. Return False once nobody records any more and it cannot be made.

    The rank does not touch the run directory, because its disk may not answer; here nobody waits for that. A disk that
    refuses is asked again for as long as a rank records. A rank that waits for a report meanwhile gets the reason.
    Where the run directory was there and has become read-only, the rings stay; where it never was there, they go.
    The sidecar's thread, with the lock. May block for as long as the disk does.
    """
    said = ""
    while True:
        try:
            run.create()
            _speak_in(keep_log(run, host))
            return True
        except (OSError, RunStoreError) as error:
            if str(error) != said:
                said = str(error)
                logger.error("%s", said)
        write_status(CANNOT_WRITE)
        kept = where_kept(run) if _is_there(run.nodes) else ""
        for mailbox in run.local_mailboxes(REPORT):
            with contextlib.suppress(OSError):
                deliver(str(mailbox), f"torchlens_perf: no report: {printable(said)}{kept}\n")
        if not any(map(_is_written, run.local_rings())):
            for path in [] if kept else run.local_rings():
                run.remove_ring(path)
            return False
        time.sleep(_AGAIN_S)


def _is_there(folder: Path) -> bool:
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # its disk does not tell
    return True


def keep_log(run: RunDirectory, host: str) -> Path:
    """What sidecars have said on this node goes into the run directory. Returns its file. Raises OSError."""
    log, until_now = run.node_log(host), sidecar_log(sidecar_lock(run.run_id))
    with contextlib.suppress(FileNotFoundError):
        said = _end_of(until_now)
        with open(log, "ab", buffering=0, opener=ownership.open_to_append) as file:
            file.write(said)
        until_now.unlink()
    return log


def _end_of(log: Path) -> bytes:
    """The last _MAX_LOG_BYTES of a log. Raises OSError."""
    with open(ownership.open_to_read(log), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_LOG_BYTES))
        return file.read(_MAX_LOG_BYTES)


def _speak_in(log: Path) -> None:
    """What this process says goes there from now on."""
    descriptor = ownership.open_to_append(log)
    try:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(descriptor, stream.fileno())
    finally:
        os.close(descriptor)


def _is_written(path: Path) -> bool:
    """Whether a ring's process lives and has not ended it."""
    if not writer_lives(path):
        return False
    try:
        reader = Reader(path)
    except (OSError, RingError):
        return False
    try:
        return reader.counter(ring.STATE) == State.OPEN
    finally:
        reader.close()
