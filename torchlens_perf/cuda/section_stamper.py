"""Time device sections by clock stamps, which the device reduces and can merge over ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from torchlens_perf.cuda.reduction import ReducedWindow, pack_window
from torchlens_perf.cuda.stamps import NO_SLOT, SLOTS, DeviceRing
from torchlens_perf.cuda.steps import PendingSteps
from torchlens_perf.errors import DeviceError, guard
from torchlens_perf.interruption import ours
from torchlens_perf.recorder import device_sections
from torchlens_perf.run.device.merged_rows import pack_row
from torchlens_perf.run.ring import Kind

if TYPE_CHECKING:
    from torchlens_perf.cuda.aggregate import WindowMerger
    from torchlens_perf.cuda.device import CudaDevice
    from torchlens_perf.recorder.session import Session

REDUCE_EVERY_NS = 1_000_000_000
# Number of steps between two merges of the statistics of all ranks.
MERGE_STEPS = 64
# Maximum wait for the last result at the end of a watch.
_LAST_TIMEOUT_NS = 5_000_000


class DeviceSectionHook:
    """Hook that provides the implementation of device_section() during a watch."""

    name = "device sections"

    def __init__(
        self,
        device: CudaDevice,
        now_ns: Callable[[], int] = time.monotonic_ns,
        *,
        aggregate: bool = False,
        known: PendingSteps | None = None,
    ) -> None:
        """aggregate: True to merge the windows of all ranks on the device by collectives.
        known: queue of steps with known device times, which are merged together with the windows.
        """
        self._device = device
        self._now_ns = now_ns
        self._aggregate = aggregate
        self._known = PendingSteps() if known is None else known

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        stamper = SessionStamper(session, self._device, self._now_ns, self._known)
        if not self._aggregate or not stamper.try_to_merge_on_device():
            with guard("beginning with device sections"):
                stamper.prepare_ring()
        device_sections.set_stamper(stamper)
        try:
            # All ranks must enqueue a merge at the end of the same step.
            run = session.running_each_step if stamper.merges else session.run_throttled
            with run(self.name, stamper.update_at_step_end):
                yield
        finally:
            device_sections.set_stamper(None)
            with guard("the device sections' last times"):
                stamper.collect_last_results()


class SessionStamper:
    """The device_sections.Stamper of a session, used on the training thread."""

    def __init__(
        self, session: Session, device: CudaDevice, now_ns: Callable[[], int], known: PendingSteps
    ) -> None:
        self._session = session
        self._device = device
        self._now_ns = now_ns
        self._ring: DeviceRing | None = None
        self._is_unavailable = False  # True after an error showed that no ring can be created.
        # Number of entered sections without a ring, by name.
        self._untimed: Counter[str] = Counter()
        self._ring_device = -1
        self._reduced_ns = 0
        self._merge: WindowMerger | None = None
        self._known = known
        self._merges = 0  # Number of merges that this rank has enqueued.

    @property
    def merges(self) -> bool:
        """True if the windows of all ranks are merged on the device."""
        return self._merge is not None

    def try_to_merge_on_device(self) -> bool:
        """Enable merging on the device if all ranks can merge, or note the reason."""
        group, problem = self._device.create_process_group(), ""
        try:
            self._use_ring(self._device.get_or_create_ring())
            assert self._ring is not None
            self._merge = self._device.create_merger(self._ring, group)
        # torch raises RuntimeError, for example when it is out of memory.
        except ours(DeviceError, RuntimeError) as error:
            problem = str(error)
        try:
            agreed = self._device.all_ranks_agree(group, able=not problem)
        except ours(RuntimeError) as error:
            agreed, problem = False, problem or str(error)
        if not agreed:
            if self._merge is not None:
                self._merge.release_host_memory()
            self._merge = None
            self._session.note(
                f"aggregate='device' is off: {problem or 'another rank cannot merge'}"
            )
        return agreed

    def prepare_ring(self) -> None:
        """Create the ring before the first step if a section exists and the device is in use.

        Otherwise the ring is created at a step's end. A ring of an earlier watch is always used
        again, because a replayed graph may write to it without entering a section.
        """
        earlier = self._device.earlier_ring()
        if earlier is not None and not self._device.is_capturing():
            self._use_ring(earlier)
        elif device_sections.has_section():
            # The job may still select another device before the first step ends.
            with suppress(DeviceError):
                self._create_ring_if_possible()

    @guard("a device section")
    def open_section(self, name: str) -> None:
        ring = self._ring
        if ring is None:
            self._count_untimed_section(name)
            return
        slot = ring.assign_slot(name)
        if slot == NO_SLOT:
            # Do not name the section: each distinct note is kept, and programs may generate names.
            self._session.note(
                f"device sections: only {len(ring.names)} names are timed, and there are more"
            )
        elif self._device.current_index() != self._ring_device:
            self._session.note("device sections: timed on one device of the process only")
        else:
            ring.enqueue_stamp(NO_SLOT, slot, self._device.stream_handle())

    @guard("a device section")
    def close_section(self, name: str) -> None:
        ring = self._ring
        slot = NO_SLOT if ring is None else ring.assign_slot(name)
        if (
            ring is not None
            and slot != NO_SLOT
            and self._device.current_index() == self._ring_device
        ):
            ring.enqueue_stamp(slot, NO_SLOT, self._device.stream_handle())

    def update_at_step_end(self) -> None:
        """Record the last window once it has arrived, and request the next window every second.

        Only the creation of the ring may wait for the device.
        """
        ring = self._ring
        if ring is None:
            self._create_ring_at_step_end()
            return
        if self._merge is not None:
            self._enqueue_due_merges(ring, self._merge)
        elif self._device.current_index() == self._ring_device and not self._device.is_capturing():
            self._collect_window(ring)
            now_ns = self._now_ns()
            if now_ns - self._reduced_ns >= REDUCE_EVERY_NS and ring.enqueue_reduction(
                self._device.stream_handle()
            ):
                self._reduced_ns = now_ns

    def _enqueue_due_merges(self, ring: DeviceRing, merge: WindowMerger) -> None:
        """Enqueue one merge for every MERGE_STEPS training steps.

        All ranks must enqueue the same merges. A rank therefore takes part even without data or
        after an error. A merge that is due during a graph capture is enqueued after the capture,
        for two reasons:

        - The merge's stream would be forked from the captured stream and never joined.
        - torch allows no collective during a capture: NCCL's watchdog would query the device.
        """
        if self._device.is_capturing():
            return
        due, window = self._session.recorder.training_steps // MERGE_STEPS - self._merges, False
        with guard("the device sections of all ranks"):
            self._collect_window(ring)
            self._record_merged_rows(merge)
            window = due > 0 and ring.enqueue_reduction(self._device.stream_handle())
        for _ in range(due):
            self._merges += 1
            merge.enqueue_merge(window=window, known=self._known, step=self._session.recorder.step)
            window = False

    def _record_merged_rows(self, merge: WindowMerger) -> None:
        merged = merge.collect_rows()
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

    def collect_last_results(self) -> None:
        """Record the last windows at the end of the watch.

        The method waits a few milliseconds at most, even if the device is busy.
        """
        ring, merge = self._ring, self._merge
        if self._session.recorder.closed:
            return
        if not self._is_unavailable:
            self._note_untimed_sections()
        if ring is not None and not self._device.is_capturing():
            self._drain_ring(ring, merge)
        elif (
            merge is not None
            and self._session.recorder.training_steps // MERGE_STEPS > self._merges
        ):
            self._session.note(
                "device sections: the watch ended in a capture, in which this rank could not merge:"
                " other ranks wait"
            )
        if merge is not None:
            merge.release_host_memory()

    def _drain_ring(self, ring: DeviceRing, merge: WindowMerger | None) -> None:
        if merge is not None:
            self._enqueue_due_merges(ring, merge)  # A graph capture may have delayed merges.
        until_ns = self._now_ns() + _LAST_TIMEOUT_NS
        requested = False
        while self._now_ns() < until_ns:
            if merge is not None:
                self._record_merged_rows(merge)
            arrived = self._collect_window(ring)
            if requested and arrived and (merge is None or not merge.is_pending):
                break
            requested = requested or ring.enqueue_reduction(self._device.stream_handle())
        if merge is not None:
            self._note_unmerged_windows(merge)
        if (requested and not ring.is_pending) or not ring.names:
            return
        self._session.note(
            "device sections: times of the last second are missing, as they were not known when the"
            " watch ended"
        )

    def _note_unmerged_windows(self, merge: WindowMerger) -> None:
        if not self._merges:
            self._session.note(
                "device sections: nothing was merged over ranks, as there were fewer than"
                f" {MERGE_STEPS} steps"
            )
        due = self._merges * MERGE_STEPS
        left_out = due - self._known.merged
        # The device times of the last steps are never known at this point.
        if left_out > MERGE_STEPS:
            self._session.note(
                f"device steps: {left_out} of {due} were not merged over ranks, as their device"
                " times were missing or came too late"
            )
        missing = merge.uncollected + merge.is_pending
        if missing:
            self._session.note(f"device sections: {missing} merged windows could not be read")

    def _count_untimed_section(self, name: str) -> None:
        """Count a section that was entered before the ring was created.

        The ring is not created inside a step: creating it takes a second and would abort a capture.
        """
        if self._is_unavailable:
            return
        if name in self._untimed or len(self._untimed) < SLOTS:
            self._untimed[name] += 1
        if self._device.is_capturing():
            self._session.note(
                f"device_section {name[:40]!r} was captured before there was memory for its times:"
                " the graph's replays are not timed; decorate a function with it before the watch"
                " begins, or enter it in an earlier step"
            )

    def _create_ring_at_step_end(self) -> None:
        """Create the ring at a step's end if possible. The creation counts as overhead of the
        step."""
        step = self._session.recorder.step
        if (
            self._is_unavailable
            or not device_sections.has_section()
            or (not self._untimed and step & (step + 1))
        ):
            return
        begun_ns = self._session.recorder.now_ns()
        try:
            self._create_ring_if_possible()
        except DeviceError as error:
            self._is_unavailable = True
            self._session.note(f"device sections are not timed: {error}")
        else:
            if self._ring is not None:
                self._note_untimed_sections()
        self._session.add_overhead(self._session.recorder.now_ns() - begun_ns)

    def _create_ring_if_possible(self) -> None:
        """Create the ring if torch uses the device and captures no graph. Raises DeviceError."""
        if self._device.is_in_use() and not self._device.is_capturing():
            self._use_ring(self._device.get_or_create_ring())

    def _note_untimed_sections(self) -> None:
        """Note how many sections were entered before the ring was created."""
        if self._untimed:
            times = self._untimed.total()
            names = ", ".join(name[:40] for name in list(self._untimed)[:4])
            self._session.note(
                f"device sections: not timed when entered {times} times ({names}): the memory for"
                " their times is allocated when the watch begins or at a step's end"
            )
            self._untimed.clear()

    def _use_ring(self, ring: DeviceRing) -> None:
        """Use this ring from now on. Discard stamps from before this watch."""
        self._ring, self._ring_device = ring, self._device.current_index()
        self._reduced_ns = self._now_ns()
        ring.discard_earlier_stamps(self._device.stream_handle())

    def _collect_window(self, ring: DeviceRing) -> bool:
        reduced = ring.collect_result()
        if reduced is None:
            return False
        self._record_window(ring.names, reduced)
        return True

    def _record_window(self, names: list[str], reduced: ReducedWindow) -> None:
        """Record each section's window, if it has durations, as several consecutive records."""
        recorder, kind = self._session.recorder, int(Kind.SKETCH)
        for slot, name in enumerate(names):
            records = pack_window(*(rows[slot] for rows in reduced))
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
