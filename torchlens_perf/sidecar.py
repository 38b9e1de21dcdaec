"""The per-node process: reads the rings, keeps the run directory, computes, exports. The job never waits for it.

Started by watch.py of the node's first rank, or by hand: `torchlens-perf sidecar RUN_DIR`. It may be killed at any time
and started again: statistics go on from the last saved state, segments from the last one written, and the records in
between are still in the rings.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlens_perf import node_state, ring
from torchlens_perf.alert import Alert
from torchlens_perf.alerts import AlertLog
from torchlens_perf.capture_relay import CaptureRelay, LiveRank
from torchlens_perf.clock import Anchor
from torchlens_perf.config import Config
from torchlens_perf.continuation import Continuation
from torchlens_perf.culprits import NOBODY, Culprit, culprits, name
from torchlens_perf.device_statistics import phase_durations_ns
from torchlens_perf.errors import RingError, RunStoreError, guard, swallowed
from torchlens_perf.exporters import ExportBatch, Exporter, Judgement
from torchlens_perf.generations import BESIDE, Generations
from torchlens_perf.hang import Progress, sole_operations
from torchlens_perf.identity import Identity, process_started
from torchlens_perf.job_view import JobView, usual_step_s
from torchlens_perf.memory_statistics import newest_reading
from torchlens_perf.node_judge import place_of
from torchlens_perf.node_state import NodeState, ProcessState
from torchlens_perf.oom_files import OomFiles
from torchlens_perf.pacing import MOST_UNKEPT_RECORDS, Pacing
from torchlens_perf.rank_signals import RankSignals
from torchlens_perf.rank_statistics import WARM_UP_STEPS, RankStatistics
from torchlens_perf.ring import Reader
from torchlens_perf.ring_source import USUAL_STEPS, RingSource
from torchlens_perf.run_directory import RunDirectory
from torchlens_perf.run_store import Chunk, SegmentWriter, last_sequences
from torchlens_perf.sidecar_lock import SidecarLock
from torchlens_perf.site import site
from torchlens_perf.stacks import process_state
from torchlens_perf.standing import LinkWatch, standing
from torchlens_perf.statistics import assemble_steps, step_traces
from torchlens_perf.straggler import NOTHING
from torchlens_perf.telemetry_log import TelemetryLog
from torchlens_perf.telemetry_store import telemetry_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from torchlens_perf.diagnosis import Diagnosis
    from torchlens_perf.records import StepTable, Verdict
    from torchlens_perf.straggler import Findings, Place

logger = logging.getLogger("torchlens_perf.sidecar")

FIRST_TRACED_STEPS = 3
_FIRST_RING_TIMEOUT_S = 60.0
_MISSING_RANKS_TIMEOUT_S = 30.0
_SHUTDOWN_TIMEOUT_S = 30.0
_LAST_WINDOWS_S = 5.0
_JUDGING = "judging the ranks"
_SIGNALS = "looking for causes"


def traced_steps(steps: list[int], every: int) -> set[int]:
    """Which of these steps are exported span by span: the first ones, and one of `every`; none if it is 0."""
    return {step for step in steps if every and (step < FIRST_TRACED_STEPS or step % every == 0)}


class Sidecar:
    """Reads the rings of one node of one run. One thread; step() does one round and never blocks for long."""

    def __init__(
        self,
        run: RunDirectory,
        host: str,
        exporter: Exporter | None,
        report: Callable[[RunDirectory, dict[str, Any]], None],
    ) -> None:
        """report: writes the run's report.txt; gets what rank 0 asked for (its terminal's width and colour)."""
        self._run = run
        self._host = host
        self._exporter = exporter
        self._write_report = report
        self._sources: dict[Path, RingSource] = {}
        self._unreadable: set[Path] = set()
        self._unfilled: set[Path] = set()  # registered by processes that live, and that have not said who they are
        self._unkept: list[Chunk] = []
        self._unexported: list[ExportBatch] = []
        self._kept_before = last_sequences(run, host)
        self.job = JobView(host)
        self._writer: SegmentWriter | None = None
        self.disk_failed = False
        """The last segment could not be written."""
        self._reported: set[str] = set()
        state_path = run.node_state(host)
        self.state = node_state.load(state_path) if state_path.exists() else NodeState(host)
        self.telemetry = TelemetryLog(run, host, self.state.telemetry)
        self._signals = RankSignals(self.telemetry)
        self._generations = Generations()
        for process in self.state.processes.values():
            self._generations.of(process.identity)
        attempts = [process.identity.attempt for process in self.state.processes.values()]
        self._earlier_attempt = self._attempt = max(attempts, default=-1)  # that the state's findings and hang are of
        self._continuation = Continuation(self.state.findings)
        self._links = LinkWatch(run, host)
        self._ooms = OomFiles(run)
        self._captures = CaptureRelay(run)
        self._together: tuple[Findings, Sequence[Culprit]] = NOTHING, ()
        self._alerts = AlertLog(
            run.run_id, self._attempt, self.state.findings, self.state.hang,
            generation=self._generations.again(self._attempt), told=self.state.alerts,
        )  # fmt: skip

    # -- one round

    def poll(self) -> float:
        """Copies new records out of the rings. Returns how full the fullest was, as a share of its capacity."""
        self._open_new_rings()
        fullest = 0.0
        for source in self._sources.values():
            if source.read_to_end:
                continue
            final = source.has_ended()
            batch = source.reader.read(final=bool(final))
            if len(batch.records):
                source.waiting.append((batch.records, batch.sequences))
            fullest = max(fullest, (len(batch.records) + batch.lost) / source.reader.capacity)
            if final:
                source.state.ended, source.read_to_end = final, True
                source.ended_monotonic_s = time.monotonic()
        with self._going_on(_SIGNALS):
            self._signals.look(self._sources.values())
        return fullest

    def account(self) -> None:
        """Counts what poll() copied: statistics, and the queues for export and for the next segment."""
        for source in self._sources.values():
            if source.settled:
                continue
            self._read_counters(source)
            self._account_records(source)
            if source.read_to_end:
                source.settled = True
                identity = source.state.identity
                if self._is_newest(source):
                    with self._going_on(_JUDGING):
                        self.job.end(identity)
                self.state.join.end(identity.attempt, identity.rank, source.generation)
        self.state.join.join()
        with self._going_on("reading what held a device's memory"):
            self._ooms.look(self.state.processes)
        if self.disk_failed:
            self._forget_oldest_unkept()

    def measure(self) -> None:
        """Samples the GPUs that live processes compute on, and the node's network ports, when that is due."""
        live = [source.state for source in self._sources.values() if not source.read_to_end]
        if not live or not self._setting("telemetry"):
            return
        with self._going_on("reading the hardware's telemetry"):
            found = self.telemetry.look(dict.fromkeys(gpu["uuid"] for state in live for gpu in state.gpus))
            if found is not None and self._exporter is not None:
                self._exporter.measured(live[0].identity, found)
        self.state.notes += [note for note in self.telemetry.notes if note not in self.state.notes]

    def export(self) -> None:
        """Hands what account() counted to the exporter."""
        if self._exporter is not None:
            for batch in self._unexported:
                self._exporter.export(batch)
            self._unexported.clear()
            self._export_judgement(self._exporter)

    def _export_judgement(self, exporter: Exporter) -> None:
        """After the steps, so that the traces that alerts point to are known."""
        identities = (source.state.identity for source in self._sources.values())
        who = next((identity for identity in identities if identity.attempt == self._attempt), None)
        if who is None:
            return
        findings, hang = self.state.findings, self.state.hang
        alerts: tuple[Alert, ...] = ()
        together: Sequence[Culprit] = ()
        if self.job.judges_alone:
            run_on = [source for source in self._sources.values() if not source.read_to_end]
            links: Verdict | None = None
            with self._going_on("looking for slow links"):
                links = self._links.look(self.state, time.monotonic(), final=not run_on)
            with self._going_on("raising alerts"):
                alerts = self._alerts.changes(
                    who.attempt, findings, hang, self.job.places, time.time_ns(),
                    generation=self._generations.again(who.attempt),
                    at_step=max((source.reader.counter(ring.STEP) for source in run_on), default=None),
                    verdicts=standing(findings, self.state.named, links),
                    report=self._module_report,
                    diagnosed=self._diagnosed,
                )  # fmt: skip
                self.state.alerts = self._alerts.to_json()
                if findings is not self._together[0]:  # the same for many rounds, and of many ranks it takes a while
                    slow = [episode for episode in findings.episodes if episode.until_step is None]
                    self._together = findings, culprits(slow, self.job.places)
                together = self._together[1]
        exporter.judged(Judgement(who, findings, hang, alerts, self.job.judges_alone, together))

    def _module_report(self) -> dict[str, Any]:
        """The part of the report that alerts take modules from: those of this node's ranks."""
        from torchlens_perf.report.build import module_rows  # it needs what shows tables: not without need

        return {"modules": module_rows([self.state])}

    def keep(self) -> None:
        """Writes a segment and the state, and removes the rings of processes that have ended and are kept whole."""
        if self._unkept:
            self.disk_failed = True  # until it is known better
            if self._writer is None:
                disk_bytes = self._setting("disk_bytes")
                self._writer = SegmentWriter(self._run, self._host, disk_bytes - telemetry_bytes(disk_bytes))
            self._writer.write(self._unkept)
            self.disk_failed = False
            for chunk in self._unkept:
                self._source_of(chunk.origin.key).kept = int(chunk.sequences[-1])
            self._unkept.clear()
            self.state.dropped_segments += self._writer.dropped_segments
            self._writer.dropped_segments = 0
        self.save()
        for source in self._sources.values():
            if source.settled and source.path.exists():
                source.path.with_suffix(".stack").unlink(missing_ok=True)  # its process removes it, if it can
                source.path.unlink()
                with contextlib.suppress(OSError):
                    source.path.parent.rmdir()  # unless other rings, or our lock, are there
        live = any(not source.read_to_end for source in self._sources.values())
        self.telemetry.write(self._setting("disk_bytes"), final=not live)

    def save(self) -> None:
        """Writes the node's state file."""
        times = os.times()
        self.state.passing_notes = [note for note in self.job.notes() if note not in self.state.notes]
        self.state.telemetry = self.telemetry.to_json()
        self.state.sidecar_cpu_s = times.user + times.system
        self.state.save(self._run)

    def unkept_records(self) -> int:
        """How many records the next segment would hold."""
        return sum(len(chunk.records) for chunk in self._unkept)

    def end_exchange(self) -> None:
        """On node 0, waits a little for the others' last windows; tells them that this one has ended."""
        deadline_s = time.monotonic() + _LAST_WINDOWS_S
        while self.job.others_are_there() and time.monotonic() < deadline_s:
            time.sleep(0.1)
            self.look_around(time.monotonic(), final=True)
        self.job.close()
        self.state.notes += [note for note in self.job.notes() if note not in self.state.notes]

    def report_if_asked(self) -> None:
        """Writes report.txt once rank 0 has ended and asks for it."""
        for source in self._sources.values():
            key = source.state.identity.key
            if source.state.identity.rank == 0 and source.read_to_end and key not in self._reported:
                others_run = any(not other.read_to_end for other in self._sources.values())
                if others_run and time.monotonic() - source.ended_monotonic_s < 0.3:
                    return  # they end a few milliseconds later: their last steps belong into the report
                self._reported.add(key)
                if not source.settled:
                    self.account()
                # In a container that ends with rank 0, this is the last that we do.
                self.keep()
                self.write_report()

    def write_report(self) -> None:
        """Writes report.txt as rank 0 asked for it."""
        asked = [source.settings for source in self._sources.values() if source.state.identity.rank == 0]
        if asked:
            self.save()
            with guard("writing the report", passes=RunStoreError):
                self._write_report(self._run, asked[-1])

    def has_more_to_come(self, waited_s: float) -> bool:
        """Whether a process runs, or may still start. waited_s: how long the sidecar has run."""
        sources = list(self._sources.values())
        if self._unfilled:
            return True
        if not sources:
            return waited_s < _FIRST_RING_TIMEOUT_S and not self.state.processes
        if any(not source.read_to_end for source in sources):
            return True
        last = max(sources, key=lambda source: (source.generation, source.ended_monotonic_s))
        identity = last.state.identity
        launcher_lives = process_started(identity.launcher_pid) is not None
        died = any(s.state.ended == "died" and s.generation == last.generation for s in sources)
        if identity.elastic and died and launcher_lives:
            return True  # torchrun may start them again
        present = sum(source.generation == last.generation for source in sources)
        if present < identity.local_world_size and launcher_lives:
            return time.monotonic() - last.ended_monotonic_s < _MISSING_RANKS_TIMEOUT_S
        return False

    def has_unread_rings(self) -> bool:
        """Whether a ring has been registered that this sidecar has not read."""
        known = self._sources.keys() | self._unreadable
        return any(path not in known and path.exists() for path in self._run.registered_rings(self._host))

    # -- parts of a round

    def _open_new_rings(self) -> None:
        self._unfilled.clear()
        for path in self._run.registered_rings(self._host):
            if path in self._sources or path in self._unreadable:
                continue
            try:
                reader = Reader(path)
                metadata = reader.metadata()
                if not metadata:
                    records = reader.counter(ring.HEAD)
                    reader.close()
                    if _writer_lives(path):
                        self._unfilled.add(path)  # it is about to replace them
                        continue
                    path.unlink(missing_ok=True)  # nobody will ever know whose records these are
                    raise RingError(f"its process died while it said who it is; {records} records were in it")
                self._sources[path] = self._new_source(path, reader, metadata)
            except FileNotFoundError:
                self._unreadable.add(path)  # read to its end by an earlier sidecar, which removed it
            except (OSError, RingError, ValueError, KeyError, TypeError) as error:
                self._unreadable.add(path)
                self.state.notes.append(f"ring file {path.name} could not be read: {error}")
                logger.warning("%s could not be read: %s", path, error)

    def _new_source(self, path: Path, reader: Reader, metadata: dict[str, Any]) -> RingSource:
        identity = Identity(**metadata["identity"])
        before, generation = self._generations.newest, self._generations.of(identity)
        if generation > before:
            # Its ranks are other processes: what was found before holds of none of them.
            if identity.attempt == self._attempt:
                self._earlier_attempt = -1
            self._attempt = identity.attempt
            self.job.begin(identity.attempt)
            self.state.findings, self.state.named, self.state.hang, self.job.hang = NOTHING, NOBODY, None, None
        state = self.state.processes.get(identity.key)
        if state is None:
            state = ProcessState(identity, Anchor(*metadata["anchor"].values()), RankStatistics())
            self.state.processes[identity.key] = state
        kept = self._kept_before.get(identity.key, -1)
        reader.cursor = min(kept, state.counted) + 1
        logger.info("reading %s from record %d", path, reader.cursor)
        return RingSource(path, reader, state, dict(metadata["settings"]), kept, generation)

    def _account_records(self, source: RingSource) -> None:
        """Counts the whole steps of what is waiting; everything, once the process has ended."""
        state, statistics = source.state, source.state.statistics
        records, sequences = source.whole_steps(time.monotonic())
        if not len(records):
            statistics.lost += source.forget_oldest(MOST_UNKEPT_RECORDS)
            if source.read_to_end:
                statistics.lost += source.count_up_to(source.reader.cursor - 1, 0)
            return
        names = list(source.reader.names())
        # After a restart the two may differ: the state and the segments were not saved at the same instant.
        uncounted, unkept = sequences > state.counted, sequences > source.kept
        counted = records[uncounted]
        steps = assemble_steps(counted)
        last = source.reader.cursor - 1 if source.read_to_end else int(sequences[-1])
        lost = source.count_up_to(last, len(counted))
        statistics.add(counted, steps, names, lost)
        self._judge_steps(source, steps)
        self._join_collectives(source, counted, names)
        if self._exporter is not None:
            self._unexported.append(self._export_batch(source, counted, names, steps))
        if unkept.any():
            kept = records[unkept]
            self._unkept.append(Chunk(source.origin, kept, sequences[unkept], names, assemble_steps(kept)))
        statistics.lost += source.forget_oldest(MOST_UNKEPT_RECORDS)

    def _forget_oldest_unkept(self) -> None:
        """While the run directory cannot be written: the newest records are kept for later, the others are counted."""
        while len(self._unkept) > 1 and self.unkept_records() > MOST_UNKEPT_RECORDS:
            self.state.unwritten_records += len(self._unkept.pop(0).records)

    def _join_collectives(self, source: RingSource, records: npt.NDArray[np.void], names: list[str]) -> None:
        identity, state = source.state.identity, source.state
        if source.generation == BESIDE:
            return
        if not source.joins:
            source.joins = True
            first = identity.rank - identity.local_rank
            ranks = range(first, first + identity.local_world_size)
            self.state.join.know(identity.attempt, ranks, source.generation)
        warm = records["step"] >= (state.statistics.first_step or 0) + WARM_UP_STEPS
        self.state.join.add(
            identity.attempt, identity.rank, records[warm], names, state.groups, source.generation, identity.key
        )

    def _judge_steps(self, source: RingSource, steps: StepTable) -> None:
        source.durations_ns.extend(steps.duration_ns[-USUAL_STEPS:].tolist())
        if not self._is_newest(source):
            return  # the last steps of a process that another has replaced, which begins at step 0
        with self._going_on(_SIGNALS):
            self._signals.add_steps(source, steps)
        with self._going_on(_JUDGING):
            self.job.add_steps(source.state.identity, self._place(source), steps, source.job_store)

    def _is_newest(self, source: RingSource) -> bool:
        return source.generation == self._generations.newest != BESIDE

    def _place(self, source: RingSource) -> Place:
        state = source.state
        identity = state.identity
        return place_of(identity.rank, identity.host, state.model, state.groups, site(identity.attributes))

    def look_around(self, now_s: float, *, final: bool = False) -> None:
        """Judges the ranks, exchanges windows with other nodes, and looks for hangs."""
        with self._going_on(_JUDGING):
            for source in filter(self._is_newest, self._sources.values()):
                identity, groups, now = source.state.identity, source.state.groups, self._progress(source, now_s)
                modules_ns = source.state.statistics.modules_ns()
                self.job.progress(identity, self._place(source), now, groups, source.stack_file, modules_ns)
        with self._going_on(_SIGNALS):
            self.job.add_signals(self._signals.sample(filter(self._is_newest, self._sources.values()), now_s), now_s)
        with self._going_on(_JUDGING):
            self._take_over(self.job.look(now_s, final=final))
        self.state.hang = self.job.hang

    def _take_over(self, findings: Findings) -> None:
        if self.job.attempt != self._attempt:
            return  # no step of the newest attempt has been made
        if self._attempt == self._earlier_attempt:
            findings = self._continuation.findings(findings)
        if findings.rows or not self.state.findings.rows:
            self.state.findings = findings
            self.state.named = name(
                findings, self.job.places, self.job.module_excess_ns, self._diagnosed, self.state.named
            )

    def _diagnosed(self, culprit: Culprit) -> Diagnosis:
        newest = filter(self._is_newest, self._sources.values())
        source = next((each for each in newest if each.state.identity.rank == culprit.lead.rank), None)
        return self.job.diagnose(culprit, self._signals.details(source) if source is not None else {})

    def relay_captures(self, now_s: float, *, final: bool = False) -> None:
        """Hands on what is asked of this node's ranks, and asks itself where one is named. final: the run has ended."""
        with self._going_on("capturing"):
            ranks, on_verdict = {}, False
            for source in self._sources.values():
                who, setting = source.state.identity, source.settings["capture"]
                if not source.read_to_end and self._is_newest(source):
                    step = source.reader.counter(ring.STEP)
                    ranks[who.rank] = LiveRank(source.path, who.pid, who.attempt, step, refuses=setting == "off")
                    on_verdict |= setting == "verdict"
            if on_verdict and self.job.judges_alone:
                self._captures.look_at_verdict(self.state.named, self.state.findings, self.job.places, ranks)
            self._captures.look(ranks, now_s)
            if final:
                self._captures.close()

    @contextlib.contextmanager
    def _going_on(self, place: str) -> Iterator[None]:
        """Around what is concluded from the records: whatever fails there, they are read and kept."""
        before = swallowed.by_place[place]
        with guard(place):
            yield
        note = f"{place} failed in the sidecar, and what it would have told is missing: see nodes/{self._host}.log"
        if swallowed.by_place[place] > before and note not in self.state.notes:
            self.state.notes.append(note)

    def _progress(self, source: RingSource, now_s: float) -> Progress:
        reader, state = source.reader, source.state
        source.seen(reader.counter(ring.STEP), reader.counter(ring.HEAD), now_s)
        uncomparable = self.state.join.uncomparable()
        numbers = {group.name: group.issued - 1 for group in reader.groups() if " peer=" not in group.name}
        issued = {group: number for group, number in numbers.items() if group not in uncomparable}
        ended = {"died": "dead", "closed": "closed"}.get(state.ended)
        return Progress(
            rank=state.identity.rank,
            host=state.identity.host,
            step=reader.counter(ring.STEP),
            since_step_s=now_s - source.step_s,
            told_s=0.0,
            usual_step_s=usual_step_s(source.durations_ns),
            issued=issued,
            inside=tuple(span.name for span in reader.open_spans()[1:]),
            state=ended or process_state(state.identity.pid, state.identity.process_started),
            operations=sole_operations(issued, reader.names()),
            since_mark_s=now_s - source.mark_s,
            all_groups=reader.counter(ring.GROUPS_USED) < ring.MAX_GROUPS and len(issued) == len(numbers),
        )

    def _read_counters(self, source: RingSource) -> None:
        reader, state = source.reader, source.state
        state.unbalanced = reader.counter(ring.UNBALANCED)
        state.too_deep = reader.counter(ring.TOO_DEEP)
        state.names_lost = reader.counter(ring.NAMES_LOST)
        state.internal_errors = reader.counter(ring.INTERNAL_ERRORS)
        state.tool_ns = reader.counter(ring.TOOL_NS)
        metadata = reader.metadata()
        if metadata:
            state.native, state.notes = metadata["native"], metadata["notes"]
            state.model, state.memory_source = metadata["model"], metadata["memory_source"]
            state.device, state.gpus = metadata["device"], metadata["gpus"]
            state.groups = metadata["groups"]
            source.stack_file = metadata["stack_file"]
            source.job_store = tuple(metadata["job_store"]) if metadata["job_store"] else None
            source.settings = dict(metadata["settings"])
            state.trace_every = int(source.settings["trace_every"])
        if state.ended == "died":
            state.open_spans = [span.name for span in reader.open_spans()[1:]]

    def _export_batch(
        self, source: RingSource, records: npt.NDArray[np.void], names: list[str], steps: StepTable
    ) -> ExportBatch:
        wanted = traced_steps(steps.step.tolist(), source.state.trace_every)
        traces = step_traces(source.origin.key, records, names, wanted, source.later_records())
        device_ns, memory = phase_durations_ns(records), newest_reading(records, names)
        return ExportBatch(source.state.identity, source.state.anchor, steps, tuple(traces), device_ns, memory)

    def _setting(self, name: str) -> int:
        for source in self._sources.values():
            if name in source.settings:
                return int(source.settings[name])
        return int(getattr(Config(), name))

    def _source_of(self, key: str) -> RingSource:
        return next(source for source in self._sources.values() if source.state.identity.key == key)

    def close(self) -> None:
        """Unmaps the rings."""
        self.telemetry.close()
        for source in self._sources.values():
            source.reader.close()


