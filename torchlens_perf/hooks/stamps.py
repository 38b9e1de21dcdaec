"""Device sections: their stamps, and once a second what the device has made of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchlens_perf import device_sections
from torchlens_perf.cuda import kernels
from torchlens_perf.cuda.driver import Driver
from torchlens_perf.cuda.reduction import Reduced, to_window
from torchlens_perf.cuda.stamps import NO_SLOT, DeviceRing
from torchlens_perf.errors import DeviceError, guard
from torchlens_perf.ring import Kind
from torchlens_perf.sketch_records import to_records

if TYPE_CHECKING:
    from torchlens_perf.session import Session

REDUCE_EVERY_NS = 1_000_000_000
_LAST_PATIENCE_NS = 5_000_000  # that the end of a watch asks for the last result
_rings: dict[int, DeviceRing] = {}  # by device, for the life of the process: captured graphs stamp into them


class Device:
    """The current device of torch's, as stamps need it. CUDA, not HIP: the kernels read NVIDIA's clock."""

    def stream(self) -> int:
        """The current stream's handle."""
        import torch

        return int(torch.cuda.current_stream().cuda_stream)

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        import torch

        return bool(torch.cuda.is_current_stream_capturing())

    def ring(self) -> DeviceRing:
        """The process's ring on this device, made at the first call. Raises DeviceError."""
        import torch

        device = torch.cuda.current_device()
        if device not in _rings:
            _rings[device] = DeviceRing(Driver(), kernels.load(device), self.stream())
        return _rings[device]

    def earlier_ring(self) -> DeviceRing | None:
        """The ring that an earlier watch has made: graphs may still stamp into it."""
        import torch

        return _rings.get(torch.cuda.current_device()) if _rings else None


class StampHook:
    """Stands behind device_section() while a watch records."""

    name = "device sections"

    def __init__(self, device: Device, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._device = device
        self._now_ns = now_ns

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        stamper = SessionStamper(session, self._device, self._now_ns)
        device_sections.set_stamper(stamper)
        try:
            with session.each_step(self.name, stamper.step_ended):
                yield
        finally:
            device_sections.set_stamper(None)
            with guard("the device sections' last times"):
                stamper.end()


class SessionStamper:
    """A device_sections.Stamper, on the training thread."""

    def __init__(self, session: Session, device: Device, now_ns: Callable[[], int]) -> None:
        self._session = session
        self._device = device
        self._now_ns = now_ns
        self._ring: DeviceRing | None = None
        self._gone = False  # there can be no ring
        self._reduced_ns = 0
        self._discard = False  # the next result: of what was stamped before this watch

    @guard("a device section")
    def open(self, name: str) -> None:
        ring = self._ring or self._find_ring(name)
        if ring is None:
            return
        slot = ring.slot(name)
        if slot == NO_SLOT:
            self._session.note(f"device_section {name!r}: not timed, {len(ring.names)} names are in use already")
        else:
            ring.stamp(NO_SLOT, slot, self._device.stream())

    @guard("a device section")
    def close(self, name: str) -> None:
        ring = self._ring
        slot = NO_SLOT if ring is None else ring.slot(name)
        if ring is not None and slot != NO_SLOT:
            ring.stamp(slot, NO_SLOT, self._device.stream())

    def step_ended(self) -> None:
        """Takes a result that has arrived, and once a second asks for the next one. Waits for nothing."""
        ring = self._ring or self._device.earlier_ring()
        if ring is None or self._device.capturing():
            return
        if self._ring is None:
            self._begin_with(ring)
        self._collect(ring)
        now_ns = self._now_ns()
        if now_ns - self._reduced_ns >= REDUCE_EVERY_NS and ring.reduce(self._device.stream()):
            self._reduced_ns = now_ns

    def end(self) -> None:
        """The rest: asks for some milliseconds; a device that is busy for longer is not waited for."""
        ring = self._ring
        if ring is None or self._session.recorder.closed or self._device.capturing():
            return
        until_ns = self._now_ns() + _LAST_PATIENCE_NS
        asked = False
        while self._now_ns() < until_ns:
            arrived = self._collect(ring)
            if asked and arrived:
                return
            asked = asked or ring.reduce(self._device.stream())
        self._session.note("device sections: the last second of them was not known when the watch ended")

    def _find_ring(self, name: str) -> DeviceRing | None:
        if self._gone:
            return None
        if self._device.capturing():
            self._session.note(f"device_section {name!r}: first entered in a capture, not timed: enter it once before")
            return None
        try:
            ring = self._device.ring()
        except DeviceError as error:
            self._gone = True
            self._session.note(f"device sections are not timed: {error}")
            return None
        self._begin_with(ring)
        return ring

    def _begin_with(self, ring: DeviceRing) -> None:
        self._ring = ring
        self._reduced_ns = self._now_ns()
        if ring.names:
            self._discard = ring.reduce(self._device.stream())

    def _collect(self, ring: DeviceRing) -> bool:
        reduced = ring.collect()
        if reduced is None:
            return False
        if not self._discard:
            self._record(ring.names, reduced)
        self._discard = False
        return True

    def _record(self, names: list[str], reduced: Reduced) -> None:
        """A window of each section that has one, as a run of records."""
        recorder, kind = self._session.recorder, int(Kind.SKETCH)
        for slot, name in enumerate(names):
            window = to_window(*(rows[slot] for rows in reduced))
            if not window.sketch.count:
                continue
            name_id = self._session.intern(name)
            for place, words in enumerate(to_records(window)):
                start, duration, nested, phase, value0, value1 = words
                recorder.late(kind, name_id, recorder.step, start, duration, place, value0, value1, nested, phase)
