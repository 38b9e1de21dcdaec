"""Read the rings of one node, write its run directory, judge its ranks and export results.

The first rank of a node starts the sidecar in watching.py, or a user starts it with `torchlens-perf
sidecar RUN_DIR`. No rank waits for the sidecar. The sidecar may be killed and started again at any
time. A new sidecar continues from the saved state and the last written segment. Records after that
segment are still in the rings.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from torchlens_perf.analysis.statistics.restarts import GenerationNumbers
from torchlens_perf.diagnosis.job_status import JobStatus, measure_job
from torchlens_perf.errors import RunStoreError, guard, printable
from torchlens_perf.exporters import UNDELIVERED, ExportBatch, Exporter, NodeRole, Receiver
from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.run.directory import RunDirectory, describe_kept_records
from torchlens_perf.run.mailbox import EVENTS, deliver_text
from torchlens_perf.run.place.joined import join_run_directories
from torchlens_perf.run.rank_facts import RankFacts, decode_path
from torchlens_perf.run.sidecar_status import CANNOT_WRITE
from torchlens_perf.sidecar.captures import CaptureRelay, LiveRank
from torchlens_perf.sidecar.commit import CommitReader
from torchlens_perf.sidecar.contained_errors import ContainedErrors
from torchlens_perf.sidecar.job_monitor import SIGNALS, JobMonitor
from torchlens_perf.sidecar.record_account import RecordProcessor
from torchlens_perf.sidecar.rings.sources import RingSources
from torchlens_perf.sidecar.rings.waiting import WaitingRing
from torchlens_perf.sidecar.telemetry.log import TelemetryLog
from torchlens_perf.verdicts import node_state

_LAST_WINDOWS_S = 5.0
# The report waits this long for the last steps of other ranks, which end milliseconds after rank 0.
_OTHER_RANKS_TIMEOUT_S = 0.3
_JOB_PERIOD_S, _MIN_IDLE_RATIO = 60.0, 100.0


class Sidecar:
    """The parts of a sidecar's round, for one node of one run. Not thread-safe."""

    def __init__(
        self,
        run: RunDirectory,
        host: str,
        exporter: Exporter | None,
        report: Callable[[RunDirectory, RankFacts], None],
        waiting: Mapping[str, WaitingRing] | None = None,
        clock: Callable[[], float] = time.monotonic,
        open_exporter: Callable[[], Exporter | None] | None = None,
    ) -> None:
        """report: writes the run's report.txt.

        `report` is called with the run and with rank 0's settings for its terminal.

        waiting: rings that were watched before this sidecar began to read, by path.

        clock: CLOCK_MONOTONIC in seconds, by which the sidecar waits and measures its work.

        open_exporter: opens the exporter, instead of `exporter`, when there is data to send.
        Importing an SDK may take longer than a short run.
        """
        self.run = run
        self.clock = clock
        self.state = state = node_state.load_or_new(run, host)
        generations = GenerationNumbers()
        for process in state.processes.values():
            generations.generation_of(process.identity)
        self._errors = ContainedErrors(state)
        self.contain_errors = self._errors.contain
        self.telemetry = TelemetryLog(run, host, state.telemetry)
        self.monitor = JobMonitor(run, state, generations, self.telemetry, self._errors, clock)
        self.sources = RingSources(
            run, host, state, generations, self.monitor.begin_generation, waiting or {}, clock
        )
        self.records = RecordProcessor(
            run, state, self.sources, self.monitor, self._errors, self._has_receivers
        )
        self._captures = CaptureRelay(run)
        self.exporter, self._open_exporter = exporter, open_exporter
        self._part: NodeRole | None = None
        self.events: Any = None
        self.receivers: list[Receiver] = [exporter] if exporter is not None else []
        """The exporter and /metrics, if there are any. The exporter is first, because /metrics links
        to the spans that it sends."""
        self._write_report = report
        self._commit: CommitReader | None = None
        self._encoded = node_state.EncodedStatistics()
        self._saved_hang = state.hang
        self._reported: set[str] = set()
        self._joined = run.run_id
        self._job = JobStatus({}, {}, None)
        self._job_due_s, self._job_was_live = clock() + _JOB_PERIOD_S, True

    # -- one round

    def read_rings(self) -> float:
        """Look at all rings, and copy records out of those that are filling or have ended. Sample
        waits for disks, and stacks if they are due.

        Return the highest share of a ring that is new since the last call.
        """
        fullest = self.sources.poll_rings()
        self.monitor.assign_attempts(self.sources)
        with self.contain_errors(SIGNALS):
            self.monitor.metrics.sample_disk_waits(self.sources, self.clock())
            self.monitor.job.stacks.sample_if_due(self.sources.newest_rings(), self.clock())
            self._add_notes(self.monitor.job.stacks.notes)
        return fullest

    def count_records(self) -> None:
        """Add new records to statistics, the export queue and the next segment."""
        self.records.count_records()

    def judge_ranks(self, now_s: float, *, final: bool = False) -> None:
        """Judge the ranks, exchange data with other nodes, and search for hangs."""
        self.monitor.judge_job(self.sources, now_s, final=final)

    def join_run_directories(self) -> None:
        """Move this run into node 0's run directory, if node 0 has another run id."""
        self.monitor.assign_attempts(self.sources)
        run_id = self.monitor.cluster.membership.run_id
        if run_id != self._joined:
            self.save_state()
            moved = join_run_directories(self.run.path, run_id)
            logger.info("this run is %s on node 0%s", run_id, ": moved there" if moved else "")
            self._joined = run_id

    def sample_telemetry(self) -> None:
        """Sample live processes, their GPUs and the node's network ports when a sample is due."""
        sources = self.sources.unfinished_rings()
        live = [source.state for source in sources]
        if not live or not self.sources.settings.telemetry:
            return
        with self.contain_errors("reading the hardware's telemetry"):
            uuids = dict.fromkeys(gpu["uuid"] for state in live for gpu in state.facts.gpus)
            pids = {
                each.state.identity.rank: each.state.identity.pid
                for each in sources
                if not each.state.facts.simulated
            }
            found = self.telemetry.sample_due_sources(uuids, pids)
            if found is not None:
                for each in self._open_receivers():
                    each.record_hardware(live[0].identity, found)
        self._add_notes(self.telemetry.notes)

    def read_commit(self) -> None:
        """Start to read the git commit of the training program, or take the result."""
        folder = next((source.folder for source in self.sources if source.folder), "")
        if self._commit is not None:
            self.state.commit = self.state.commit or self._commit.commit
        elif folder:
            self._commit = CommitReader(folder)
            self._commit.start()

    def relay_captures(self, now_s: float, *, final: bool = False) -> None:
        """Forward capture requests to this node's ranks, and request a capture after a verdict.

        final: the run has ended.
        """
        with self.contain_errors("capturing"):
            ranks, on_verdict = {}, False
            for source in self.sources.newest_rings():
                identity, setting = source.state.identity, source.state.facts.settings.capture
                if not source.read_to_end:
                    ranks[identity.rank] = LiveRank(
                        source.path,
                        identity.pid,
                        identity.attempt,
                        source.progress.step,
                        refuses=setting == "off",
                    )
                    on_verdict |= setting == "verdict"
            if on_verdict and self.monitor.cluster.judges_alone:
                places = self.monitor.job.places
                self._captures.request_after_verdict(self.state.findings, places, ranks)
            self._captures.advance_captures(ranks, now_s)
            self._add_notes(self._captures.notes)
            if final:
                self._captures.close()

    def read_events(self) -> None:
        """Read the events of this node's processes, if a process of the job has a role."""
        if self.run.find_local_mailboxes(EVENTS):
            with self.contain_errors("reading events"):
                # Jobs without roles do not need this module.
                from torchlens_perf.roles.drain import read_events

                self.events = read_events(
                    self.run,
                    self.state.host,
                    self.events,
                    self.receivers if self.has_exporter else None,
                    disk_bytes=self.sources.settings.disk_bytes,
                    ended=not self.sources.unfinished_rings(),
                    ended_rings=sum(source.read_to_end for source in self.sources),
                )

    def export_results(self, *, final: bool = False) -> None:
        """Pass counted records and findings to the exporter, if there is one.

        final: no more data will come from any node.
        """
        monitor, live = self.monitor, bool(self.sources.unfinished_rings())
        if monitor.cluster.awaits_node_0(monitor.job) and live:
            return  # Trace ids depend on the attempt, which node 0 has not reported yet.
        if not self._has_receivers():
            monitor.alerts.take_assessment()
            return
        now_s = self.clock()
        part = monitor.update_export_part(self.sources, now_s)
        if part is None:
            return  # The metrics to send depend on `part`.
        self._part = part
        if self.exporter is not None:
            monitor.cluster.send_tally(self.exporter.update_role(part), monitor.job)
        while self.records.unexported:
            batch = self.records.unexported.pop(0)
            identity = self.state.processes[batch.identity.key].identity
            self._export(dataclasses.replace(batch, identity=identity))
        for traced in monitor.take_traces(self.sources, now_s, final=final):
            self._export(traced)
        assessment = monitor.alerts.take_assessment()
        # Export alerts after the steps, because alerts link to the steps' traces.
        if assessment is not None:
            if assessment.whole_job:
                self._update_job_status(now_s, live=live)
            complete = dataclasses.replace(
                assessment,
                ended=not live,
                goodput_s=self._job.goodput_s,
                critical_path_s=self._job.critical_path_s,
                crash=None if live else self._job.crash,
            )
            for each in self._open_receivers():
                each.on_assessment(complete)

    def _export(self, batch: ExportBatch) -> None:
        for each in self._open_receivers():
            each.export(batch)

    @property
    def has_exporter(self) -> bool:
        """True if there is an exporter, or if one will be opened for the first data."""
        return self.exporter is not None or self._open_exporter is not None

    def _has_receivers(self) -> bool:
        return self.has_exporter or bool(self.receivers)

    def _open_receivers(self) -> list[Receiver]:
        """Return the receivers for new data. Open the exporter if that is still to be done."""
        if self._open_exporter is not None:
            opening, self._open_exporter = self._open_exporter, None
            self.exporter = opening()
            if self.exporter is not None:
                self.receivers.insert(0, self.exporter)
                if self._part is not None:
                    self.exporter.update_role(self._part)
        return self.receivers

    def _update_job_status(self, now_s: float, *, live: bool) -> None:
        """Measure the job's status, if it is due or this node's ranks have just ended."""
        if now_s < self._job_due_s and live == self._job_was_live:
            return
        with self.contain_errors("computing the classes of time"):
            self._job_was_live = live
            self._job = measure_job(self.state, self.monitor.job.detector)
        cost_s = time.monotonic() - now_s
        self._job_due_s = now_s + max(_JOB_PERIOD_S, _MIN_IDLE_RATIO * cost_s)

    def save_records(self) -> None:
        """Write the state and a segment. Remove rings of processes whose records are all saved.

        The state is written first. If this process is killed between the two, the report still has
        all steps that are in segments.
        """
        try:
            self.save_state(durably=True)
        finally:
            self.records.write_segment()
        for source in self.sources:
            if source.settled and os.path.lexists(source.path):
                # A killed process leaves its stack file.
                source.path.with_suffix(".stack").unlink(missing_ok=True)
                self.run.remove_ring(source.path)
        self.telemetry.write_if_due(
            self.sources.settings.disk_bytes, final=not self.sources.unfinished_rings()
        )

    def save_state(self, *, durably: bool = False) -> None:
        """Write the node's state. durably: see NodeState.save(). Raises OSError."""
        self.read_commit()
        state, times = self.state, os.times()
        state.passing_notes = [
            note for note in self.monitor.cluster.notes() if note not in state.notes
        ]
        state.telemetry = self.telemetry.run_totals()
        state.sidecar_cpu_s = times.user + times.system
        state.saved_unix_ns = time.time_ns()
        undelivered = None if self.exporter is None else self.exporter.find_undelivered()
        state.undelivered = state.undelivered if undelivered is None else undelivered
        for source in self.sources:
            source.state.now = source.current_activity(time.monotonic_ns())
        state.save(self.run, durably=durably, encoded=self._encoded)
        self._saved_hang = state.hang

    def has_unsaved_hang(self) -> bool:
        """Return True if a hang has begun, changed or ended since the state was saved."""
        hang, saved = self.state.hang, self._saved_hang
        if hang is None or saved is None:
            return hang is not saved
        return (hang.kind, hang.step, hang.ranks) != (saved.kind, saved.step, saved.ranks)

    # -- the end

    def wait_for_last_exchange(self, sleep: Callable[[float], object] = time.sleep) -> None:
        """Wait for the other nodes' last data, and end the exchange.

        Blocks for a few seconds at most.
        """
        began_s, monitor = self.clock(), self.monitor
        while monitor.cluster.others_still_send and self.clock() - began_s < _LAST_WINDOWS_S:
            sleep(0.1)
            self.judge_ranks(self.clock(), final=True)
            self.export_results()
        self.leave_cluster()
        self._add_notes(monitor.cluster.notes())

    def leave_cluster(self) -> None:
        """Send the remaining data to the other nodes, and tell them that this sidecar ends."""
        self.monitor.cluster.close(self.monitor.job)

    def write_report_if_due(self, write_status: Callable[[str], None]) -> None:
        """Write report.txt once rank 0 has ended. write_status: shows the sidecar's work."""
        for source in self.sources:
            key = source.state.identity.key
            if source.state.identity.rank == 0 and source.read_to_end and key not in self._reported:
                others_run = bool(self.sources.unfinished_rings())
                if others_run and self.clock() - source.ended_monotonic_s < _OTHER_RANKS_TIMEOUT_S:
                    return
                self._reported.add(key)
                if not source.settled:
                    write_status("is counting the last records")
                    self.count_records()
                # Save the records before writing the report: a container that ends with rank 0 may
                # kill this process soon.
                write_status(
                    f"is writing {self.records.unsaved_records} records into the run directory"
                )
                try:
                    self.save_records()
                except OSError as error:
                    write_status(CANNOT_WRITE)
                    deliver_text(
                        decode_path(source.state.facts.report.mailbox),
                        "torchlens_perf: no report:"
                        f" {printable(self.run.describe_write_error(error))}"
                        f"{describe_kept_records(self.run)}\n",
                    )
                    raise
                write_status("is writing the report")
                self.write_report()
                write_status("has written the report")

    def write_report(self) -> None:
        """Write report.txt with rank 0's settings, if rank 0 is on this node."""
        asked = [source.state.facts for source in self.sources if source.state.identity.rank == 0]
        if asked:
            try:
                self.save_state()
                with guard("writing the report", passes=RunStoreError):
                    self._write_report(self.run, asked[-1])
            except (OSError, RunStoreError) as error:
                deliver_text(
                    decode_path(asked[-1].report.mailbox),
                    "torchlens_perf: no report:"
                    f" {printable(self.run.describe_write_error(error))}\n",
                )
                raise

    def set_delivery_notes(self, notes: list[str]) -> None:
        """Set the notes on undelivered data, which replace those of an earlier sidecar."""
        if self.exporter is not None and self.exporter.find_undelivered() is not None:
            kept = [each for each in self.state.notes if not each.startswith(UNDELIVERED)]
            self.state.notes = [*kept, *notes]

    def close(self) -> None:
        """Unmap the rings and release NVML."""
        self.telemetry.close()
        self.sources.close()

    def _add_notes(self, notes: list[str]) -> None:
        self.state.notes += [note for note in notes if note not in self.state.notes]