def run_sidecar(sidecar: Sidecar, lock: SidecarLock, exporter: Exporter | None) -> bool:
    """Works until the node's processes have ended. The caller holds the lock, and has it back or gone afterwards.

    Returns whether to begin anew: with the lock, for a ring that came in the last instant.
    """
    started_s = time.monotonic()
    pacing = Pacing(started_s)
    save_took_s = 0.0
    while True:
        pacing.polled(sidecar.poll())
        now_s = time.monotonic()
        more = sidecar.has_more_to_come(now_s - started_s)
        if not more or pacing.account_due(now_s):
            sidecar.account()
            sidecar.look_around(now_s, final=not more)
        sidecar.measure()
        sidecar.relay_captures(now_s, final=not more)
        with _logged("the report could not be written"):
            sidecar.report_if_asked()  # before the export, which may take longer: rank 0 waits for it
        sidecar.export()
        with _logged("the run directory cannot be written"):
            if not more or pacing.keep_due(now_s, sidecar.unkept_records(), failing=sidecar.disk_failed):
                sidecar.keep()
            elif pacing.save_due(now_s, save_took_s):
                sidecar.save()
                save_took_s = time.monotonic() - now_s
        if not more:
            break
        time.sleep(pacing.poll_s)
    if exporter is not None:
        sidecar.state.notes += exporter.shutdown(_SHUTDOWN_TIMEOUT_S)
    sidecar.end_exchange()
    with _logged("the run directory cannot be written"):
        sidecar.save()
    with _logged("the last report could not be written"):
        sidecar.write_report()
    sidecar.close()
    return _give_back(sidecar, lock)


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """A full disk, or another node's file that cannot be read just now, must not leave the ranks unobserved."""
    try:
        yield
    except (OSError, RunStoreError) as error:
        logger.error("%s: %s", what, error)


def _writer_lives(path: Path) -> bool:
    """Whether the process that made a ring file lives; the file's name tells which it is (Identity.key)."""
    process = [int(word) for word in path.stem.split("-")[-2:] if word.isdigit()]
    return len(process) == 2 and process_started(process[0]) == process[1]


def _give_back(sidecar: Sidecar, lock: SidecarLock) -> bool:
    """Gives the lock back and looks once more whether a ring has come.

    A process makes its ring and then looks at the lock: either it finds the lock free, and starts a sidecar of its
    own, or its ring was there before this look.
    """
    lock.close()
    again = sidecar.has_unread_rings()
    if not lock.acquire():
        return False
    if not again:
        lock.remove()
    return again
