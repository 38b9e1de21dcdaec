"""The sidecar's life: rounds until the node's processes have ended, then the last report. node.py has the rounds."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchlens_perf.errors import RunStoreError
from torchlens_perf.run import ring
from torchlens_perf.run.mailbox import REPORT, STEPS
from torchlens_perf.sidecar import termination
from torchlens_perf.sidecar.live_results import LiveResults
from torchlens_perf.sidecar.metrics_port import MetricsPort
from torchlens_perf.sidecar.page_file import write_page
from torchlens_perf.sidecar.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from torchlens_perf.exporters import Exporter
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.run.sidecar_lock import SidecarLock
    from torchlens_perf.sidecar.node import Sidecar
    from torchlens_perf.sidecar.rings.sources import RingSources

logger = logging.getLogger("torchlens_perf.sidecar")

_SHUTDOWN_TIMEOUT_S = 30.0
_LOOK_S = 0.05  # between two looks whether a rank has ended, which may wait for the report


def run_sidecar(
    sidecar: Sidecar,
    lock: SidecarLock,
    exporter: Exporter | None,
    results: Callable[[RunDirectory], str] | None = None,
    port: MetricsPort | None = None,
    beside_the_job: Executor | None = None,
) -> bool:
    """Works until the node's processes have ended. The caller holds the lock, and has it back or gone afterwards.

    results: see LiveResults. port: of /metrics; the caller ends it. beside_the_job: does in a thread of low priority
    what no rank waits for; None: the calling thread does everything. Returns whether to begin anew: with the lock, for
    a ring that came in the last instant.
    """
    rounds = _Rounds(sidecar, lock, results, port)
    apart = _at_once if beside_the_job is None else lambda work: beside_the_job.submit(work).result()
    # A rank may wait for its report once it has ended: that round is this thread's, which has the job's priority.
    ended = bool(sidecar.run.local_mailboxes(REPORT))  # before the first round, in a short run
    while (ended or apart(rounds.until_a_rank_ends)) and rounds.one():
        ended = False
    if rounds.replaced:
        sidecar.close()
        return False
    apart(lambda: _finish(sidecar, lock, exporter, rounds.port))
    sidecar.close()
    return _give_back(sidecar, lock)


def _at_once(work: Callable[[], bool | None]) -> bool | None:
    return work()


def _finish(sidecar: Sidecar, lock: SidecarLock, exporter: Exporter | None, port: MetricsPort) -> None:
    """Send, save and write what there is after the last round."""
    contain_errors = sidecar.contain_errors
    with contain_errors("exchanging windows with other nodes"):
        sidecar.end_exchange()
    if exporter is not None:
        with contain_errors("exporting"):
            sidecar.export(final=True)
        with contain_errors("exporting"):
            sidecar.state.notes += exporter.shutdown(_SHUTDOWN_TIMEOUT_S)
    port.show_last(sidecar)
    with contain_errors("joining node 0's run"):
        sidecar.join_run()
    with contain_errors("writing the run directory"), _logged("the run directory cannot be written"):
        sidecar.save(durably=True)
    with contain_errors("writing the report"), _logged("the last report could not be written"):
        sidecar.write_report()
    lock.write_status("is writing the page")
    with contain_errors("writing the page"), _logged("the page could not be written"):
        write_page(sidecar)


class _Rounds:
    """Rounds until the node's processes have ended. One thread at a time."""

    def __init__(
        self,
        sidecar: Sidecar,
        lock: SidecarLock,
        results: Callable[[RunDirectory], str] | None,
        port: MetricsPort | None,
    ) -> None:
        """See run_sidecar()."""
        self.port = MetricsPort() if port is None else port
        self.replaced = False
        """Another sidecar has begun."""
        self._sidecar = sidecar
        self._lock = lock
        self._live = LiveResults(sidecar, results)
        self._started_s = time.monotonic()
        self._schedule = Schedule(self._started_s)
        self._account_took_s = self._save_took_s = 0.0
        lock.write_status("is reading what the ranks record")

    def until_a_rank_ends(self) -> bool:
        """Make rounds. Return whether a rank has ended; else there are no more rounds."""
        while self.one():
            if _rest(self._sidecar.sources, self._schedule.poll_s, self._live):
                return True
        return False

    def one(self) -> bool:
        """Make one round. Return whether there is another one."""
        sidecar, schedule, live = self._sidecar, self._schedule, self._live
        contain_errors = sidecar.contain_errors
        if not self._lock.restore():
            logger.error("another sidecar has begun after somebody removed the lock of this one, which ends")
            self.replaced = True
            return False
        ends, asked = termination.is_asked(), live.asked()
        if ends:
            schedule.hurry()
        with contain_errors("reading the rings"):
            schedule.polled(sidecar.poll())
        with contain_errors("opening the port for /metrics"):
            self.port.update(sidecar)
        now_s = time.monotonic()
        more = sidecar.sources.has_more_to_come(now_s - self._started_s, ends=ends)
        if not more or asked or schedule.account_due(now_s, self._account_took_s, watched=live.is_watched):
            with contain_errors("counting the records"):
                sidecar.account()
            self._account_took_s = time.monotonic() - now_s
        if not more or schedule.judge_due(now_s, sidecar.monitor.cluster.update_every_s):
            sidecar.judge(now_s, final=not more)
        with _logged("this run could not join that of node 0"):
            sidecar.join_run()
        sidecar.measure()
        sidecar.build_tap(now_s - self._started_s)
        sidecar.relay_captures(now_s, final=not more)
        with contain_errors("writing the report"), _logged("the report could not be written"):
            sidecar.report_if_asked(
                self._lock.write_status
            )  # before the export, which may take longer: rank 0 waits for it
        with contain_errors("exporting"):
            sidecar.export()
        with contain_errors("writing the run directory"), _logged("the run directory cannot be written"):
            unkept = sidecar.records.unkept_records, sidecar.sources.max_unkept_share()
            if not more or STEPS in asked or schedule.keep_due(now_s, *unkept, failing=sidecar.records.disk_failed):
                sidecar.keep()
            elif schedule.save_due(now_s, self._save_took_s, news=sidecar.has_unsaved_hang()):
                began_s = time.monotonic()
                sidecar.save()
                self._save_took_s = time.monotonic() - began_s
        with contain_errors("showing the live run"), _logged("the live run could not be shown"):
            live.update(now_s)
        return more


def _rest(sources: RingSources, rest_s: float, looks: LiveResults) -> bool:
    """Sleep for so long, or until a rank ends or asks for something, or SIGTERM comes. Return whether a rank ended."""
    until_s = time.monotonic() + rest_s
    live, ends = sources.live(), termination.is_asked()
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(_LOOK_S, left_s))
        if any(source.reader.counter(ring.STATE) == ring.State.CLOSED for source in live):
            return True
        if termination.is_asked() != ends or looks.asked():
            return False
    return False


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """A full disk, or another node's file that cannot be read just now, must not leave the ranks unobserved."""
    try:
        yield
    except (OSError, RunStoreError) as error:
        logger.error("%s: %s", what, error)


def _give_back(sidecar: Sidecar, lock: SidecarLock) -> bool:
    """Gives the lock back, and looks once more whether a ring has come.

    A process registers its ring and then looks at the lock. Either it finds the lock free, and starts a sidecar of its
    own, or its ring was there before this look.
    """
    sidecar.run.clear_local()
    lock.remove()
    return sidecar.sources.has_unread_rings() and lock.acquire()
