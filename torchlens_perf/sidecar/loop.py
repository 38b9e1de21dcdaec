"""Run the sidecar in rounds until the node's processes have ended, then write the last report.

The Sidecar class in node.py implements the parts of a round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchlens_perf.errors import RunStoreError
from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.run import ring
from torchlens_perf.run.mailbox import REPORT, STEPS
from torchlens_perf.sidecar import termination
from torchlens_perf.sidecar.cluster import ROUND_S
from torchlens_perf.sidecar.live_results import LiveResultDelivery
from torchlens_perf.sidecar.metrics_port import MetricsPort
from torchlens_perf.sidecar.page_file import write_page_if_wanted
from torchlens_perf.sidecar.schedule import FILLING, URGENT, Schedule
from torchlens_perf.sidecar.wake import Wake

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.run.sidecar_lock import SidecarLock
    from torchlens_perf.sidecar.node import Sidecar


_SHUTDOWN_TIMEOUT_S = 30.0
# If the kernel does not report new files, or a rank waits for its report, the sidecar checks often
# for ended ranks.
_POLL_INTERVAL_S = 0.05
# Interval of judging while this node exchanges no data with other nodes.
_ALONE_ROUND_S = 2.0
# A ring may begin to fill fast at any time.
_RARE_POLL_INTERVAL_S = 0.5


def run_sidecar(
    sidecar: Sidecar,
    lock: SidecarLock,
    results: Callable[[RunDirectory], str] | None = None,
    port: MetricsPort | None = None,
    background: Executor | None = None,
    wake: Wake | None = None,
) -> bool:
    """Run rounds until the node's processes have ended.

    Return True if a new ring has appeared, and the caller should run another sidecar.

    The caller must own the lock. If the result is True, the caller still owns the lock. Otherwise
    the lock is released.

    results: see LiveResultDelivery.
    port: the port for /metrics. The caller closes it.
    background: a thread of low priority for all work that no rank waits for. Without `background`,
    the calling thread does all work.
    wake: the sleep between rounds, which new files in watched folders end. The rounds use the
    sidecar's clock.
    """
    rounds = _RoundRunner(sidecar, lock, results, port, wake or Wake())

    def run_in_background(work: Callable[[], bool | None]) -> bool | None:
        return work() if background is None else background.submit(work).result()

    # When a rank has ended, it may wait for its report, and a ring that is nearly full must be read
    # soon. The calling thread runs the next round, because this thread has the job's priority. In a
    # short run, a rank may end before the first round.
    is_urgent = bool(sidecar.run.find_local_mailboxes(REPORT))
    while (is_urgent or run_in_background(rounds.run_until_urgent)) and rounds.run_round():
        is_urgent = False
    if rounds.replaced:
        sidecar.close()
        return False
    run_in_background(lambda: _finish_run(sidecar, lock, rounds))
    sidecar.close()
    # A process registers its ring before it checks the lock. If the lock is free, it starts a new
    # sidecar. Otherwise the ring was registered before the release, and is found here.
    sidecar.run.remove_local_leftovers()
    lock.remove()
    return sidecar.sources.has_unread_rings() and lock.acquire()


def _finish_run(sidecar: Sidecar, lock: SidecarLock, rounds: _RoundRunner) -> None:
    """Export and save the remaining data, then write the report and the page."""
    contain_errors = sidecar.contain_errors
    with contain_errors("exchanging windows with other nodes"):
        sidecar.wait_for_last_exchange(rounds.wake.sleep)
    if sidecar.has_exporter:
        with contain_errors("exporting"):
            sidecar.export_results(final=True)
    if sidecar.exporter is not None:
        with contain_errors("exporting"):
            sidecar.set_delivery_notes(sidecar.exporter.shutdown(_SHUTDOWN_TIMEOUT_S))
    rounds.port.show_final_values(sidecar)
    with contain_errors("joining node 0's run"):
        sidecar.join_run_directories()
    with (
        contain_errors("writing the run directory"),
        _log_disk_errors("the run directory cannot be written"),
    ):
        sidecar.save_state(durably=True)
    with (
        contain_errors("writing the report"),
        _log_disk_errors("the last report could not be written"),
    ):
        sidecar.write_report()
    lock.write_status("is writing the page")
    with contain_errors("writing the page"), _log_disk_errors("the page could not be written"):
        write_page_if_wanted(sidecar)


class _RoundRunner:
    """The rounds of a sidecar. Only one thread at a time may call its methods."""

    def __init__(
        self,
        sidecar: Sidecar,
        lock: SidecarLock,
        results: Callable[[RunDirectory], str] | None,
        port: MetricsPort | None,
        wake: Wake,
    ) -> None:
        """The parameters are the same as in run_sidecar()."""
        self.wake = wake
        self._clock = sidecar.clock
        self._report_is_wanted = False
        self.port = MetricsPort() if port is None else port
        self.replaced = False
        """True if another sidecar has started for this node."""
        self._sidecar = sidecar
        sidecar.records.own_stops = self.wake.observer
        self._lock = lock
        self._live = LiveResultDelivery(sidecar, results)
        self._schedule = Schedule(self._clock())
        self._account_took_s = self._judging_took_s = self._save_took_s = 0.0
        lock.write_status("is reading what the ranks record")

    def run_until_urgent(self) -> bool:
        """Run rounds until a rank ends or a ring is nearly full. Return False after the last round."""
        while self.run_round():
            if self._sleep_until_event(self._schedule.poll_s):
                return True
        return False

    def _sleep_until_event(self, duration_s: float) -> bool:
        """Sleep until the duration is over, a rank ends or makes a request, or SIGTERM arrives.

        Return True if a rank has ended, or a ring is nearly full.
        """
        until_s = self._clock() + duration_s
        live, ends = self._sidecar.sources.unfinished_rings(), termination.is_requested()
        most_share, due_s = 0.0 if self._schedule.is_idle else FILLING, float("inf")
        for folder in {str(source.path.parent) for source in live}:
            self.wake.watch_folder(folder)
        while (left_s := until_s - self._clock()) > 0:
            checks_often = self._report_is_wanted or not self.wake.reports_files
            longest_s = _POLL_INTERVAL_S if checks_often else _RARE_POLL_INTERVAL_S
            if self.wake.sleep(min(longest_s, left_s, due_s)):
                self._report_is_wanted = bool(self._sidecar.run.find_local_mailboxes(REPORT))
            wakes, due_s = False, float("inf")
            for source in live:
                state, new_share, source_due_s = source.peek(self._clock())
                due_s = min(due_s, source_due_s)
                if state == ring.State.CLOSED or new_share > URGENT:
                    return True
                wakes |= new_share > most_share
            if wakes or termination.is_requested() != ends or self._live.poll_requests():
                return False
        return False

    def run_round(self) -> bool:
        """Run one round. Return False if it was the last round."""
        sidecar, schedule, live = self._sidecar, self._schedule, self._live
        contain_errors = sidecar.contain_errors
        schedule.has_other_nodes = sidecar.monitor.cluster.has_other_nodes
        if not self._lock.restore_file():
            logger.error(
                "the lock of this sidecar was removed and another sidecar has started; this one"
                " ends"
            )
            self.replaced = True
            return False
        ends, asked = termination.is_requested(), live.poll_requests()
        if ends:
            schedule.hurry()
        with contain_errors("reading the rings"):
            schedule.adapt_poll_interval(sidecar.read_rings())
        with contain_errors("opening the port for /metrics"):
            self.port.open_or_update(sidecar)
        now_s, has_counted = self._clock(), False
        more = sidecar.sources.may_get_more_records(ends=ends)
        if (
            not more
            or asked
            or schedule.is_count_due(
                now_s,
                self._account_took_s,
                sidecar.sources.waiting_records(),
                watched=live.is_watched,
            )
        ):
            with contain_errors("counting the records"):
                sidecar.count_records()
            self._account_took_s, has_counted = self._clock() - now_s, True
        if not more or schedule.is_judging_due(
            now_s, ROUND_S if schedule.has_other_nodes else _ALONE_ROUND_S, self._judging_took_s
        ):
            began_s = self._clock()
            sidecar.judge_ranks(now_s, final=not more)
            self._judging_took_s = self._clock() - began_s
        with _log_disk_errors("this run could not join that of node 0"):
            sidecar.join_run_directories()
        sidecar.sample_telemetry()
        sidecar.read_commit()
        sidecar.relay_captures(now_s, final=not more)
        sidecar.read_events()
        # Write the report before the export, because rank 0 waits for the report and an export may
        # be slow.
        with (
            contain_errors("writing the report"),
            _log_disk_errors("the report could not be written"),
        ):
            sidecar.write_report_if_due(self._lock.write_status)
        with contain_errors("exporting"):
            sidecar.export_results()
        with (
            contain_errors("writing the run directory"),
            _log_disk_errors("the run directory cannot be written"),
        ):
            unkept = (
                sidecar.records.unsaved_records,
                max((each.unsaved_share for each in sidecar.sources), default=0.0),
            )
            if (
                not more
                or STEPS in asked
                or schedule.is_segment_due(now_s, *unkept, failing=sidecar.records.disk_failed)
            ):
                if not has_counted:
                    with contain_errors("counting the records"):
                        sidecar.count_records()
                sidecar.save_records()
            elif schedule.is_save_due(now_s, self._save_took_s, news=sidecar.has_unsaved_hang()):
                began_s = self._clock()
                sidecar.save_state()
                self._save_took_s = self._clock() - began_s
        with (
            contain_errors("showing the live run"),
            _log_disk_errors("the live run could not be shown"),
        ):
            live.deliver_due(now_s)
        return more


@contextlib.contextmanager
def _log_disk_errors(what: str) -> Iterator[None]:
    """Log and suppress disk errors. The sidecar then continues to read the rings.

    The disk may be full, or another node's file may be unreadable for a moment.
    """
    try:
        yield
    except (OSError, RunStoreError) as error:
        logger.error("%s: %s", what, error)
