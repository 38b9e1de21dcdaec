"""All ring files of one node of a run: opens those that come, reads them, and knows whether more may come."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.analysis.statistics.restarts import UNRELATED
from torchlens_perf.config import Config
from torchlens_perf.errors import RingError
from torchlens_perf.run import ring
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import writer_lives
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.processes import process_started
from torchlens_perf.run.ring import Reader
from torchlens_perf.sidecar.rings.source import RingSource
from torchlens_perf.store.segments import last_sequences
from torchlens_perf.verdicts.node_state import ProcessState
from torchlens_perf.verdicts.stragglers.judged_steps import JudgedSteps

if TYPE_CHECKING:
    from torchlens_perf.analysis.statistics.restarts import Generations
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.sidecar.rings.waiting import WaitingRing
    from torchlens_perf.verdicts.node_state import NodeState

logger = logging.getLogger("torchlens_perf.sidecar")

_FIRST_RING_TIMEOUT_S = 60.0
_MISSING_RANKS_TIMEOUT_S = 30.0
_MAX_GENERATIONS = 32  # of a node's ranks, whose statistics are kept: 10 KB a rank and more
_LIST_EVERY_S = 30.0
_CLOCK_TICK_NS = 50_000_000  # more than any kernel's


class RingSources:
    """Belongs to the sidecar's thread. Iterating gives those that could be opened, in the order of their coming."""

    def __init__(
        self,
        run: RunDirectory,
        host: str,
        state: NodeState,
        generations: Generations,
        began: Callable[[Identity, int], None],
        waiting: Mapping[str, WaitingRing],
    ) -> None:
        """state: has the processes that earlier sidecars knew, as have generations; both get new ones.

        began: called before the first ring of other processes is read: of another attempt, or with other nodes.
        waiting: by path, how far rings were while this sidecar only waited.
        """
        self._run = run
        self._host = host
        self._state = state
        self._began = began
        self._sources: dict[Path, RingSource] = {}
        self._unreadable: set[Path] = set()
        self._damaged: set[Path] = set()  # and they were opened
        self._unfilled: set[Path] = set()  # registered by processes that live, and that have not said who they are
        self._kept_rings: list[Path] = []
        self._local_rings: list[Path] = []
        self._local_changes_ns: list[int] = []
        self._listed_s = -_LIST_EVERY_S
        damaged: list[str] = []
        self._kept_before = last_sequences(run, host, damaged)
        state.notes += [note for note in damaged if note not in state.notes]
        self._generations = generations
        self._waiting = waiting

    def __iter__(self) -> Iterator[RingSource]:
        return iter(self._sources.values())

    def newest(self) -> Iterator[RingSource]:
        """Those of the processes that run now, or ran last."""
        return filter(self.is_newest, self)

    def is_newest(self, source: RingSource) -> bool:
        return source.generation == self._generations.newest != UNRELATED

    def live(self) -> list[RingSource]:
        """Those that are not read to their ends."""
        return [source for source in self if not source.read_to_end]

    def read(self) -> float:
        """Copies new records out of the rings. Returns how full the fullest was, as a share of its capacity."""
        self._open_new_rings()
        fullest = 0.0
        for source in self.live():
            final = source.has_ended()
            try:
                batch = source.reader.read(final=bool(final))
            except (RingError, ValueError, IndexError, OverflowError) as error:
                self._read_none(source, error)
            else:
                if len(batch.records):
                    source.waiting.append((batch.records, batch.sequences))
                fullest = max(fullest, (len(batch.records) + batch.lost) / source.reader.capacity)
            if final:
                source.state.ended, source.read_to_end = final, True
                source.ended_monotonic_s = time.monotonic()
        return fullest

    def _read_none(self, source: RingSource, error: Exception) -> None:
        """Somebody else has written into the ring. Those of the other ranks are read."""
        if source.path not in self._damaged:
            self._damaged.add(source.path)
            rank = source.state.identity.rank
            self._state.notes.append(f"rank {rank}: its ring is damaged, and records of it are missing: {error}")
            logger.warning("%s is damaged: %s", source.path, error)

    def max_unkept_share(self) -> float:
        """Of the ring with most records that are read and in no segment yet, how much of it they would fill."""
        return max((source.unkept_share for source in self), default=0.0)

    def setting(self, name: str) -> int:
        """The value that the ranks were configured with; the default if no ring has it."""
        for source in self:
            if name in source.settings:
                return int(source.settings[name])
        return int(getattr(Config(), name))

    def of(self, key: str) -> RingSource:
        """That of a process, by Identity.key."""
        return next(source for source in self if source.state.identity.key == key)

    def has_more_to_come(self, waited_s: float, *, ends: bool = False) -> bool:
        """Whether a process runs, or may still start. waited_s: how long the sidecar has run. ends: none may start."""
        sources = list(self)
        if ends:
            return bool(self._unfilled or self.live())
        if self._unfilled:
            return True
        if not sources:
            return waited_s < _FIRST_RING_TIMEOUT_S and not self._state.processes and not self._unreadable
        if any(not source.read_to_end for source in sources):
            return True
        last = max(sources, key=lambda source: (source.generation, source.ended_monotonic_s))
        identity = last.state.identity
        launcher_began = process_started(identity.launcher_pid)
        # A process that began later has only got its number.
        launcher_lives = launcher_began is not None and launcher_began <= identity.process_started
        died = any(s.state.ended == "died" and s.generation == last.generation for s in sources)
        if identity.elastic and died and launcher_lives:
            return True  # torchrun may start them again
        present = sum(source.generation == last.generation for source in sources)
        if present < (identity.local_world_size or 0) and launcher_lives:
            return time.monotonic() - last.ended_monotonic_s < _MISSING_RANKS_TIMEOUT_S
        return False

    def has_unread_rings(self) -> bool:
        """Whether a ring has been registered that this sidecar has not read."""
        known = self._sources.keys() | self._unreadable
        return any(path not in known and path.exists() for path in self._run.registered_rings(self._host))

    def _registered(self) -> list[Path]:
        """Those in the run directory are looked for more rarely: its disk may be far away, and they come without us."""
        now_s = time.monotonic()
        if now_s - self._listed_s >= _LIST_EVERY_S:
            self._listed_s = now_s
            with contextlib.suppress(OSError):  # a disk that does not answer just now: those that are known
                self._kept_rings = self._run.kept_rings(self._host)
        changes_ns = self._run.local_changes_ns()
        if changes_ns != self._local_changes_ns:
            self._local_rings = self._run.local_rings()
            # What comes in the same tick of the file system's clock does not change the time.
            settled = max(changes_ns) < time.time_ns() - _CLOCK_TICK_NS
            self._local_changes_ns = changes_ns if settled else []
        # What was seen in the first seconds is open: it can be read, whoever has removed it since.
        seen = [Path(path) for path, ring in self._waiting.items() if ring.is_open]
        return self._kept_rings + list(dict.fromkeys([*seen, *self._local_rings]))

    def close(self) -> None:
        for source in self:
            source.reader.close()

    def _open_new_rings(self) -> None:
        self._unfilled.clear()
        for path in self._registered():
            if path in self._sources or path in self._unreadable:
                continue
            try:
                reader = self._reader(path)
                metadata = reader.metadata()
                if not metadata:
                    records = reader.counter(ring.HEAD)
                    reader.close()
                    if writer_lives(path):
                        self._unfilled.add(path)  # it is about to replace them
                        continue
                    path.unlink(missing_ok=True)  # nobody will ever know whose records these are
                    raise RingError(f"its process died while it said who it is; {records} records were in it")
                self._sources[path] = self._new_source(path, reader, metadata)
            except FileNotFoundError:
                self._unreadable.add(path)
                self._note_missing(path)
            except (OSError, RingError, ValueError, KeyError, TypeError) as error:
                self._unreadable.add(path)
                self._state.notes.append(f"ring file {path.name} could not be read: {error}")
                logger.warning("%s could not be read: %s", path, error)

    def _forget_oldest(self) -> None:
        """The state would grow with each restart of a job, and is written every few seconds.

        The report shows each rank's newest process.
        """
        known = self._state.processes
        local_ranks = len({process.identity.rank for process in known.values()})
        live = {source.state.identity.key for source in self if not source.settled or os.path.lexists(source.path)}
        ended = [key for key, process in known.items() if process.ended and key not in live]
        for key in ended[: max(0, len(known) - _MAX_GENERATIONS * local_ranks + 1)]:
            del known[key]

    def _reader(self, path: Path) -> Reader:
        seen = self._waiting.get(str(path))
        return Reader(path, os.dup(seen.descriptor)) if seen is not None and seen.is_open else Reader(path)

    def _note_missing(self, path: Path) -> None:
        why = ""
        if path.is_symlink():
            why = "it was in the memory of processes that were killed; how many records are lost is not known"
            self._run.remove_ring(path)
        elif writer_lives(path):
            why = "it was removed while its process runs, of which nothing is known"
        if why:  # else an earlier sidecar has read it to its end, and removed it
            self._state.notes.append(f"ring file {path.name} could not be read: {why}")
            logger.warning("%s could not be read: %s", path, why)

    def _new_source(self, path: Path, reader: Reader, metadata: dict[str, Any]) -> RingSource:
        identity = Identity(**metadata["identity"])
        before, generation = self._generations.newest, self._generations.of(identity)
        if generation > before:
            self._began(identity, generation)
        state = self._state.processes.get(identity.key)
        if state is None:
            state = ProcessState(identity, Anchor(*metadata["anchor"].values()), RankStatistics())
            self._forget_oldest()
            self._state.processes[identity.key] = state
        kept = self._kept_before.get(identity.key, -1)
        reader.cursor = min(kept, state.counted) + 1
        logger.info("reading %s from record %d", path, reader.cursor)
        source = RingSource(
            path, reader, state, dict(metadata["settings"]), kept, generation, JudgedSteps(state.judged_by)
        )
        reader.hold()
        if str(path) in self._waiting:
            source.waited(self._waiting[str(path)])
            self._waiting[str(path)].close()
        return source
