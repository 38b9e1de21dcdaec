"""The per-node process: reads the rings, keeps the run directory, computes, exports. The job never waits for it.

Started by watch.py of the node's first rank, or by hand: `torchlens-perf sidecar RUN_DIR`. It may be killed at any time
and started again: statistics go on from the last saved state, segments from the last one written, and the records in
between are still in the rings.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.analysis import node_state
from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.analysis.statistics.restarts import UNRELATED, Generations
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.errors import RunStoreError, guard, printable
from torchlens_perf.exporters import ExportBatch, Exporter, export_batch
from torchlens_perf.run import ring
from torchlens_perf.run.directory import RunDirectory, where_kept
from torchlens_perf.run.mailbox import deliver
from torchlens_perf.run.place.joined import join_run
from torchlens_perf.run.sidecar_status import CANNOT_WRITE
from torchlens_perf.sidecar.conclusions import Conclusions
from torchlens_perf.sidecar.rings.oom_files import OomFiles
from torchlens_perf.sidecar.rings.source import RingSource
from torchlens_perf.sidecar.rings.sources import RingSources
from torchlens_perf.sidecar.schedule import MAX_UNKEPT_RECORDS
from torchlens_perf.sidecar.tap_for_next_run import TapForNextRun
from torchlens_perf.sidecar.telemetry.log import TelemetryLog, telemetry_bytes
from torchlens_perf.sidecar.tracing import Tracing
from torchlens_perf.store.segments import Chunk, SegmentWriter

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.sidecar.rings.waiting import WaitingRing

logger = logging.getLogger("torchlens_perf.sidecar")

_LAST_WINDOWS_S = 5.0
_LAST_WORD_S = 3.0
_OTHERS_END_S = 0.3  # after rank 0
_TAP = "building the native tap on collectives"


class Sidecar:
    """Reads the rings of one node of one run. One thread; step() does one round and never blocks for long."""

    def __init__(
        self,
        run: RunDirectory,
        host: str,
        exporter: Exporter | None,
        report: Callable[[RunDirectory, dict[str, Any]], None],
        waiting: Mapping[str, WaitingRing] | None = None,
        tap: TapForNextRun | None = None,
    ) -> None:
        """report: writes the run's report.txt; gets what rank 0 asked for (its terminal's width and colour).

        waiting: by path, how far rings were while this process only waited. tap: what the native tap is built by; by
        default nothing is built.
        """
        self.run = run
        self._host = host
        self._exporter = exporter
        self._write_report = report
        self._tap = TapForNextRun(builds=False) if tap is None else tap
        self.state = node_state.load_or_new(run, host)
        self._saved_hang = self.state.hang
        self.telemetry = TelemetryLog(run, host, self.state.telemetry)
        generations = Generations()
        for process in self.state.processes.values():
            generations.of(process.identity)
        self.conclusions = Conclusions(run, host, self.state, generations, self.telemetry)
        self.tracing = Tracing(self.conclusions.job, self.state)
        self.sources = RingSources(run, host, self.state, generations, self.conclusions.begin, waiting or {})
        self._unkept: list[Chunk] = []
        self._unexported: list[ExportBatch] = []
        self._writer: SegmentWriter | None = None
        self.disk_failed = False
        """The last segment could not be written."""
        self._reported: set[str] = set()
        self._ooms = OomFiles(run)
        self._joined = run.run_id

    def also_export_to(self, both: Callable[[Exporter | None], Exporter]) -> None:
        """both: exports to the exporter until now, if there was one, and to another one."""
        self._exporter = both(self._exporter)

    # -- one round

    def poll(self) -> float:
        """Copies new records out of the rings. Returns how full the fullest was, as a share of its capacity."""
        fullest = self.sources.read()
        self.conclusions.number(self.sources)
        self.conclusions.sample(self.sources, time.monotonic())
        return fullest

    def judge(self, now_s: float, *, final: bool = False) -> None:
        """Judges the ranks, exchanges windows with other nodes, and looks for hangs. now_s: CLOCK_MONOTONIC."""
        self.conclusions.update(self.sources, now_s, final=final)

    def join_run(self) -> None:
        """Moves into node 0's run directory, as soon as that is known to be another one. Raises OSError."""
        self.conclusions.number(self.sources)
        run_id = self.conclusions.job.membership.run_id
        if run_id != self._joined:
            self.save()
            moved = join_run(self.run.path, run_id)
            logger.info("this run is %s on node 0%s", run_id, ": moved there" if moved else "")
            self._joined = run_id

    def account(self) -> None:
        """Counts what poll() copied: statistics, and the queues for export and for the next segment."""
        ended = False
        for source in self.sources:
            if source.settled:
                continue
            ended |= source.read_to_end
            with self.conclusions.going_on(f"counting the records of rank {source.state.identity.rank}"):
                self._read_counters(source)
                self._account_records(source)
            if source.read_to_end:
                source.settled = True
                identity = source.state.identity
                if self.sources.is_newest(source):
                    self.conclusions.end(source)
                self.state.join.end(identity.rank, source.generation)
        self.state.join.join()
        with self.conclusions.going_on("reading what held a device's memory"):
            self._ooms.update(self.state.processes, at_once=ended)
        if self.disk_failed:  # the newest records are kept for later, the others are counted
            while len(self._unkept) > 1 and self.unkept_records() > MAX_UNKEPT_RECORDS:
                self.state.unwritten_records += len(self._unkept.pop(0).records)

    def measure(self) -> None:
        """Samples the GPUs that live processes compute on, and the node's network ports, when that is due."""
        live = [source.state for source in self.sources.live()]
        if not live or not self.sources.setting("telemetry"):
            return
        with self.conclusions.going_on("reading the hardware's telemetry"):
            found = self.telemetry.sample(dict.fromkeys(gpu["uuid"] for state in live for gpu in state.gpus))
            if found is not None and self._exporter is not None:
                self._exporter.measured(live[0].identity, found)
        self.state.notes += [note for note in self.telemetry.notes if note not in self.state.notes]

    def build_tap(self, running_s: float) -> None:
        """Has the native tap built for the next run, if ranks have missed it. running_s: since the sidecar began."""
        with self.conclusions.going_on(_TAP):
            self._tap.begin_if_due(running_s)

    @property
    def exports(self) -> bool:
        """Whether there is an exporter."""
        return self._exporter is not None

    def export(self, *, final: bool = False) -> None:
        """Hands what account() counted, and what judge() found, to the exporter, if there is one. final: no node has
        more to say."""
        if self.conclusions.job.awaits_node_0() and self.sources.live():
            return  # which trace a step belongs to depends on what it says
        now_s, part = time.monotonic(), None
        if self._exporter is not None:
            part = self.tracing.part(self.sources, now_s)
            if part is None:
                return  # which metrics are sent depends on it
            self.conclusions.job.hand_on(self._exporter.take_part(part))
        assessment = self.conclusions.assessment()
        if self._exporter is None:
            return
        while self._unexported:
            batch = self._unexported.pop(0)
            who = self.state.processes[batch.identity.key].identity
            self._exporter.export(dataclasses.replace(batch, identity=who))
        for traced in self.tracing.update(self.sources, now_s, final=final):
            self._exporter.export(traced)
        if assessment is not None:  # after the steps: alerts point to their traces
            self._exporter.on_assessment(dataclasses.replace(assessment, ended=not self.sources.live()))

    def keep(self) -> None:
        """Writes a segment and the state, and removes the rings of processes that have ended and are kept whole."""
        if self._unkept:
            self.disk_failed = True  # until it is known better
            if self._writer is None:
                disk_bytes = self.sources.setting("disk_bytes")
                self._writer = SegmentWriter(self.run, self._host, disk_bytes - telemetry_bytes(disk_bytes))
            dropped = self._writer.dropped_segments
            try:
                self._writer.write(self._unkept)
            finally:
                self.state.dropped_segments += self._writer.dropped_segments - dropped
            self.disk_failed = False
            for chunk in self._unkept:
                self.sources.of(chunk.origin.key).kept = int(chunk.sequences[-1])
            self._unkept.clear()
        self.save(durably=True)
        for source in self.sources:
            if source.settled and os.path.lexists(source.path):
                source.path.with_suffix(".stack").unlink(missing_ok=True)  # its process removes it, if it can
                self.run.remove_ring(source.path)
        self.telemetry.write(self.sources.setting("disk_bytes"), final=not self.sources.live())

    def save(self, *, durably: bool = False) -> None:
        """Writes the node's state. durably: see NodeState.save(). Raises OSError."""
        times = os.times()
        self.state.passing_notes = [note for note in self.conclusions.job.notes() if note not in self.state.notes]
        self.state.telemetry = self.telemetry.totals()
        with self.conclusions.going_on(_TAP):
            # Of ranks with collectives, the file of the native tap that one has not found.
            missed = (source.state.missing_tap for source in self.sources if source.state.groups)
            wanted = bool(self.sources.setting("_build_tap"))
            self.state.tap_outlook = self._tap.outlook(next(filter(None, missed), ""), wanted=wanted)
        self.state.sidecar_cpu_s = times.user + times.system
        self.state.saved_unix_ns = time.time_ns()
        for source in self.sources:
            source.state.now = source.whereabouts(time.monotonic_ns())
        self.state.save(self.run, durably=durably)
        self._saved_hang = self.state.hang

    def has_unsaved_hang(self) -> bool:
        """Whether a hang has begun, become another or ended since the state was saved: a report does not show that."""
        hang, saved = self.state.hang, self._saved_hang
        if hang is None or saved is None:
            return hang is not saved
        return (hang.kind, hang.step, hang.ranks) != (saved.kind, saved.step, saved.ranks)

    def unkept_records(self) -> int:
        return sum(len(chunk.records) for chunk in self._unkept)

    def end_exchange(self) -> None:
        """On node 0, waits a little for the others' last windows, on the others for its last word; tells them that this
        one has ended."""
        began_s = time.monotonic()
        while (
            self.conclusions.job.others_are_there() and time.monotonic() - began_s < _LAST_WINDOWS_S
        ) or (
            self.exports and self.tracing.awaits_word and time.monotonic() - began_s < _LAST_WORD_S
        ):  # fmt: skip
            time.sleep(0.1)
            self.judge(time.monotonic(), final=True)
            self.export()
        self.conclusions.job.close()
        self.state.notes += [note for note in self.conclusions.job.notes() if note not in self.state.notes]

    def report_if_asked(self, write_status: Callable[[str], None]) -> None:
        """Writes report.txt once rank 0 has ended and asks for it. write_status: tells who waits what this is doing."""
        for source in self.sources:
            key = source.state.identity.key
            if source.state.identity.rank == 0 and source.read_to_end and key not in self._reported:
                others_run = bool(self.sources.live())
                if others_run and time.monotonic() - source.ended_monotonic_s < _OTHERS_END_S:
                    return  # they end a few milliseconds later: their last steps belong into the report
                self._reported.add(key)
                if not source.settled:
                    write_status("is counting the last records")
                    self.account()
                # In a container that ends with rank 0, this is the last that we do.
                write_status(f"is writing {self.unkept_records()} records into the run directory")
                try:
                    self.keep()
                except OSError as error:
                    write_status(CANNOT_WRITE)
                    said = f"torchlens_perf: no report: {printable(str(error))}{where_kept(self.run)}\n"
                    deliver(source.settings.get("mailbox", ""), said)
                    raise
                write_status("is writing the report")
                self.write_report()
                write_status("has written the report")

    def write_report(self) -> None:
        """Writes report.txt as rank 0 asked for it."""
        asked = [source.settings for source in self.sources if source.state.identity.rank == 0]
        if asked:
            try:
                self.save()
                with guard("writing the report", passes=RunStoreError):
                    self._write_report(self.run, asked[-1])
            except (OSError, RunStoreError) as error:
                deliver(asked[-1].get("mailbox", ""), f"torchlens_perf: no report: {error}\n")
                raise

    # -- parts of a round

    def _account_records(self, source: RingSource) -> None:
        """Counts the whole steps of what is waiting; everything, once the process has ended."""
        state, statistics = source.state, source.state.statistics
        records, sequences = source.whole_steps(time.monotonic())
        if not len(records):
            statistics.lost += source.forget_oldest(MAX_UNKEPT_RECORDS)
            if source.read_to_end:
                statistics.lost += source.count_up_to(source.reader.cursor - 1, 0)
            return
        names = list(source.reader.names())
        # After a restart the two may differ: the state and the segments were not saved at the same instant.
        uncounted, unkept = sequences > state.counted, sequences > source.kept
        counted = records if uncounted.all() else records[uncounted]
        steps = assemble_steps(counted)
        last = source.reader.cursor - 1 if source.read_to_end else int(sequences[-1])
        lost = source.count_up_to(last, len(counted))
        statistics.add(counted, steps, names, lost)
        self.conclusions.add_steps(source, counted, steps, newest=self.sources.is_newest(source))
        self._join_collectives(source, counted, names)
        if self._exporter is not None:
            at_once = self.tracing.add(source, self.sources, counted, names, steps, time.monotonic())
            self._unexported.append(export_batch(state, counted, names, steps, at_once))
        if unkept.any():
            same = np.array_equal(unkept, uncounted)
            kept = counted if same else records[unkept]
            kept_steps = steps if same else assemble_steps(kept)
            self._unkept.append(Chunk(source.origin, kept, sequences[unkept], names, kept_steps))
        statistics.lost += source.forget_oldest(MAX_UNKEPT_RECORDS)

    def _join_collectives(self, source: RingSource, records: npt.NDArray[np.void], names: list[str]) -> None:
        identity, state = source.state.identity, source.state
        if source.generation == UNRELATED:
            return
        if not source.joins:
            source.joins = True
            self.state.join.set_ranks(self._ranks_beside(source), source.generation)
        warm = records["step"] >= (state.statistics.first_step or 0) + WARM_UP_STEPS
        delayed_by_capture = source.delayed_by_capture(records)
        self.state.join.add(
            identity.rank, records[warm], names, state.groups, source.generation, identity.key,
            delayed_by_capture[warm],
        )  # fmt: skip

    def _ranks_beside(self, source: RingSource) -> set[int]:
        """The ranks of its node: those that are here; and where launchers number a node's ranks one after the other,
        those that are still to come."""
        here = [other.state.identity for other in self.sources if other.generation == source.generation]
        ranks = {identity.rank for identity in here}
        for identity in here:
            if identity.local_rank is None or identity.local_world_size is None:
                return ranks
            first = identity.rank - identity.local_rank
            block = set(range(first, first + identity.local_world_size))
            if not ranks <= block:
                return ranks
        return ranks | block

    def _read_counters(self, source: RingSource) -> None:
        reader, state = source.reader, source.state
        state.unbalanced = reader.counter(ring.UNBALANCED)
        state.too_deep = reader.counter(ring.TOO_DEEP)
        state.names_lost = reader.counter(ring.NAMES_LOST)
        state.internal_errors = reader.counter(ring.INTERNAL_ERRORS)
        state.tool_ns = reader.counter(ring.TOOL_NS)
        state.made_steps = reader.counter(ring.STEP)
        metadata = reader.metadata()
        if metadata:
            state.native, state.notes = metadata["native"], metadata["notes"]
            state.not_measured, state.compute_device = metadata["not_measured"], metadata["compute_device"]
            state.deeper_modules = metadata["deeper_modules"]
            state.root_modules = metadata.get("root_modules", [])
            state.unopened_modules = metadata.get("unopened_modules", [])
            state.model, state.memory_source = metadata["model"], metadata["memory_source"]
            state.device, state.gpus = metadata["device"], metadata["gpus"]
            state.missing_tap, state.threads = metadata.get("missing_tap", ""), metadata.get("threads", 0)
            state.groups = metadata["groups"]
            state.process_began_ns = metadata.get("process_began_ns", 0)
            state.compile_s, state.interactive = metadata.get("compile_s"), metadata.get("interactive", False)
            state.start_cpu_wait_ns = metadata.get("start_cpu_wait_ns")
            source.stack_file = metadata["stack_file"]
            source.simulated = metadata.get("simulated", False)
            source.job_store = tuple(metadata["job_store"]) if metadata["job_store"] else None
            source.settings = dict(metadata["settings"])
            state.trace_every = int(source.settings["trace_every"])
            state.total_steps = int(source.settings.get("_total_steps", 0))
        if state.ended == "died":
            state.open_spans = [span.name for span in reader.open_spans()[1:]]

    def close(self) -> None:
        """Unmaps the rings, and lets the hardware go."""
        self.telemetry.close()
        self.sources.close()
