"""Device sections: their stamps, and once a second what the device has made of them; merged over ranks on request."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from torchlens_perf.cuda.reduction import Reduced, to_records
from torchlens_perf.cuda.stamps import NO_SLOT, SLOTS, DeviceRing
from torchlens_perf.cuda.steps import KnownSteps
from torchlens_perf.errors import DeviceError, guard
from torchlens_perf.recorder import device_sections
from torchlens_perf.run.device.merged_rows import packed
from torchlens_perf.run.ring import Kind

if TYPE_CHECKING:
    from torchlens_perf.cuda.aggregate import DeviceAggregate
    from torchlens_perf.hooks.on_device.cuda_device import Device
    from torchlens_perf.recorder.session import Session

REDUCE_EVERY_NS = 1_000_000_000
MERGE_STEPS = 64  # from one merge of all ranks' windows to the next, where they are merged on the device
_LAST_TIMEOUT_NS = 5_000_000  # that the end of a watch asks for the last result


class StampHook:
    """Stands behind device_section() while a watch records."""

    name = "device sections"

    def __init__(
        self,
        device: Device,
        now_ns: Callable[[], int] = time.monotonic_ns,
        *,
        aggregate: bool = False,
        known: KnownSteps | None = None,
    ) -> None:
        """aggregate: merge all ranks' windows on the device, by collectives. known: the device's steps, which are
        merged with them."""
        self._device = device
        self._now_ns = now_ns
        self._aggregate = aggregate
        self._known = KnownSteps() if known is None else known

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
    """A device_sections.Stamper, on the training thread."""

    def __init__(self, session: Session, device: Device, now_ns: Callable[[], int], known: KnownSteps) -> None:
        self._session = session
        self._device = device
        self._now_ns = now_ns
        self._ring: DeviceRing | None = None
        self._gone = False  # there can be no ring
        self._untimed: Counter[str] = Counter()  # entered while there was no ring
        self._on_device = -1  # where the ring lies
        self._reduced_ns = 0
        self._merge: DeviceAggregate | None = None
        self._known = known
        self._merges = 0  # that this rank has enqueued

    def merge_on_device(self) -> bool:
        """From here on, if all ranks are able: they agree on it. Where they are not, that is noted."""
        group, problem = self._device.group(), ""
        try:
            self._begin_with(self._device.ring())
            assert self._ring is not None
            self._merge = self._device.merge(self._ring, group)
        except (DeviceError, RuntimeError) as error:  # torch's are RuntimeErrors, out of memory too
            problem = str(error)
        try:
            agreed = self._device.all_agree(group, able=not problem)
        except RuntimeError as error:
            agreed, problem = False, problem or str(error)
        if not agreed:
            if self._merge is not None:
                self._merge.release()
            self._merge = None
            self._session.note(f"aggregate='device' is off: {problem or 'another rank is not able to'}")
        return agreed

    def begin(self) -> None:
        """Makes the ring before any step, if there are sections and the device is in use; else a step's end will.

        Graphs of an earlier watch may stamp into its ring from the first replay on, without a section being entered.
        """
        earlier = self._device.earlier_ring()
        if earlier is not None and not self._device.capturing():
            self._begin_with(earlier)
        elif device_sections.wanted():
            with suppress(DeviceError):  # the current device may become another one until the first step's end
                self._make_ring()

    @guard("a device section")
    def open(self, name: str) -> None:
        ring = self._ring
        if ring is None:
            self._missed(name)
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
        """Takes a result that has arrived, and once a second asks for the next one. Waits for nothing, but where it
        makes the ring."""
        ring = self._ring
        if ring is None:
            self._try_to_make_ring()
            return
        if self._merge is not None:
            self._merge_windows(ring, self._merge)
        elif self._device.current() == self._on_device and not self._device.capturing():
            self._collect(ring)
            now_ns = self._now_ns()
            if now_ns - self._reduced_ns >= REDUCE_EVERY_NS and ring.reduce(self._device.stream()):
                self._reduced_ns = now_ns

    def _merge_windows(self, ring: DeviceRing, merge: DeviceAggregate) -> None:
        """One merge for every MERGE_STEPS training steps on all ranks, whatever this one has and whatever fails: they
        must meet. What falls due in a capture is made at the next step's end outside: in it, the merge's stream would
        be forked from the captured one and never joined, and torch allows no collective beside a capture, as NCCL's
        watchdog would ask the device about it."""
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
            self._session.note("device sections: not all ranks entered them in the same order; those are not merged")
        if merged is None or merge.rank != 0:
            return
        for each in merged:
            name_id = self._session.intern(each.name)
            self._session.recorder.record_completed(int(Kind.MERGED), name_id, each.step, *packed(each))

    def end(self) -> None:
        """The rest: asks for some milliseconds; a device that is busy for longer is not waited for."""
        ring, merge = self._ring, self._merge
        if self._session.recorder.closed:
            return
        if not self._gone:
            self._tell_untimed()
        if ring is not None and not self._device.capturing():
            self._end(ring, merge)
        elif merge is not None and self._session.step.training_steps // MERGE_STEPS > self._merges:
            self._session.note(
                "device sections: the watch ended in a capture, where this rank could not merge: others wait"
            )
        if merge is not None:
            merge.release()

    def _end(self, ring: DeviceRing, merge: DeviceAggregate | None) -> None:
        if merge is not None:
            self._merge_windows(ring, merge)  # what fell due in a capture
        until_ns = self._now_ns() + _LAST_TIMEOUT_NS
        asked = False
        while self._now_ns() < until_ns:
            if merge is not None:
                self._record_merged(merge)
            arrived = self._collect(ring)
            if asked and arrived and (merge is None or not merge.on_the_way):
                break
            asked = asked or ring.reduce(self._device.stream())
        if merge is not None:
            self._tell_unmerged(merge)
        if (asked and not ring.on_the_way) or not ring.names:
            return
        self._session.note("device sections: the last second of them was not known when the watch ended")

    def _tell_unmerged(self, merge: DeviceAggregate) -> None:
        if not self._merges:
            self._session.note(f"device sections: no window of all ranks, as there were fewer than {MERGE_STEPS} steps")
        due = self._merges * MERGE_STEPS
        left_out = due - self._known.merged
        if left_out > MERGE_STEPS:  # some are always on their way
            self._session.note(
                f"device steps: {left_out} of {due} are in no window of all ranks, as their device times were not "
                "known, or too late"
            )
        missing = merge.uncollected + merge.on_the_way
        if missing:
            self._session.note(f"device sections: {missing} windows of all ranks were merged and could not be read")

    def _missed(self, name: str) -> None:
        """Nothing is made inside of a step: it would take a second of the user's, and end a capture."""
        if self._gone:
            return
        if name in self._untimed or len(self._untimed) < SLOTS:
            self._untimed[name] += 1
        if self._device.capturing():
            self._session.note(
                f"device_section {name[:40]!r} was captured before there was memory for its times: the graph's replays "
                "are not timed; decorate a function with it before the watch begins, or end a step that enters it first"
            )

    def _try_to_make_ring(self) -> None:
        """At a step's end, whose step is charged with it."""
        step = self._session.recorder.step
        if self._gone or not device_sections.wanted() or (not self._untimed and step & (step + 1)):
            return
        begun_ns = self._session.recorder.now_ns()
        try:
            self._make_ring()
        except DeviceError as error:
            self._gone = True
            self._session.note(f"device sections are not timed: {error}")
        else:
            if self._ring is not None:
                self._tell_untimed()
        self._session.add_overhead(self._session.recorder.now_ns() - begun_ns)

    def _make_ring(self) -> None:
        """If that can be now. Raises DeviceError where it never can."""
        if self._device.in_use() and not self._device.capturing():
            self._begin_with(self._device.ring())

    def _tell_untimed(self) -> None:
        """What was entered without a ring is counted, in words."""
        if self._untimed:
            times, names = self._untimed.total(), ", ".join(name[:40] for name in list(self._untimed)[:4])
            self._session.note(
                f"device sections: entered {times} times ({names}) before there was memory for their times, which is "
                "made when the watch begins or at a step's end: not timed"
            )
            self._untimed.clear()

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
            records = to_records(*(rows[slot] for rows in reduced))
            name_id = self._session.intern(name) if records else 0
            for place, words in enumerate(records):
                start, duration, nested, phase, value0, value1 = words
                recorder.record_completed(
                    kind, name_id, recorder.step, start, duration, place, value0, value1, nested, phase
                )
