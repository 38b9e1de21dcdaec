"""The per-node process: reads the rings, keeps the run directory, computes, exports. The job never waits for it.

Started by watch.py of the node's first rank, or by hand: `torchlens-perf sidecar RUN_DIR`. It may be killed at any time
and started again: statistics go on from the last saved state, segments from the last one written, and the records in
between are still in the rings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf import node_state, ring
from torchlens_perf.alerts import Alert, AlertLog
from torchlens_perf.clock import Anchor
from torchlens_perf.config import Config
from torchlens_perf.culprits import name
from torchlens_perf.errors import RingError, RunStoreError
from torchlens_perf.exporters import ExportBatch, Exporter, Judgement
from torchlens_perf.hang import Progress, sole_operations
from torchlens_perf.identity import Identity, process_started
from torchlens_perf.job_view import JobView, usual_step_s
from torchlens_perf.node_judge import place_of
from torchlens_perf.node_state import NodeState, ProcessState
from torchlens_perf.rank_statistics import WARM_UP_STEPS, RankStatistics
from torchlens_perf.ring import Kind, Reader, State
from torchlens_perf.run_directory import RunDirectory
from torchlens_perf.run_store import Chunk, Origin, SegmentWriter, last_sequences
from torchlens_perf.sidecar_lock import SidecarLock
from torchlens_perf.stacks import process_state
from torchlens_perf.statistics import assemble_steps, step_traces
from torchlens_perf.straggler import continued

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.records import StepTable
    from torchlens_perf.straggler import Place

logger = logging.getLogger("torchlens_perf.sidecar")

FIRST_TRACED_STEPS = 3
_FIRST_RING_TIMEOUT_S = 60.0
_MISSING_RANKS_TIMEOUT_S = 30.0
_SHUTDOWN_TIMEOUT_S = 30.0
_MOST_UNKEPT_RECORDS = 1 << 18
_LAST_WINDOWS_S = 5.0
_USUAL_STEPS = 32  # from which a rank's usual step time is taken


@dataclasses.dataclass
class _Source:
    """A ring file being read."""

    path: Path
    reader: Reader
    state: ProcessState
    settings: dict[str, Any]
    kept: int  # sequence number of the last record in a segment
    waiting: list[tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]] = dataclasses.field(default_factory=list)
    lost: int = 0  # since the last account()
    settled: bool = False  # ended, and all of it is accounted for
    ended_monotonic_s: float = 0.0
    job_store: tuple[str, int] | None = None
    stack_file: str = ""
    joins: bool = False  # the join of collectives knows of it
    durations_ns: deque[int] = dataclasses.field(default_factory=lambda: deque(maxlen=_USUAL_STEPS))
    step_s: float = 0.0  # when the step in progress was first seen
    mark_s: float = 0.0  # when something was last seen to be recorded
    _step: int = -1
    _head: int = -1

    def seen(self, step: int, head: int, now_s: float) -> None:
        """How far the ring is now."""
        if step != self._step:
            self._step, self.step_s = step, now_s
        if head != self._head:
            self._head, self.mark_s = head, now_s

    @property
    def origin(self) -> Origin:
        identity = self.state.identity
        return Origin(identity.key, identity.rank, identity.attempt, identity.host, self.state.anchor)


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
        self._sources: dict[Path, _Source] = {}
        self._unreadable: set[Path] = set()
        self._unkept: list[Chunk] = []
        self._unexported: list[ExportBatch] = []
        self._kept_before = last_sequences(run, host)
        self.job = JobView(host)
        self._writer: SegmentWriter | None = None
        self._reported: set[str] = set()
        state_path = run.node_state(host)
        self.state = node_state.load(state_path) if state_path.exists() else NodeState(host)
        attempts = [process.identity.attempt for process in self.state.processes.values()]
        self._earlier, self._earlier_attempt = self.state.findings, max(attempts, default=-1)
        self._alerts = AlertLog(run.run_id, self._earlier_attempt, self.state.findings, self.state.hang)

    # -- one round

    def poll(self) -> float:
        """Copies new records out of the rings. Returns how full the fullest was, as a share of its capacity."""
        self._open_new_rings()
        fullest = 0.0
        for source in self._sources.values():
            if source.state.ended:
                continue
            final = self._has_ended(source)
            batch = source.reader.read(final=bool(final))
            source.lost += batch.lost
            if len(batch.records):
                source.waiting.append((batch.records, batch.sequences))
            fullest = max(fullest, (len(batch.records) + batch.lost) / source.reader.capacity)
            if final:
                source.state.ended = final
                source.ended_monotonic_s = time.monotonic()
        return fullest

    def account(self) -> None:
        """Counts what poll() copied: statistics, and the queues for export and for the next segment."""
        for source in self._sources.values():
            if source.state.ended and source.settled:
                continue
            self._read_counters(source)
            self._account_records(source)
            if source.state.ended:
                source.settled = True
                self.job.end(source.state.identity)
                self.state.join.end(source.state.identity.attempt, source.state.identity.rank)
        self.state.join.join()

    def export(self) -> None:
        """Hands what account() counted to the exporter."""
        if self._exporter is not None:
            for batch in self._unexported:
                self._exporter.export(batch)
            self._unexported.clear()
            self._export_judgement(self._exporter)

    def _export_judgement(self, exporter: Exporter) -> None:
        """After the steps, so that the traces that alerts point to are known."""
        if not self._sources:
            return
        who = max((source.state.identity for source in self._sources.values()), key=lambda each: each.attempt)
        findings, hang = self.state.findings, self.state.hang
        alerts: tuple[Alert, ...] = ()
        if self.job.judges_alone:
            alerts = self._alerts.changes(who.attempt, findings, hang, self.job.places, time.time_ns())
        exporter.judged(Judgement(who, findings, hang, alerts, self.job.judges_alone))

    def keep(self) -> None:
        """Writes a segment and the state, and removes the rings of processes that have ended and are kept whole."""
        if self._unkept:
            if self._writer is None:
                self._writer = SegmentWriter(self._run, self._host, self._setting("disk_bytes"))
            self._writer.write(self._unkept)
            for chunk in self._unkept:
                self._source_of(chunk.origin.key).kept = int(chunk.sequences[-1])
            self._unkept.clear()
            self.state.dropped_segments += self._writer.dropped_segments
            self._writer.dropped_segments = 0
        self.save()
        for source in self._sources.values():
            if source.settled and source.path.exists():
                source.path.unlink()
                with contextlib.suppress(OSError):
                    source.path.parent.rmdir()  # unless other rings, or our lock, are there

    def save(self) -> None:
        """Writes the node's state file."""
        times = os.times()
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
        self.state.notes += self.job.notes()

    def report_if_asked(self) -> None:
        """Writes report.txt once rank 0 has ended and asks for it."""
        for source in self._sources.values():
            key = source.state.identity.key
            if source.state.identity.rank == 0 and source.state.ended and key not in self._reported:
                others_run = any(not other.state.ended for other in self._sources.values())
                if others_run and time.monotonic() - source.ended_monotonic_s < 0.3:
                    return  # they end a few milliseconds later: their last steps belong into the report
                self._reported.add(key)
                # In a container that ends with rank 0, this is the last that we do.
                self.keep()
                self.write_report()

    def write_report(self) -> None:
        """Writes report.txt as rank 0 asked for it."""
        asked = [source.settings for source in self._sources.values() if source.state.identity.rank == 0]
        if asked:
            self.save()
            self._write_report(self._run, asked[-1])

    def has_more_to_come(self, waited_s: float) -> bool:
        """Whether a process runs, or may still start. waited_s: how long the sidecar has run."""
        sources = list(self._sources.values())
        if not sources:
            return waited_s < _FIRST_RING_TIMEOUT_S and not self.state.processes
        if any(not source.state.ended for source in sources):
            return True
        last = max(sources, key=lambda source: (source.state.identity.attempt, source.ended_monotonic_s))
        identity = last.state.identity
        launcher_lives = process_started(identity.launcher_pid) is not None
        died = any(s.state.ended == "died" and s.state.identity.attempt == identity.attempt for s in sources)
        if identity.elastic and died and launcher_lives:
            return True  # torchrun may start them again
        present = sum(source.state.identity.attempt == identity.attempt for source in sources)
        if present < identity.local_world_size and launcher_lives:
            return time.monotonic() - last.ended_monotonic_s < _MISSING_RANKS_TIMEOUT_S
        return False

    def has_unread_rings(self) -> bool:
        """Whether a ring has been registered that this sidecar has not read."""
        known = self._sources.keys() | self._unreadable
        return any(path not in known and path.exists() for path in self._run.registered_rings(self._host))

    # -- parts of a round

    def _open_new_rings(self) -> None:
        for path in self._run.registered_rings(self._host):
            if path in self._sources or path in self._unreadable:
                continue
            try:
                reader = Reader(path)
                metadata = reader.metadata()
                if not metadata:
                    reader.close()
                    continue  # its writer is about to fill it in
                self._sources[path] = self._new_source(path, reader, metadata)
            except FileNotFoundError:
                self._unreadable.add(path)  # read to its end by an earlier sidecar, which removed it
            except (OSError, RingError, ValueError, KeyError, TypeError) as error:
                self._unreadable.add(path)
                self.state.notes.append(f"ring file {path.name} could not be read: {error}")
                logger.warning("%s could not be read: %s", path, error)

    def _new_source(self, path: Path, reader: Reader, metadata: dict[str, Any]) -> _Source:
        identity = Identity(**metadata["identity"])
        state = self.state.processes.get(identity.key)
        if state is None:
            state = ProcessState(identity, Anchor(*metadata["anchor"].values()), RankStatistics())
            self.state.processes[identity.key] = state
        kept = self._kept_before.get(identity.key, -1)
        reader.cursor = min(kept, state.counted) + 1
        logger.info("reading %s from record %d", path, reader.cursor)
        return _Source(path, reader, state, dict(metadata["settings"]), kept)

    def _has_ended(self, source: _Source) -> str:
        if source.reader.counter(ring.STATE) == State.CLOSED:
            return "closed"
        identity = source.state.identity
        # A ring that was closed between the two looks is closed, not dead.
        if process_started(identity.pid) != identity.process_started:
            return "closed" if source.reader.counter(ring.STATE) == State.CLOSED else "died"
        return ""

    def _account_records(self, source: _Source) -> None:
        """Counts the whole steps of what is waiting; everything, once the process has ended."""
        statistics, lost, source.lost = source.state.statistics, source.lost, 0
        if not source.waiting:
            statistics.lost += lost
            return
        records = np.concatenate([records for records, _ in source.waiting])
        sequences = np.concatenate([sequences for _, sequences in source.waiting])
        ends = np.flatnonzero(records["kind"] == Kind.STEP)
        cut = len(records) if source.state.ended else (int(ends[-1]) + 1 if len(ends) else 0)
        source.waiting = [(records[cut:], sequences[cut:])] if cut < len(records) else []
        if not cut:
            statistics.lost += lost
            return
        records, sequences, names = records[:cut], sequences[:cut], list(source.reader.names())
        # After a restart the two may differ: the state and the segments were not saved at the same instant.
        uncounted, unkept = sequences > source.state.counted, sequences > source.kept
        counted = records[uncounted]
        steps = assemble_steps(counted)
        statistics.add(counted, steps, names, lost)
        self._judge_steps(source, steps)
        self._join_collectives(source, counted, names)
        source.state.counted = max(source.state.counted, int(sequences[-1]))
        if self._exporter is not None:
            self._unexported.append(self._export_batch(source, counted, names, steps))
        if unkept.any():
            kept = records[unkept]
            self._unkept.append(Chunk(source.origin, kept, sequences[unkept], names, assemble_steps(kept)))

    def _join_collectives(self, source: _Source, records: npt.NDArray[np.void], names: list[str]) -> None:
        identity, state = source.state.identity, source.state
        if not source.joins:
            source.joins = True
            first = identity.rank - identity.local_rank
            self.state.join.know(identity.attempt, range(first, first + identity.local_world_size))
        warm = records["step"] >= (state.statistics.first_step or 0) + WARM_UP_STEPS
        self.state.join.add(identity.attempt, identity.rank, records[warm], names, state.groups)

    def _judge_steps(self, source: _Source, steps: StepTable) -> None:
        source.durations_ns.extend(steps.duration_ns[-_USUAL_STEPS:].tolist())
        self.job.add_steps(source.state.identity, self._place(source), steps, source.job_store)

    def _place(self, source: _Source) -> Place:
        state = source.state
        return place_of(state.identity.rank, state.identity.host, state.statistics.modules, state.groups)

    def look_around(self, now_s: float, *, final: bool = False) -> None:
        """Judges the ranks, exchanges windows with other nodes, and looks for hangs."""
        for source in self._sources.values():
            identity, groups = source.state.identity, source.state.groups
            self.job.progress(identity, self._place(source), self._progress(source, now_s), groups, source.stack_file)
        findings = self.job.look(now_s, final=final)
        if self.job.attempt == self._earlier_attempt:
            findings = continued(self._earlier, findings)
        if findings.rows or not self.state.findings.rows:
            self.state.findings = findings
        self.state.named = name(self.state.findings, self.job.places)
        self.state.hang = self.job.hang

    def _progress(self, source: _Source, now_s: float) -> Progress:
        reader, state = source.reader, source.state
        if not state.ended:
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

    def _read_counters(self, source: _Source) -> None:
        reader, state = source.reader, source.state
        state.unbalanced = reader.counter(ring.UNBALANCED)
        state.too_deep = reader.counter(ring.TOO_DEEP)
        state.names_lost = reader.counter(ring.NAMES_LOST)
        state.internal_errors = reader.counter(ring.INTERNAL_ERRORS)
        state.tool_ns = reader.counter(ring.TOOL_NS)
        metadata = reader.metadata()
        if metadata:
            state.native, state.notes = metadata["native"], metadata["notes"]
            state.memory_source = metadata["memory_source"]
            state.groups = metadata["groups"]
            source.stack_file = metadata["stack_file"]
            source.job_store = tuple(metadata["job_store"]) if metadata["job_store"] else None
            source.settings = dict(metadata["settings"])
            state.trace_every = int(source.settings["trace_every"])
        if state.ended == "died":
            state.open_spans = [span.name for span in reader.open_spans()[1:]]

    def _export_batch(
        self, source: _Source, records: npt.NDArray[np.void], names: list[str], steps: StepTable
    ) -> ExportBatch:
        wanted = traced_steps(steps.step.tolist(), source.state.trace_every)
        traces = step_traces(source.origin.key, records, names, wanted)
        return ExportBatch(source.state.identity, source.state.anchor, steps, tuple(traces))

    def _setting(self, name: str) -> int:
        for source in self._sources.values():
            if name in source.settings:
                return int(source.settings[name])
        return int(getattr(Config(), name))

    def _source_of(self, key: str) -> _Source:
        return next(source for source in self._sources.values() if source.state.identity.key == key)

    def close(self) -> None:
        """Unmaps the rings."""
        for source in self._sources.values():
            source.reader.close()


