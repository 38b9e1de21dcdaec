"""Find which processes of a node ran together when the attempt does not show it. Pure.

When nodes join or leave an elastic job, torch's agents restart all workers without counting a
restart. The attempt stays the same, ranks may change, and steps and sequence numbers start at 0. An
agent starts workers only after its old ones have ended, so rings are registered generation by
generation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchlens_perf.run.identity import Identity

UNRELATED = -1
"""Generation of processes that ran in parallel to the job. They are not compared with others."""


class Generations:
    """Number the processes of one node, in the order in which their rings were registered. One
    thread.
    """

    def __init__(self) -> None:
        self.newest = UNRELATED
        self._of: dict[str, int] = {}
        self._restarts = -1
        # Data of the newest generation.
        self._world_size = 0
        self._ranks: set[int] = set()
        self._workers: set[tuple[int, int | None]] = set()
        self._pids: set[int] = set()

    def of(self, identity: Identity) -> int:
        """Return the generation of a process, counted over all attempts. Repeated calls return the
        same.
        """
        if identity.key not in self._of:
            self._of[identity.key] = self._next(identity)
        return self._of[identity.key]

    def _next(self, who: Identity) -> int:
        worker = who.launcher_pid, who.local_rank
        again = who.rank in self._ranks or who.world_size != self._world_size
        # Launchers that are not elastic may give each rank the local rank 0.
        again |= who.elastic and worker in self._workers
        # A rank may have started it with its own environment, from which the child takes the same
        # rank. It runs in parallel to the ranks. But the first process of a script may also start
        # all ranks.
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
