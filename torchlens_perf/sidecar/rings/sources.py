"""All ring files of one node of a run: opens those that come, reads them, and knows whether more may come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlens_perf.analysis.node_state import ProcessState
from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.analysis.statistics.restarts import UNRELATED
from torchlens_perf.analysis.stragglers.judged_steps import JudgedSteps
from torchlens_perf.config import Config
from torchlens_perf.errors import RingError
from torchlens_perf.run import ring
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import writer_lives
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.processes import process_started
from torchlens_perf.run.ring import Reader
from torchlens_perf.sidecar.rings.segments import last_sequences
from torchlens_perf.sidecar.rings.source import RingSource

if TYPE_CHECKING:
    from torchlens_perf.analysis.node_state import NodeState
    from torchlens_perf.analysis.statistics.restarts import Generations
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.sidecar.rings.waiting import WaitingRing

logger = logging.getLogger("torchlens_perf.sidecar")

_FIRST_RING_TIMEOUT_S = 60.0
_MISSING_RANKS_TIMEOUT_S = 30.0
_LIST_EVERY_S = 5.0
_CLOCK_TICK_NS = 50_000_000  # more than any kernel's


class RingSources:
    """Belongs to the sidecar's thread. Iterating gives those that could be opened, in the order of their coming."""

    def __init__(
        self,
        run: RunDirectory,
        host: str,
        state: NodeState,
        generations: Generations,
        began: Callable[[Identity], None],
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
        self._unfilled: set[Path] = set()  # registered by processes that live, and that have not said who they are
        self._kept_rings: list[Path] = []
        self._local_rings: list[Path] = []
        self._local_changes_ns: list[int] = []
        self._listed_s = -_LIST_EVERY_S
        self._kept_before = last_sequences(run, host)
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
            batch = source.reader.read(final=bool(final))
            if len(batch.records):
                source.waiting.append((batch.records, batch.sequences))
            fullest = max(fullest, (len(batch.records) + batch.lost) / source.reader.capacity)
            if final:
                source.state.ended, source.read_to_end = final, True
                source.ended_monotonic_s = time.monotonic()
        return fullest

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

    def has_more_to_come(self, waited_s: float) -> bool:
        """Whether a process runs, or may still start. waited_s: how long the sidecar has run."""
        sources = list(self)
        if self._unfilled:
            return True
        if not sources:
            return waited_s < _FIRST_RING_TIMEOUT_S and not self._state.processes and not self._unreadable
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

    def _registered(self) -> list[Path]:
        """Those in the run directory are looked for more rarely: its disk may be far away, and they come without us."""
        now_s = time.monotonic()
        if now_s - self._listed_s >= _LIST_EVERY_S:
            self._listed_s, self._kept_rings = now_s, self._run.kept_rings(self._host)
        changes_ns = self._run.local_changes_ns()
        if changes_ns != self._local_changes_ns:
            self._local_rings = self._run.local_rings()
            # What comes in the same tick of the file system's clock does not change the time.
            settled = max(changes_ns) < time.time_ns() - _CLOCK_TICK_NS
            self._local_changes_ns = changes_ns if settled else []
        return self._kept_rings + self._local_rings

    def close(self) -> None:
        for source in self:
            source.reader.close()

    def _open_new_rings(self) -> None:
        self._unfilled.clear()
        for path in self._registered():
            if path in self._sources or path in self._unreadable:
                continue
            try:
                reader = Reader(path)
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
                self._unreadable.add(path)  # read to its end by an earlier sidecar, which removed it
            except (OSError, RingError, ValueError, KeyError, TypeError) as error:
                self._unreadable.add(path)
                self._state.notes.append(f"ring file {path.name} could not be read: {error}")
                logger.warning("%s could not be read: %s", path, error)

    def _new_source(self, path: Path, reader: Reader, metadata: dict[str, Any]) -> RingSource:
        identity = Identity(**metadata["identity"])
        before, generation = self._generations.newest, self._generations.of(identity)
        if generation > before:
            self._began(identity)
        state = self._state.processes.get(identity.key)
        if state is None:
            state = ProcessState(identity, Anchor(*metadata["anchor"].values()), RankStatistics())
            self._state.processes[identity.key] = state
        kept = self._kept_before.get(identity.key, -1)
        reader.cursor = min(kept, state.counted) + 1
        logger.info("reading %s from record %d", path, reader.cursor)
        source = RingSource(
            path, reader, state, dict(metadata["settings"]), kept, generation, JudgedSteps(state.judged_by)
        )
        if str(path) in self._waiting:
            source.waited(self._waiting[str(path)])
        return source
