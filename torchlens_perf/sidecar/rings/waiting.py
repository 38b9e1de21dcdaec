"""Watch a ring file's header before the ring is read.

This module has few imports, because start/wait.py uses it in the sidecar's first seconds.
"""

from __future__ import annotations

import os

from torchlens_perf.run.processes import process_start_ticks
from torchlens_perf.run.rings import memory
from torchlens_perf.sidecar.ends import EndObserver
from torchlens_perf.sidecar.stops import StopObserver

# The first bytes of a ring file, and positions of words in its header. They are copies from
# run/ring.py, which takes long to import.
MAGIC, HEAD, STEP, STATE, CLOSED = b"TLPRING\0", 8, 9, 13, 1
# Reading starts at this fill level of a ring, which must not overflow during the imports.
FILLING = 1 / 4


class RingProgress:
    """The progress of a ring's process, as last seen, and its stops and its end."""

    def __init__(self, pid: int, started: int, step_s: float = 0.0) -> None:
        self.step = self.head = -1
        self.step_s, self.mark_s = step_s, 0.0
        """Times on CLOCK_MONOTONIC when the current step and the last record were first seen."""
        self.observer = StopObserver(pid)
        self.end_observer = EndObserver(pid, started)

    def update(self, step: int, head: int, now_s: float) -> bool:
        """Set the step in progress and the number of records. Return True if there are new ones."""
        if step != self.step:
            self.step, self.step_s = step, now_s
        moves = head != self.head
        if moves:
            self.head, self.mark_s = head, now_s
        return moves


class WaitingRing:
    """A ring file that is not read yet. Its header shows the position and the process's state."""

    def __init__(self, path: str) -> None:
        """Raises OSError if the file cannot be opened, and ValueError if it is not a ring file."""
        self.new_share = 0.0
        """Share of the ring's capacity that was written between the last two polls."""
        pid, _, started = path.removesuffix(".ring").rpartition("-")
        # These parts of the file name come from Identity.key.
        self._pid, self._started = int(pid.rpartition("-")[2]), int(started)
        self.progress = RingProgress(self._pid, self._started)
        self.poll_due_s = float("inf")
        """Time in seconds until the next poll is due because the process is stopped."""
        self.descriptor = memory.open_to_read(path)
        self.is_open = True
        header = os.pread(self.descriptor, 24, 0)
        self._capacity = int.from_bytes(header[16:24], "little")
        if header[: len(MAGIC)] != MAGIC or not self._capacity:
            self.close()
            raise ValueError(f"{path} is not a ring file")
        memory.announce_open_ring(path, self.descriptor)

    def poll_header(self, now_s: float) -> bool:
        """Read the ring's header. Return True if its process has closed it."""
        header = os.pread(self.descriptor, 8 * (STATE + 1), 0)
        head, step, state = (
            int.from_bytes(header[8 * word : 8 * word + 8], "little")
            for word in (HEAD, STEP, STATE)
        )
        self.new_share = (head - max(0, self.progress.head)) / self._capacity
        moves = self.progress.update(step, head, now_s)
        self.poll_due_s = self.progress.observer.poll(moves=moves)
        return state == CLOSED

    @property
    def fill_level(self) -> float:
        """Share of the ring's capacity that was in use at the last call of poll_header()."""
        return self.progress.head / self._capacity

    def is_writer_alive(self) -> bool:
        return process_start_ticks(self._pid) == self._started

    def close(self) -> None:
        """Close the descriptor, after a Reader has opened its own. Later calls have no effect.

        A ring in anonymous memory is lost with its last descriptor.
        """
        if self.is_open:
            self.is_open = False
            os.close(self.descriptor)