class Pacing:
    """When to do what: reads sooner as rings fill faster, writes more rarely as the run gets longer. Pure."""

    def __init__(self, now_s: float) -> None:
        self._started_s = now_s
        self.poll_s = 0.05
        self._accounted_s = self._kept_s = self._saved_s = now_s

    def polled(self, fullest: float) -> None:
        """Aims at reading a ring when an eighth of it is new."""
        if fullest > 1 / 8:
            self.poll_s = max(0.005, self.poll_s / 2)
        else:
            self.poll_s = min(0.2, self.poll_s * 1.5)

    def account_due(self, now_s: float) -> bool:
        due = now_s - self._accounted_s >= min(1.0, 0.1 + (now_s - self._started_s) / 10)
        if due:
            self._accounted_s = now_s
        return due

    def keep_due(self, now_s: float, unkept_records: int) -> bool:
        """A segment when there are many records, or after a twentieth of the run's age, from 2 s to 60 s."""
        period_s = min(60.0, max(2.0, (now_s - self._started_s) / 20))
        due = unkept_records >= _MOST_UNKEPT_RECORDS or now_s - self._kept_s >= period_s
        if due:
            self._kept_s = self._saved_s = now_s
        return due

    def save_due(self, now_s: float, took_s: float) -> bool:
        """The state every 2 s, but so that writing it takes at most a twentieth of the time."""
        due = now_s - self._saved_s >= max(2.0, 20 * took_s)
        if due:
            self._saved_s = now_s
        return due


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
        try:
            sidecar.report_if_asked()  # before the export, which may take longer: rank 0 waits for it
            sidecar.export()
            if not more or pacing.keep_due(now_s, sidecar.unkept_records()):
                sidecar.keep()
            elif pacing.save_due(now_s, save_took_s):
                sidecar.save()
                save_took_s = time.monotonic() - now_s
        except OSError as error:
            logger.error("the run directory cannot be written: %s", error)
        if not more:
            break
        time.sleep(pacing.poll_s)
    if exporter is not None:
        sidecar.state.notes += exporter.shutdown(_SHUTDOWN_TIMEOUT_S)
    sidecar.end_exchange()
    try:
        sidecar.write_report()
        sidecar.save()
    except (OSError, RunStoreError) as error:
        logger.error("the last report could not be written: %s", error)
    sidecar.close()
    return _give_back(sidecar, lock)


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
