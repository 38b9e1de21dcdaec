"""Which processes of a node ran together, where the attempt does not show it. Pure.

When nodes join or leave an elastic job, torch's agents start all of their workers again without counting it as a
restart: the attempt stays the same, ranks may be others, and steps and sequence numbers begin at 0. An agent starts no
worker before its old ones have ended, so that rings are registered generation by generation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchlens_perf.run.identity import Identity

UNRELATED = -1
"""The generation of processes that ran beside the others: they are compared with none."""


class Generations:
    """Numbers the processes of one node, given in the order in which their rings were registered. One thread."""

    def __init__(self) -> None:
        self.newest = UNRELATED
        self._of: dict[str, int] = {}
        self._restarts = -1
        # Of the newest generation.
        self._world_size = 0
        self._ranks: set[int] = set()
        self._workers: set[tuple[int, int | None]] = set()
        self._pids: set[int] = set()

    def of(self, identity: Identity) -> int:
        """The generation of a process, counted on over attempts; the same whenever it is asked for again."""
        if identity.key not in self._of:
            self._of[identity.key] = self._next(identity)
        return self._of[identity.key]

    def _next(self, who: Identity) -> int:
        worker = who.launcher_pid, who.local_rank
        again = who.rank in self._ranks or who.world_size != self._world_size
        again |= who.elastic and worker in self._workers  # other launchers may give each rank the local rank 0
        # A rank may have started it, with the environment that makes it take itself for that rank: it runs beside the
        # others. But the first process of a script may start all of the ranks.
        is_child = again and who.launcher_pid in self._pids and who.world_size <= self._world_size
        if who.restarts < self._restarts or (who.restarts == self._restarts and is_child):
            return UNRELATED
        if again or who.restarts > self._restarts:
            self._restarts, self._world_size = who.restarts, who.world_size
            for known in (self._ranks, self._workers, self._pids):
                known.clear()
            self.newest += 1
        self._ranks.add(who.rank)
        self._workers.add(worker)
        self._pids.add(who.pid)
        return self.newest
