"""Memory: the device allocator's peak, read in one step of 16, or a CPU's resident memory, read once in 50 ms.

A step's record has the value that was read last.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchlens_perf.devices import has_devices

if TYPE_CHECKING:
    from torchlens_perf.session import Session

_DEVICE_EVERY = 16  # memory_stats() builds a dictionary of 100 counters: read in one step of so many


class MemoryHook:
    """Reads only: resetting the allocator's peak would change what the user's own calls return."""

    name = "memory"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:

        if has_devices():
            session.memory_source = "device allocator, peak"
            with session.each_step(self.name, functools.partial(self._read_device, session)):
                yield
            return
        session.memory_source = "resident memory of the process"
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

        def read_resident() -> None:
            session.memory_bytes = 0  # if reading fails, there is no number
            session.memory_bytes = int(os.pread(descriptor, 64, 0).split()[1]) * page_bytes

        try:
            with session.now_and_then(self.name, read_resident):  # reading /proc takes 11 us
                yield
        finally:
            os.close(descriptor)

    def _read_device(self, session: Session) -> None:
        import torch

        due = session.recorder.step % _DEVICE_EVERY == 0 or not session.memory_bytes
        if due and torch.cuda.is_initialized():
            session.memory_bytes = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"]
