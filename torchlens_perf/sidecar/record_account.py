"""Process records from the rings: add them to statistics, pass them on, and write segments.

The monitor, which judges the ranks, and the exporter receive the records.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.analysis.statistics.restarts import UNRELATED
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.errors import RingError
from torchlens_perf.exporters import ExportBatch, build_export_batch
from torchlens_perf.run import ring
from torchlens_perf.run.rank_facts import RankFacts
from torchlens_perf.run.ring import Kind
from torchlens_perf.sidecar.rings.error_files import add_reported_failures
from torchlens_perf.sidecar.rings.oom_files import OomTableReader
from torchlens_perf.sidecar.schedule import MAX_UNKEPT_RECORDS
from torchlens_perf.sidecar.stops import SleepObserver
from torchlens_perf.sidecar.telemetry.log import telemetry_disk_share
from torchlens_perf.store.segments import RecordChunk, SegmentWriter

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.run.records import StepTable
    from torchlens_perf.sidecar.contained_errors import ContainedErrors
    from torchlens_perf.sidecar.job_monitor import JobMonitor
    from torchlens_perf.sidecar.rings.source import RingSource
    from torchlens_perf.sidecar.rings.sources import RingSources
    from torchlens_perf.verdicts.node_state import NodeState

_ENCODED_AT_ONCE = 1 << 15  # records


class RecordProcessor:
    """Processor of a node's records: statistics, export and storage. Not thread-safe."""

    def __init__(
        self,
        run: RunDirectory,
        state: NodeState,
        sources: RingSources,
        monitor: JobMonitor,
        errors: ContainedErrors,
        exports: Callable[[], bool],
    ) -> None:
        """exports: returns True if there is an exporter now."""
        self.unexported: list[ExportBatch] = []
        """Batches to export. The caller removes exported batches."""
        self.disk_failed = False
        """True if the last segment could not be written."""
        self._run = run
        self._state = state
        self._sources = sources
        self._monitor = monitor
        self._errors = errors
        self._exports = exports
        self._unkept: list[RecordChunk] = []
        self._writer: SegmentWriter | None = None
        self._ooms = OomTableReader(run)
        self.own_stops = SleepObserver()
        """Observer of this process, if the sidecar sleeps between its rounds."""

    @property
    def unsaved_records(self) -> int:
        """Number of records that are counted but not in a segment yet."""
        encoded = 0 if self._writer is None else self._writer.encoded_records
        return self._unencoded_records + encoded

    @property
    def _unencoded_records(self) -> int:
        return sum(len(chunk.records) for chunk in self._unkept)

    def count_records(self) -> None:
        """Add complete steps to the statistics, and all remaining records of ended processes."""
        ended = False
        for source in self._sources:
            if source.settled:
                continue
            ended |= source.read_to_end
            with self._errors.contain(f"counting the records of rank {source.state.identity.rank}"):
                if not source.read_to_end:
                    self._sources.read_new_records(source)
                self._update_process(source)
                self._count_steps(source)
                # Encoded records take less memory. While the disk fails, the next segment must not
                # grow.
                if not self.disk_failed and self._unencoded_records >= _ENCODED_AT_ONCE:
                    self._encode_records()
            if source.read_to_end:
                source.settled = True
                if self._sources.is_newest(source):
                    self._monitor.end_process(source)
                self._state.join.mark_ended(source.state.identity.rank, source.generation)
        self._state.join.join()
        with self._errors.contain("reading what held a device's memory"):
            self._ooms.add_new_tables(self._state.processes, at_once=ended)
        with self._errors.contain("reading torchrun's error files"):
            add_reported_failures(self._sources.newest_rings())
        # While the disk fails, keep only the newest records, and count the dropped ones.
        if self.disk_failed:
            while len(self._unkept) > 1 and self._unencoded_records > MAX_UNKEPT_RECORDS:
                older = 0 if self._writer is None else self._writer.discard_added()
                self._state.unwritten_records += older or len(self._unkept.pop(0).records)

    def _update_process(self, source: RingSource) -> None:
        """Copy the ring's counters, and read the facts that the process has published since."""
        reader, state = source.reader, source.state
        with reader.frozen_header():
            state.unbalanced = reader.read_counter(ring.UNBALANCED)
            state.too_deep = reader.read_counter(ring.TOO_DEEP)
            state.names_lost = reader.read_counter(ring.NAMES_LOST)
            state.internal_errors = reader.read_counter(ring.INTERNAL_ERRORS)
            state.tool_ns = reader.read_counter(ring.TOOL_NS)
            state.made_steps = reader.read_counter(ring.STEP)
        metadata = reader.read_changed_metadata()
        if metadata:
            try:
                state.facts = RankFacts.from_metadata(metadata)
            except RingError as error:
                # The facts that were read before stay.
                self._state.notes.append(f"ring file {source.path.name}: {error}")
        if state.facts.simulated:
            # The ring's state was polled before its facts. The node's clock is not the rank's.
            state.seen_ns = 0
        state.failure = state.facts.failure or state.failure
        if state.ended == "closed" and state.failure is not None:
            state.ended = "failed"
        if state.ended == "died":
            state.open_spans = [span.name for span in reader.read_open_spans()[1:]]

    def write_segment(self) -> None:
        """Write all counted records that are not in a segment yet.

        Raises OSError. After an error, the next call writes the records.
        """
        if not self.unsaved_records:
            return
        has_failed = self.disk_failed
        self.disk_failed = True  # Set to False below, after a successful write.
        if has_failed:
            self._write_encoded_records()
        self._encode_records()
        self._write_encoded_records()
        self.disk_failed = False

    def _encode_records(self) -> None:
        """Encode the counted records for the next segment. After an error, they stay in memory."""
        if not self._unkept:
            return
        writer = self._open_writer()
        encoded = writer.encoded_records
        try:
            writer.add_chunks(self._unkept)
        except BaseException:
            self._state.unwritten_records += encoded
            raise
        self._unkept.clear()

    def _write_encoded_records(self) -> None:
        writer = self._open_writer()
        dropped = writer.dropped_segments
        try:
            written = writer.write_added()
            for source in self._sources:
                source.kept = written.get(source.state.identity.key, source.kept)
        finally:
            self._state.dropped_segments += writer.dropped_segments - dropped

    def _open_writer(self) -> SegmentWriter:
        if self._writer is None:
            disk_bytes = self._sources.settings.disk_bytes
            self._writer = SegmentWriter(
                self._run, self._state.host, disk_bytes - telemetry_disk_share(disk_bytes)
            )
        return self._writer

    def _count_steps(self, source: RingSource) -> None:
        state, statistics = source.state, source.state.statistics
        records, sequences = source.take_whole_steps(time.monotonic())
        if not len(records):
            statistics.lost += source.drop_oldest_waiting(MAX_UNKEPT_RECORDS)
            if source.read_to_end:
                statistics.lost += source.advance_counted(source.reader.cursor - 1, 0)
            return
        source.flag_stopped_steps(records, self.own_stops.stops)
        names = list(source.reader.names())
        # After a restart of the sidecar, the masks of uncounted and of unsaved records may differ,
        # because state and segments are saved at different times.
        uncounted, unkept = sequences > state.counted, sequences > source.kept
        counted = records if uncounted.all() else records[uncounted]
        steps = assemble_steps(counted)
        last = source.reader.cursor - 1 if source.read_to_end else int(sequences[-1])
        state.add_records(
            counted, steps, names, source.advance_counted(last, len(counted)), source.samples
        )
        source.samples = [
            each for each in source.samples if each.end_ns > (statistics.ended_ns or 0)
        ]
        self._monitor.add_steps(source, counted, steps, newest=self._sources.is_newest(source))
        self._join_collectives(source, counted, steps, names)
        if self._exports():
            at_once = self._monitor.job.traces.add_steps(
                source, self._sources, counted, names, steps, time.monotonic()
            )
            self.unexported.append(build_export_batch(state, counted, names, steps, at_once))
        if unkept.any():
            same = np.array_equal(unkept, uncounted)
            kept = counted if same else records[unkept]
            kept_steps = steps if same else assemble_steps(kept)
            self._unkept.append(
                RecordChunk(source.origin, kept, sequences[unkept], names, kept_steps)
            )
        statistics.lost += source.drop_oldest_waiting(MAX_UNKEPT_RECORDS)

    def _join_collectives(
        self,
        source: RingSource,
        records: npt.NDArray[np.void],
        steps: StepTable,
        names: list[str],
    ) -> None:
        identity, state = source.state.identity, source.state
        if source.generation == UNRELATED:
            return
        if not source.joins:
            source.joins = True
            self._state.join.set_ranks(self._ranks_of_node(source), source.generation)
        delayed = source.find_delayed_steps(steps)
        records = records[records["kind"] == Kind.COLLECTIVE]
        # Leave out collectives of warm-up steps, which are not typical.
        records = records[records["step"] >= (state.statistics.first_step or 0) + WARM_UP_STEPS]
        self._state.join.add_records(
            identity.rank, records, names, state.facts.groups, source.generation, identity.key,
            np.isin(records["step"], delayed),
        )  # fmt: skip

    def _ranks_of_node(self, source: RingSource) -> set[int]:
        """Return the ranks of this node, including ranks without a ring so far.

        Ranks without a ring are only known if the launcher numbers the node's ranks consecutively.
        """
        here = [
            other.state.identity for other in self._sources if other.generation == source.generation
        ]
        ranks = {identity.rank for identity in here}
        for identity in here:
            if identity.local_rank is None or identity.local_world_size is None:
                return ranks
            first = identity.rank - identity.local_rank
            block = set(range(first, first + identity.local_world_size))
            if not ranks <= block:
                return ranks
        return ranks | block
