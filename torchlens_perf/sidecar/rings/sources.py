"""Open and read all ring files of one node of a run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.analysis.statistics.restarts import UNRELATED, GenerationNumbers
from torchlens_perf.errors import RingError
from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.run import ring
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory, is_writer_running
from torchlens_perf.run.file_checks import CLOCK_TICK_NS
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.processes import process_start_ticks
from torchlens_perf.run.rank_facts import RankFacts, SidecarSettings, decode_path
from torchlens_perf.run.ring import RingReader
from torchlens_perf.sidecar.rings.source import MAX_UNREAD_SHARE, RingSource
from torchlens_perf.sidecar.rings.waiting import RingProgress, WaitingRing
from torchlens_perf.store.segments import read_last_sequences
from torchlens_perf.verdicts.node_state import NodeState, ProcessState
from torchlens_perf.verdicts.stragglers.judged_steps import JudgedSteps

_MISSING_RANKS_TIMEOUT_S = 30.0
_NO_RINGS = "no ring file of this node was found: it was removed, or no rank has recorded"
# The state keeps statistics of this many process generations. Each takes 10 KB a rank or more.
_MAX_GENERATIONS = 32
_LIST_INTERVAL_S = 30.0


class RingSources:
    """The node's ring files. Iterates over opened rings in the order of opening."""

    def __init__(
        self,
        run: RunDirectory,
        host: str,
        state: NodeState,
        generations: GenerationNumbers,
        began: Callable[[Identity, int], None],
        waiting: Mapping[str, WaitingRing],
        clock: Callable[[], float],
    ) -> None:
        """state, generations: contain processes of earlier sidecars. New processes are added.

        began: called before the first ring of a new process generation is read.
        waiting: rings that start/wait.py has opened before this sidecar began to read, by path.
        clock: a monotonic clock in seconds.
        """
        self._run = run
        self._host = host
        self._state = state
        self._began = began
        self._sources: dict[Path, RingSource] = {}
        self._unreadable: set[Path] = set()
        self._damaged: set[Path] = set()  # opened rings with invalid contents
        self._unfilled: set[Path] = set()  # rings of live processes that lack metadata
        self._kept_rings: list[Path] = []
        self._local_rings: list[Path] = []
        self._local_changes_ns: list[int] = []
        self._listed_s = -_LIST_INTERVAL_S
        damaged: list[str] = []
        self._saved_before = read_last_sequences(run, host, damaged)
        state.notes += [note for note in damaged if note not in state.notes]
        self._generations = generations
        self._waiting = waiting
        self._clock = clock

    def __iter__(self) -> Iterator[RingSource]:
        return iter(self._sources.values())

    def newest_rings(self) -> Iterator[RingSource]:
        """Iterate over the rings of the newest process generation."""
        return filter(self.is_newest, self)

    def is_newest(self, source: RingSource) -> bool:
        return source.generation == self._generations.newest != UNRELATED

    def unfinished_rings(self) -> list[RingSource]:
        """Return the rings that have not been read to their end."""
        return [source for source in self if not source.read_to_end]

    def poll_rings(self) -> float:
        """Open new rings, and look how full all rings are. Read those that are full or have ended.

        Return the highest share of a ring that is new since the last call.
        """
        self._open_new_rings()
        fullest, now_s = 0.0, self._clock()
        for source in self.unfinished_rings():
            final, new_share = source.poll_progress(now_s)
            source.note_if_running(final, time.monotonic_ns())
            fullest = max(fullest, new_share)
            unread = source.head - source.reader.cursor
            if final or unread > MAX_UNREAD_SHARE * source.reader.capacity:
                self.read_new_records(source, final=bool(final))
            if final:
                source.state.ended, source.read_to_end = final, True
                source.state.end = source.progress.end_observer.read_end()
                source.ended_monotonic_s = self._clock()
        return fullest

    def read_new_records(self, source: RingSource, *, final: bool = False) -> None:
        """Copy new records out of a ring. final: its process has ended."""
        try:
            batch = source.reader.read_records(final=final)
        except (RingError, ValueError, IndexError, OverflowError) as error:
            self._note_damage(source, error)
        else:
            if len(batch.records):
                source.waiting.append((batch.records, batch.sequences))

    def _note_damage(self, source: RingSource, error: Exception) -> None:
        """Note that another program has damaged a ring. Rings of other ranks are still read."""
        if source.path not in self._damaged:
            self._damaged.add(source.path)
            rank = source.state.identity.rank
            self._state.notes.append(
                f"rank {rank}: its ring is damaged, and records of it are missing: {error}"
            )
            logger.warning("%s is damaged: %s", source.path, error)

    def waiting_records(self) -> int:
        """Return the number of records that were read but not counted."""
        return sum(len(records) for source in self for records, _ in source.waiting)

    @property
    def settings(self) -> SidecarSettings:
        """The settings of the first rank, or the defaults without a ring."""
        return next((source.state.facts.settings for source in self), SidecarSettings())

    def may_get_more_records(self, *, ends: bool = False) -> bool:
        """Return True if a process runs or may still start. ends: do not wait for new processes."""
        if self._unfilled or self.unfinished_rings():
            return True
        sources = list(self)
        # A rank registers its ring before it starts the sidecar.
        if ends or not sources:
            return False
        last = max(sources, key=lambda source: (source.generation, source.ended_monotonic_s))
        identity = last.state.identity
        launcher_began = process_start_ticks(identity.launcher_pid)
        # If the process with the launcher's pid started after the rank, it is another process.
        launcher_lives = launcher_began is not None and launcher_began <= identity.process_started
        failed = any(
            s.state.ended in ("died", "failed") and s.generation == last.generation for s in sources
        )
        if identity.elastic and failed and launcher_lives:
            return True  # torchrun may restart the processes.
        present = sum(source.generation == last.generation for source in sources)
        if present < (identity.local_world_size or 0) and launcher_lives:
            return self._clock() - last.ended_monotonic_s < _MISSING_RANKS_TIMEOUT_S
        return False

    def has_unread_rings(self) -> bool:
        """Return True if a registered ring exists that this sidecar has not read."""
        known = self._sources.keys() | self._unreadable
        return any(
            path not in known and path.exists() for path in self._run.registered_rings(self._host)
        )

    def _list_registered_rings(self) -> list[Path]:
        """Return the paths of all registered rings. The run directory is rarely listed."""
        now_s = self._clock()
        if now_s - self._listed_s >= _LIST_INTERVAL_S:
            self._listed_s = now_s
            with contextlib.suppress(OSError):  # After an error, use the last list.
                self._kept_rings = self._run.rings_in_run_directory(self._host)
        changes_ns = self._run.local_change_times_ns()
        if changes_ns != self._local_changes_ns:
            self._local_rings = self._run.local_rings()
            # A second ring in the same clock tick would not change the folder's modification time.
            settled = max(changes_ns) < time.time_ns() - CLOCK_TICK_NS
            self._local_changes_ns = changes_ns if settled else []
        # Rings that start/wait.py has opened can be read even if their files were removed.
        seen = [Path(path) for path, ring in self._waiting.items() if ring.is_open]
        return self._kept_rings + list(dict.fromkeys([*seen, *self._local_rings]))

    def close(self) -> None:
        for source in self:
            source.reader.close()
            source.progress.end_observer.close()

    def _open_new_rings(self) -> None:
        self._unfilled.clear()
        paths = self._list_registered_rings()
        if not (paths or self._sources or self._state.processes or _NO_RINGS in self._state.notes):
            self._state.notes.append(_NO_RINGS)
            logger.warning("%s", _NO_RINGS)
        for path in paths:
            if path in self._sources or path in self._unreadable:
                continue
            try:
                seen = self._waiting.get(str(path))
                reader = RingReader(
                    path, os.dup(seen.descriptor) if seen and seen.is_open else None
                )
                metadata = reader.read_metadata()
                if not metadata:
                    records = reader.read_counter(ring.HEAD)
                    reader.close()
                    if is_writer_running(path):
                        self._unfilled.add(path)  # The process will soon write its metadata.
                        continue
                    path.unlink(missing_ok=True)  # Without metadata, the records' rank is unknown.
                    raise RingError(
                        f"its process died before it wrote its metadata; {records} records were"
                        " in it"
                    )
                self._sources[path] = self._create_source(path, reader, metadata)
            except FileNotFoundError:
                self._unreadable.add(path)
                self._note_missing(path)
            except (OSError, RingError, ValueError, KeyError, TypeError) as error:
                self._unreadable.add(path)
                self._state.notes.append(f"ring file {path.name} could not be read: {error}")
                logger.warning("%s could not be read: %s", path, error)

    def _drop_oldest_processes(self) -> None:
        """Remove the oldest ended processes from the state if it contains too many.

        The state grows with each restart of a job, and is written every few seconds. The report
        shows only the newest process of each rank.
        """
        known = self._state.processes
        local_ranks = len({process.identity.rank for process in known.values()})
        live = {
            source.state.identity.key
            for source in self
            if not source.settled or os.path.lexists(source.path)
        }
        ended = [key for key, process in known.items() if process.ended and key not in live]
        for key in ended[: max(0, len(known) - _MAX_GENERATIONS * local_ranks + 1)]:
            del known[key]

    def _note_missing(self, path: Path) -> None:
        why = ""
        if path.is_symlink():
            why = (
                "it was in the memory of processes that were killed; how many records are lost is"
                " not known"
            )
            self._run.remove_ring(path)
        elif path.stem not in self._state.processes and path.stem not in self._saved_before:
            why = "it was removed before its records were read"
        # Otherwise an earlier sidecar has read the ring to its end and removed it.
        if why:
            self._state.notes.append(f"ring file {path.name} could not be read: {why}")
            logger.warning("%s could not be read: %s", path, why)

    def _create_source(
        self, path: Path, reader: RingReader, metadata: dict[str, Any]
    ) -> RingSource:
        identity, facts = Identity(**metadata["identity"]), RankFacts.from_metadata(metadata)
        before, generation = self._generations.newest, self._generations.generation_of(identity)
        if generation > before:
            self._began(identity, generation)
        state = self._state.processes.get(identity.key)
        if state is None:
            state = ProcessState(identity, Anchor(**metadata["anchor"]), RankStatistics())
            self._drop_oldest_processes()
            self._state.processes[identity.key] = state
        state.facts = facts
        kept, waited = self._saved_before.get(identity.key, -1), self._waiting.get(str(path))
        reader.cursor = min(kept, state.counted) + 1
        logger.info("reading %s from record %d", path, reader.cursor)
        source = RingSource(
            path,
            reader,
            state,
            kept,
            generation,
            JudgedSteps(state.judged_by),
            RingProgress(identity.pid, identity.process_started, self._clock())
            if waited is None
            else waited.progress,
        )
        reader.announce_open()
        if waited is not None:
            waited.close()
        if waited is not None or is_writer_running(path):
            source.folder = decode_path(facts.folder)
        return source
