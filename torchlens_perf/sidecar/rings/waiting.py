"""A ring file before it is read. Imports next to nothing, as the sidecar's first seconds need it (start/wait.py)."""

from __future__ import annotations

import os

from torchlens_perf.run.processes import process_started
from torchlens_perf.run.rings import memory

FULL = 1 / 2  # share of a ring from which on it is read: the rest must last until that is done
# Words of a ring's header, and how it begins: as in run/ring.py, which takes long to import.
MAGIC, HEAD, STEP, STATE, CLOSED = b"TLPRING\0", 8, 9, 13, 1


class WaitingRing:
    """A ring file that is not read yet, as far as its header tells."""

    def __init__(self, path: str, descriptor: int | None = None) -> None:
        """descriptor: of one that is open. Raises OSError where it cannot be opened, ValueError where it is none."""
        self.step = self.head = -1
        self.step_s = self.mark_s = 0.0
        """When this step, and the last record, was first seen: CLOCK_MONOTONIC."""
        pid, _, started = path.removesuffix(".ring").rpartition("-")
        self._pid, self._started = int(pid.rpartition("-")[2]), int(started)  # see Identity.key
        self.descriptor = memory.open_to_read(path) if descriptor is None else descriptor
        self.is_open = True
        header = os.pread(self.descriptor, 24, 0)
        self._capacity = int.from_bytes(header[16:24], "little")
        if header[: len(MAGIC)] != MAGIC or not self._capacity:
            self.close()
            raise ValueError(f"{path} is no ring file")
        memory.hold(path, self.descriptor)

    def update(self, now_s: float) -> bool:
        """Takes note of how far it is. Returns whether it should be read now."""
        header = os.pread(self.descriptor, 8 * (STATE + 1), 0)
        head, step, state = (int.from_bytes(header[8 * word : 8 * word + 8], "little") for word in (HEAD, STEP, STATE))
        if step != self.step:
            self.step, self.step_s = step, now_s
        if head != self.head:
            self.head, self.mark_s = head, now_s
        return state == CLOSED or self.filled >= FULL

    @property
    def filled(self) -> float:
        """Which share of its capacity has been written, when it was last looked at."""
        return self.head / self._capacity

    def writer_lives(self) -> bool:
        return process_started(self._pid) == self._started

    def close(self) -> None:
        """Once it is read by another one: what lies in anonymous memory is gone without. Again is harmless."""
        if self.is_open:
            self.is_open = False
            os.close(self.descriptor)
