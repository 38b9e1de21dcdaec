"""Device sections: stamps that the device reduces every second and can merge over ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from torchlens_perf.cuda.reduction import Reduced, to_records
from torchlens_perf.cuda.stamps import NO_SLOT, SLOTS, DeviceRing
from torchlens_perf.cuda.steps import PendingSteps
from torchlens_perf.errors import DeviceError, guard
from torchlens_perf.recorder import device_sections
from torchlens_perf.run.device.merged_rows import pack_row
from torchlens_perf.run.ring import Kind

if TYPE_CHECKING:
    from torchlens_perf.cuda.aggregate import DeviceAggregate
    from torchlens_perf.hooks.on_device.cuda_device import Device
    from torchlens_perf.recorder.session import Session

REDUCE_EVERY_NS = 1_000_000_000
# Steps between two merges of all ranks' windows.
MERGE_STEPS = 64
# Limit of the wait for the last result at the end of a watch.
_LAST_TIMEOUT_NS = 5_000_000


class StampHook:
    """Hook that provides the implementation of device_section() during a watch."""

    name = "device sections"

    def __init__(
        self,
        device: Device,
        now_ns: Callable[[], int] = time.monotonic_ns,
        *,
        aggregate: bool = False,
        known: PendingSteps | None = None,
    ) -> None:
        """aggregate: True to merge all ranks' windows on the device by collectives.
        known: the device's steps, which are merged together with the windows.
        """
        self._device = device
        self._now_ns = now_ns
        self._aggregate = aggregate
        self._known = PendingSteps() if known is None else known

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        stamper = SessionStamper(session, self._device, self._now_ns, self._known)
        if not self._aggregate or not stamper.merge_on_device():
            with guard("beginning with device sections"):
                stamper.begin()
        device_sections.set_stamper(stamper)
        try:
            with session.each_step(self.name, stamper.step_ended):
                yield
        finally:
            device_sections.set_stamper(None)
            with guard("the device sections' last times"):
                stamper.end()


class SessionStamper:
    """The device_sections.Stamper of a session, used on the training thread."""

    def __init__(
        self, session: Session, device: Device, now_ns: Callable[[], int], known: PendingSteps
    ) -> None:
        self._session = session
        self._device = device
        self._now_ns = now_ns
        self._ring: DeviceRing | None = None
        self._is_unavailable = False  # True once it is clear that no ring can be made.
        self._untimed: Counter[str] = Counter()  # Sections entered while there was no ring.
        self._ring_device = -1
        self._reduced_ns = 0
        self._merge: DeviceAggregate | None = None
        self._known = known
        self._merges = 0  # Number of merges that this rank has enqueued.

    def merge_on_device(self) -> bool:
        """Merge windows on the device from now on if all ranks agree. Otherwise note why not."""
        group, problem = self._device.group(), ""
        try:
            self._use_ring(self._device.ring())
            assert self._ring is not None
            self._merge = self._device.merge(self._ring, group)
        # torch raises RuntimeError, also when it is out of memory.
        except (DeviceError, RuntimeError) as error:
            problem = str(error)
        try:
            agreed = self._device.all_agree(group, able=not problem)
        except RuntimeError as error:
            agreed, problem = False, problem or str(error)
        if not agreed:
            if self._merge is not None:
                self._merge.release()
            self._merge = None
            self._session.note(
                f"aggregate='device' is off: {problem or 'another rank cannot merge'}"
            )
        return agreed

    def begin(self) -> None:
        """Create the ring before any step if sections are used and the device is in use.

        Otherwise it is created at a step's end. A ring of an earlier watch is used in any case:
        graphs may stamp into it at their first replay, without entering a section.
        """
        earlier = self._device.earlier_ring()
        if earlier is not None and not self._device.capturing():
            self._use_ring(earlier)
        elif device_sections.wanted():
            # The job may still select another device before the first step ends.
            with suppress(DeviceError):
                self._make_ring()

    @guard("a device section")
    def open(self, name: str) -> None:
        ring = self._ring
        if ring is None:
            self._count_untimed(name)
            return
        slot = ring.slot(name)
        if slot == NO_SLOT:
            # Each note is kept, and programs may generate names, so the note does not contain the
            # name.
            self._session.note(
                f"device sections: only {len(ring.names)} names are timed, and there are more"
            )
        elif self._device.current() != self._ring_device:
            self._session.note("device sections: timed on one device of the process only")
        else:
            ring.stamp(NO_SLOT, slot, self._device.stream())

    @guard("a device section")
    def close(self, name: str) -> None:
        ring = self._ring
        slot = NO_SLOT if ring is None else ring.slot(name)
        if ring is not None and slot != NO_SLOT and self._device.current() == self._ring_device:
            ring.stamp(slot, NO_SLOT, self._device.stream())

    def step_ended(self) -> None:
        """Collect a result that has arrived and request the next one every second.

        Does not wait for the device, except to create the ring.
        """
        ring = self._ring
        if ring is None:
            self._try_to_make_ring()
            return
        if self._merge is not None:
            self._merge_windows(ring, self._merge)
        elif self._device.current() == self._ring_device and not self._device.capturing():
            self._collect(ring)
            now_ns = self._now_ns()
            if now_ns - self._reduced_ns >= REDUCE_EVERY_NS and ring.reduce(self._device.stream()):
                self._reduced_ns = now_ns

    def _merge_windows(self, ring: DeviceRing, merge: DeviceAggregate) -> None:
        """Enqueue one merge for every MERGE_STEPS training steps.

        All ranks must enqueue the same merges. A rank therefore takes part even if it has no data
        or an error occurs. Merges that fall due in a capture are enqueued after it, for two
        reasons:

        - The merge's stream would be forked from the captured stream and never joined.
        - torch allows no collective during a capture, as NCCL's watchdog would query the device.
        """
        if self._device.capturing():
            return
        due, window = self._session.step.training_steps // MERGE_STEPS - self._merges, False
        with guard("the device sections of all ranks"):
            self._collect(ring)
            self._record_merged(merge)
            window = due > 0 and ring.reduce(self._device.stream())
        for _ in range(due):
            self._merges += 1
            merge.merge(window=window, known=self._known, step=self._session.recorder.step)
            window = False

    def _record_merged(self, merge: DeviceAggregate) -> None:
        merged = merge.collect()
        if merge.disagreed:
            self._session.note(
                "device sections: sections that ranks entered in different orders are not merged"
            )
        if merged is None or merge.rank != 0:
            return
        for each in merged:
            name_id = self._session.intern(each.name)
            self._session.recorder.record_completed(
                int(Kind.MERGED), name_id, each.step, *pack_row(each)
            )

    def end(self) -> None:
        """Collect the last results.

        Waits a few milliseconds at most, even if the device is busy.
        """
        ring, merge = self._ring, self._merge
        if self._session.recorder.closed:
            return
        if not self._is_unavailable:
            self._note_untimed()
        if ring is not None and not self._device.capturing():
            self._end_ring(ring, merge)
        elif merge is not None and self._session.step.training_steps // MERGE_STEPS > self._merges:
            self._session.note(
                "device sections: the watch ended in a capture, in which this rank could not merge:"
                " other ranks wait"
            )
        if merge is not None:
            merge.release()

    def _end_ring(self, ring: DeviceRing, merge: DeviceAggregate | None) -> None:
        if merge is not None:
            self._merge_windows(ring, merge)  # Merges that fell due in a capture.
        until_ns = self._now_ns() + _LAST_TIMEOUT_NS
        requested = False
        while self._now_ns() < until_ns:
            if merge is not None:
                self._record_merged(merge)
            arrived = self._collect(ring)
            if requested and arrived and (merge is None or not merge.is_pending):
                break
            requested = requested or ring.reduce(self._device.stream())
        if merge is not None:
            self._note_unmerged(merge)
        if (requested and not ring.is_pending) or not ring.names:
            return
        self._session.note(
            "device sections: times of the last second are missing, as they were not known when the"
            " watch ended"
        )

    def _note_unmerged(self, merge: DeviceAggregate) -> None:
        if not self._merges:
            self._session.note(
                "device sections: nothing was merged over ranks, as there were fewer than"
                f" {MERGE_STEPS} steps"
            )
        due = self._merges * MERGE_STEPS
        left_out = due - self._known.merged
        # The times of the last steps are always still unknown.
        if left_out > MERGE_STEPS:
            self._session.note(
                f"device steps: {left_out} of {due} were not merged over ranks, as their device"
                " times were missing or came too late"
            )
        missing = merge.uncollected + merge.is_pending
        if missing:
            self._session.note(f"device sections: {missing} merged windows could not be read")

    def _count_untimed(self, name: str) -> None:
        """Count a section that was entered while there was no ring.

        The ring is not created inside a step: that would take a second and end a capture.
        """
        if self._is_unavailable:
            return
        if name in self._untimed or len(self._untimed) < SLOTS:
            self._untimed[name] += 1
        if self._device.capturing():
            self._session.note(
                f"device_section {name[:40]!r} was captured before there was memory for its times:"
                " the graph's replays are not timed; decorate a function with it before the watch"
                " begins, or enter it in an earlier step"
            )

    def _try_to_make_ring(self) -> None:
        """Create the ring at a step's end if possible. The time counts as overhead of the step."""
        step = self._session.recorder.step
        if (
            self._is_unavailable
            or not device_sections.wanted()
            or (not self._untimed and step & (step + 1))
        ):
            return
        begun_ns = self._session.recorder.now_ns()
        try:
            self._make_ring()
        except DeviceError as error:
            self._is_unavailable = True
            self._session.note(f"device sections are not timed: {error}")
        else:
            if self._ring is not None:
                self._note_untimed()
        self._session.add_overhead(self._session.recorder.now_ns() - begun_ns)

    def _make_ring(self) -> None:
        """Create the ring if the device is in use and not capturing. Raises DeviceError."""
        if self._device.in_use() and not self._device.capturing():
            self._use_ring(self._device.ring())

    def _note_untimed(self) -> None:
        """Note how many sections were entered without a ring."""
        if self._untimed:
            times, names = (
                self._untimed.total(),
                ", ".join(name[:40] for name in list(self._untimed)[:4]),
            )
            self._session.note(
                f"device sections: not timed when entered {times} times ({names}): the memory for"
                " their times is allocated when the watch begins or at a step's end"
            )
            self._untimed.clear()

    def _use_ring(self, ring: DeviceRing) -> None:
        """Use a ring from now on. Stamps from before this watch are skipped."""
        self._ring, self._ring_device = ring, self._device.current()
        self._reduced_ns = self._now_ns()
        ring.skip(self._device.stream())

    def _collect(self, ring: DeviceRing) -> bool:
        reduced = ring.collect()
        if reduced is None:
            return False
        self._record(ring.names, reduced)
        return True

    def _record(self, names: list[str], reduced: Reduced) -> None:
        """Record the window of each section that has one, as several records in a row."""
        recorder, kind = self._session.recorder, int(Kind.SKETCH)
        for slot, name in enumerate(names):
            records = to_records(*(rows[slot] for rows in reduced))
            name_id = self._session.intern(name) if records else 0
            for place, words in enumerate(records):
                start, duration, nested, phase, value0, value1 = words
                recorder.record_completed(
                    kind,
                    name_id,
                    recorder.step,
                    start,
                    duration,
                    place,
                    value0,
                    value1,
                    nested,
                    phase,
                )
