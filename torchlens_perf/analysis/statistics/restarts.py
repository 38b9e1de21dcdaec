"""Find out which processes of a node ran together, if the attempt number does not show it. Pure.

When nodes join or leave an elastic job, torch's agents restart all workers without counting a
restart. The attempt number stays the same, ranks may change, and steps and sequence numbers start
at 0. An agent only starts new workers when its old workers have ended, so the rings of one
generation are registered before those of the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchlens_perf.run.identity import Identity

UNRELATED = -1
"""Generation of processes that ran in parallel to the job and are not compared."""


class GenerationNumbers:
    """Assigns generation numbers to the processes of one node, in the order of registration.

    Use it from one thread only.
    """

    def __init__(self) -> None:
        self.newest = UNRELATED
        self._of: dict[str, int] = {}
        self._restarts = -1
        # Attributes of the processes of the newest generation.
        self._world_size = 0
        self._ranks: set[int] = set()
        self._workers: set[tuple[int, int | None]] = set()
        self._pids: set[int] = set()

    def generation_of(self, identity: Identity) -> int:
        """Return the generation of a process. Generations are counted over all attempts.

        Repeated calls for the same process return the same number.
        """
        if identity.key not in self._of:
            self._of[identity.key] = self._assign_generation(identity)
        return self._of[identity.key]

    def _assign_generation(self, identity: Identity) -> int:
        worker = identity.launcher_pid, identity.local_rank
        again = identity.rank in self._ranks or identity.world_size != self._world_size
        # Launchers that are not elastic may give every rank the local rank 0.
        again |= identity.elastic and worker in self._workers
        # A rank may start a child process that inherits its environment and thus its rank. Such a
        # child runs in parallel to the ranks. If a script's first process starts all ranks, the
        # world size grows, which shows that they are not such children.
        is_child = (
            again
            and identity.launcher_pid in self._pids
            and identity.world_size <= self._world_size
        )
        if identity.restarts < self._restarts or (identity.restarts == self._restarts and is_child):
            return UNRELATED
        if again or identity.restarts > self._restarts:
            self._restarts, self._world_size = identity.restarts, identity.world_size
            for known in (self._ranks, self._workers, self._pids):
                known.clear()
            self.newest += 1
        self._ranks.add(identity.rank)
        self._workers.add(worker)
        self._pids.add(identity.pid)
        return self.newest
