"""Device sections: their stamps, and once a second what the device has made of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf import device_sections
from torchlens_perf.cuda import kernels
from torchlens_perf.cuda.aggregate import DeviceAggregate, Merged
from torchlens_perf.cuda.driver import Driver
from torchlens_perf.cuda.reduction import Reduced, to_records
from torchlens_perf.cuda.stamps import NO_SLOT, DeviceRing
from torchlens_perf.devices import device_in_use
from torchlens_perf.errors import ConfigError, DeviceError, guard
from torchlens_perf.ring import MERGED_RANK_SHIFT, Kind

if TYPE_CHECKING:
    from torchlens_perf.session import Session

REDUCE_EVERY_NS = 1_000_000_000
MERGE_STEPS = 64  # from one merge of all ranks' windows to the next, where they are merged on the device
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

    def current(self) -> int:
        """Its index."""
        import torch

        return int(torch.cuda.current_device())

    def ring(self) -> DeviceRing:
        """The process's ring on this device, made at the first call. Raises DeviceError."""
        device = self.current()
        if device not in _rings:
            if device_in_use() not in (device, None):
                raise DeviceError(f"the current device is {device}, on which this process has no memory")
            _rings[device] = DeviceRing(Driver(), kernels.load(device))
        return _rings[device]

    def merge(self, ring: DeviceRing) -> DeviceAggregate:
        """Merges this ring with those of all ranks, in a group of its own: a collective. Raises ConfigError."""
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ConfigError("aggregate='device': call init_process_group() before the watch begins")
        group = dist.new_group(backend="nccl", group_desc="torchlens_perf")
        kernels.allow_ranks(self.current(), dist.get_world_size(group))
        functions = kernels.load(self.current())
        self._aside = torch.cuda.Stream()
        return DeviceAggregate(self, Driver(), functions, ring, group)

    @contextmanager
    def aside(self) -> Iterator[int]:
        """A stream of our own, ordered after the current one."""
        import torch

        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            yield int(self._aside.cuda_stream)

    def zeros(self, words: int) -> Any:
        """Words in the device's memory."""
        import torch

        return torch.zeros(words, dtype=torch.int64, device="cuda")

    def words(self, address: int, count: int) -> Any:
        """The words that lie there."""
        import torch

        return torch.as_tensor(_DeviceWords(address, count), device="cuda")

    def earlier_ring(self) -> DeviceRing | None:
        """The ring that an earlier watch has made: graphs may still stamp into it."""
        return _rings.get(self.current()) if _rings else None


class _DeviceWords:
    """Memory that is ours, shown to torch."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "<i8", "data": (address, False), "version": 3,
        }  # fmt: skip


class StampHook:
    """Stands behind device_section() while a watch records."""

    name = "device sections"

    def __init__(
        self, device: Device, now_ns: Callable[[], int] = time.monotonic_ns, *, aggregate: bool = False
    ) -> None:
        """aggregate: merge all ranks' windows on the device, by collectives."""
        self._device = device
        self._now_ns = now_ns
        self._aggregate = aggregate

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        stamper = SessionStamper(session, self._device, self._now_ns)
        if self._aggregate:
            try:
                stamper.merge_on_device()
            except DeviceError as error:
                raise ConfigError(f"aggregate='device': {error}") from None
        else:
            with guard("the device sections of an earlier watch"):
                stamper.begin_with_earlier()
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
        self._on_device = -1  # where the ring lies
        self._reduced_ns = 0
        self._merge: DeviceAggregate | None = None

    def merge_on_device(self) -> None:
        """From here on; on all ranks, as it makes a process group. Raises DeviceError and ConfigError."""
        self._begin_with(self._device.ring())
        assert self._ring is not None
        self._merge = self._device.merge(self._ring)

    def begin_with_earlier(self) -> None:
        """Graphs of an earlier watch may stamp from the first replay on, without a section being entered."""
        earlier = self._device.earlier_ring()
        if earlier is not None and not self._device.capturing():
            self._begin_with(earlier)

    @guard("a device section")
    def open(self, name: str) -> None:
        ring = self._ring or self._find_ring(name)
        if ring is None:
            return
        slot = ring.slot(name)
        if slot == NO_SLOT:
            # Without the name: programs make names up, and each note is kept.
            self._session.note(f"device sections: only {len(ring.names)} names are timed, further ones are not")
        elif self._device.current() != self._on_device:
            self._session.note("device sections: timed on one device of the process only")
        else:
            ring.stamp(NO_SLOT, slot, self._device.stream())

    @guard("a device section")
    def close(self, name: str) -> None:
        ring = self._ring
        slot = NO_SLOT if ring is None else ring.slot(name)
        if ring is not None and slot != NO_SLOT and self._device.current() == self._on_device:
            ring.stamp(slot, NO_SLOT, self._device.stream())

    def step_ended(self) -> None:
        """Takes a result that has arrived, and once a second asks for the next one. Waits for nothing."""
        ring = self._ring
        if ring is None or self._device.current() != self._on_device or self._device.capturing():
            return
        self._collect(ring)
        if self._merge is not None:
            self._merge_window(ring, self._merge)
            return
        now_ns = self._now_ns()
        if now_ns - self._reduced_ns >= REDUCE_EVERY_NS and ring.reduce(self._device.stream()):
            self._reduced_ns = now_ns

    def _merge_window(self, ring: DeviceRing, merge: DeviceAggregate) -> None:
        """In the same steps on all ranks, whatever this one has: the collectives must meet."""
        step = self._session.recorder.step
        merged = merge.collect()
        if merged is not None and merge.rank == 0:
            self._record_merged(merged)
        if step % MERGE_STEPS == MERGE_STEPS - 1:
            merge.merge(window=ring.reduce(self._device.stream()))

    def _record_merged(self, merged: list[Merged]) -> None:
        """times, sum_ns, the ranks' median and MAD; p50 and p99 in two words, with the slowest rank plus 1 above the
        first's 44 bits; the score in hundredths in the flags."""
        for each in merged:
            self._session.recorder.late(
                int(Kind.MERGED), self._session.intern(each.name), self._session.recorder.step,
                each.times, each.sum_ns, min(round(100 * each.score), 0xFFFF),
                each.p50_ns | (each.slowest + 1) << MERGED_RANK_SHIFT, each.p99_ns, each.median_ns, each.mad_ns,
            )  # fmt: skip

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
            self._session.note(
                f"device_section {name[:40]!r}: first entered in a capture, not timed: enter it once before"
            )
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
        """What was stamped before is another watch's, or nobody's."""
        self._ring, self._on_device = ring, self._device.current()
        self._reduced_ns = self._now_ns()
        ring.skip(self._device.stream())

    def _collect(self, ring: DeviceRing) -> bool:
        reduced = ring.collect()
        if reduced is None:
            return False
        self._record(ring.names, reduced)
        return True

    def _record(self, names: list[str], reduced: Reduced) -> None:
        """A window of each section that has one, as a run of records."""
        recorder, kind = self._session.recorder, int(Kind.SKETCH)
        for slot, name in enumerate(names):
            for place, words in enumerate(to_records(*(rows[slot] for rows in reduced))):
                name_id = self._session.intern(name)
                start, duration, nested, phase, value0, value1 = words
                recorder.late(kind, name_id, recorder.step, start, duration, place, value0, value1, nested, phase)
