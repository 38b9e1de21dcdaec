"""Record the memory of a device's allocator, or the resident memory of the process.

A step's record contains the last reading.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchlens_perf.recorder.devices import has_cuda_devices
from torchlens_perf.run.processes import read_kernel_bytes

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session


class MemoryHook:
    """Hook that reads memory a few times a second."""

    name = "memory"

    def __init__(self, *, history: bool = False) -> None:
        """history: record stacks of device memory allocations, see Config.memory."""
        self._history = history

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        if has_cuda_devices():
            from torchlens_perf.cuda.memory import record_device_memory

            with record_device_memory(session, self.name, history=self._history):
                yield
            return
        if self._history:
            session.note(
                "memory history is not recorded: there is no device with an allocator that"
                " supports it"
            )
        session.facts.memory_source = "resident memory of the process"
        session.publish()
        page_bytes = os.sysconf("SC_PAGE_SIZE")

        def read_resident() -> None:
            # 0 means unknown, and remains if the reading fails.
            session.step.set_memory(0)
            resident = int(read_kernel_bytes("/proc/self/statm").split()[1])
            session.step.set_memory(resident * page_bytes)

        with session.run_throttled(self.name, read_resident):  # Reading /proc takes 15 us.
            yield
