"""Read the device allocator a few times a second.

A step's record contains the peak of the last reading. Other numbers of the allocator have separate
MEMORY records in the step in which they were read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torchlens_perf.cuda.out_of_memory import OutOfMemoryHook
from torchlens_perf.errors import DeviceError, HookUnavailable
from torchlens_perf.recorder.devices import find_cuda_device_in_use
from torchlens_perf.run.memory_readings import (
    LIMIT,
    has_allocator_statistics,
    iter_memory_statistics,
)
from torchlens_perf.run.ring import Kind

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

# Minimum pause between readings, as a multiple of the last reading's cost: memory_stats() builds a
# dictionary of 100 counters.
_MIN_IDLE_RATIO = 1000
_MEMORY = int(Kind.MEMORY)


@contextmanager
def record_device_memory(session: Session, name: str, *, history: bool) -> Iterator[None]:
    """Read the allocator, and write tables at out-of-memory errors, while the context is active.

    name: name of the hook. The allocator's peak, which the job may read, is never reset.
    """
    session.facts.memory_source = "device allocator, peak"
    session.publish()
    with (
        session.run_throttled(name, AllocatorReader(session).record_if_due),
        ExitStack() as attached,
    ):
        try:
            attached.enter_context(OutOfMemoryHook(history=history).attach(session))
        except HookUnavailable as unavailable:
            session.note(f"{OutOfMemoryHook.name}: {unavailable}")
        yield


class AllocatorReader:
    """Reader of the memory allocator of the device that the process computes on."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._device: int | None = None
        self._backend = ""
        self._not_before_ns = 0

    def record_if_due(self) -> None:
        """Read the allocator and record its numbers, unless the last reading is recent."""
        session, recorder = self._session, self._session.recorder
        begin_ns = recorder.now_ns()
        if begin_ns < self._not_before_ns or not self._is_device_readable():
            return
        import torch

        session.step.set_memory(0)  # 0 means unknown, and remains if the reading fails.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        limit = torch.cuda.get_device_properties(self._device).total_memory
        limit = int(limit * torch.cuda.get_per_process_memory_fraction(self._device))
        found = [*iter_memory_statistics(stats, self._backend), (LIMIT, limit, 0)]
        took_ns = recorder.now_ns() - begin_ns
        for name, value0, value1 in found:
            recorder.record_span(
                _MEMORY, session.intern(name), begin_ns, took_ns, 0, value0, value1
            )
            if name == "allocated":
                session.step.set_memory(value1)
        self._not_before_ns = begin_ns + _MIN_IDLE_RATIO * took_ns

    def _is_device_readable(self) -> bool:
        """Return True if the process uses a device whose allocator can be read.

        The device is unknown until torch has allocated memory on a device.
        """
        if self._device is not None:
            return has_allocator_statistics(self._backend)
        import torch

        try:
            self._device = find_cuda_device_in_use()
        except DeviceError:
            self._device = torch.cuda.current_device()
            self._session.note(
                f"memory is that of device {self._device}; this process also computes on other"
                " devices"
            )
        if self._device is None:
            return False
        self._backend = torch.cuda.get_allocator_backend()
        if not has_allocator_statistics(self._backend):
            self._session.note(
                f"memory is not measured: the job's own allocator ({self._backend}) does not"
                " report it"
            )
        return has_allocator_statistics(self._backend)
