"""All ranks' windows merged on the device: one SUM and one MAX all-reduce on a stream of our own, on request.

::

    each rank: its window ─┬─ sums, and its medians in its own row of a matrix ──SUM──▶ merged histogram ─▶ quantiles
                           │                                                            medians of all   ─▶ scores
                           └─ largest, minus smallest, digests of names ─────────MAX──▶ extremes, names agreed

A window has a row for each device section, and one for each part of the device's steps (steps.py).
This is the only place where we issue collectives. They are issued at a step's end on the thread that trains, in a
group of their own, in the same steps on all ranks; their results are read when they are there, and never waited for.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from torchlens_perf.cuda.driver import Arguments, Driver
from torchlens_perf.cuda.reduction import BUCKETS, ROW_WIDTHS, SUM_ROW, Exact, Largest, Sum, tables_in
from torchlens_perf.cuda.stamps import Leftover
from torchlens_perf.cuda.steps import BLOCK_BYTES, BLOCK_WORDS, KnownSteps, StepReduction
from torchlens_perf.errors import guard
from torchlens_perf.run.device.merged_rows import MAX_RANKS, SECTION, STANDS_OUT, MergedRow
from torchlens_perf.run.device.step_parts import ROW_NAMES, Row
from torchlens_perf.run.sketch import bucket_bounds

if TYPE_CHECKING:
    import torch

    from torchlens_perf.cuda.stamps import DeviceRing

QUANTILES = (0.5, 0.99)
MIN_SPREAD = 0.01  # of the median: ranks whose times differ by less are not distinguished
_PARTS = np.array([round(quantile * (1 << 16)) for quantile in QUANTILES], np.uint32)
_LARGEST_ROW = len(Largest) + 2  # and the slot's name: digest, minus digest
_NAME = len(Largest)
_SMALL_WIDTHS = (len(Sum), _LARGEST_ROW, len(QUANTILES) // 2, 1)
_NO_NAME = -(2**63 - 1)
_SCORE_THREADS, _QUANTILE_THREADS = 1024, 128
_ROBUST_DEVIATION = 1.4826  # times the MAD, as in rank_scores
_Launch = tuple[int, int, int, int, Arguments]


class AggregateDevice(Protocol):
    """What the merge needs of torch's device; hooks/on_device/stamps.py has it."""

    def aside(self) -> AbstractContextManager[int]:
        """The stream for collectives becomes the current one, ordered after what was; its handle."""

    def zeros(self, words: int) -> torch.Tensor:
        """Words of 64 bits in the device's memory."""

    def words(self, address: int, count: int) -> torch.Tensor:
        """The words that lie there, without a copy."""


class DeviceAggregate:
    """The buffers, and one merge at a time. Of `ranks` ranks and one ring's slots."""

    def __init__(
        self, device: AggregateDevice, driver: Driver, functions: Mapping[str, int], ring: DeviceRing, group: Any
    ) -> None:
        """group: a process group of our own, of all ranks; its backend reduces the device's memory.

        Raises DeviceError where memory cannot be had.
        """
        import torch.distributed as dist

        self._device, self._driver, self._ring, self._group = device, driver, ring, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._slots = slots = ring.slots + len(Row)  # the parts of steps behind the sections
        with device.aside():
            self._sums = device.zeros(slots * SUM_ROW + self.ranks * slots)
            self._largest = device.zeros(slots * _LARGEST_ROW)
            # What goes to the host: not the histograms.
            self._small = device.zeros(slots * sum(_SMALL_WIDTHS) + (1 + len(Row)) * self.ranks)
            self._parts = device.zeros(1)
            self._parts.fill_(int(_PARTS.view(np.int64)[0]))
            self._digests = device.zeros(2 * slots).view(slots, 2)
            self._digests.fill_(_NO_NAME)
            for row, name in enumerate(ROW_NAMES):
                self._name_slot(ring.slots + row, f"step part {name}")
            memory = device.zeros(BLOCK_WORDS), device.zeros(len(Row) * sum(ROW_WIDTHS))
        self._digested = 0  # sections whose digests are there
        self._launches = self._small_launches(functions)
        self._things = self._take(8 * len(self._small))
        self._host, self._arrived, self._rows_read = self._things.host, self._things.arrived, self._things.rows_read
        self._steps = StepReduction(driver, functions, ring.bounds, self._take(BLOCK_BYTES), memory)
        self._merging: tuple[list[str], int] | None = None  # the sections and the step of the merge on its way
        self.uncollected = 0
        """Merges whose results were not copied, because those before had not been read."""
        self.disagreed: set[str] = set()
        """Sections that were not merged, because some rank has entered its sections in another order."""

    def _take(self, size: int) -> Leftover:
        """What an earlier watch has left, if nothing arrives in it any more; else something new."""
        for each in self._ring.leftovers:
            if each.size == size and self._driver.happened(each.arrived):
                self._ring.leftovers.remove(each)
                return each
        return Leftover(size, self._driver.allocate_host(size), self._driver.new_event(), self._driver.new_event())

    def release(self) -> None:
        """The watch has ended. Page-locked memory is not freed: that may wait for all that the device has to do, and
        training goes on. The next watch takes it, and the events, which the ring may still wait for. Asks nothing of
        the device. Not in a forked child, which has no device."""
        self._ring.leftovers += [self._things, self._steps.things]

    def merge(self, *, window: bool, known: KnownSteps | None = None, step: int = 0) -> None:
        """Enqueues a merge; every rank must call it in the same step, which is `step` on this one.

        window: whether the ring has just reduced one; else this rank takes part with no section. known: the steps that
        it takes part with; they are taken away.
        """
        import torch.distributed as dist

        names, sections = self._ring.names, self._ring.slots
        with self._device.aside() as stream:
            sums, medians = tables_in(self._sums, self._slots, [SUM_ROW])
            medians = medians.view(self.ranks, self._slots)[self.rank]
            largest = self._largest.view(self._slots, _LARGEST_ROW)
            self._sums.zero_()
            largest.fill_(_NO_NAME)
            if window:
                own, own_largest, exact, _ = tables_in(self._device.words(*self._ring.rows), sections, ROW_WIDTHS)
                sums[:sections].copy_(own)
                largest[:sections, : len(Largest)].copy_(own_largest)
                medians[:sections].copy_(exact[:, Exact.MEDIAN])
                self._driver.record(self._rows_read, stream)
                self._ring.read_until(self._rows_read)
            with guard("the device's steps of all ranks"):
                if known is not None and self._steps.reduce(known, stream):
                    own, own_largest, exact = self._steps.tables
                    sums[sections:].copy_(own)
                    largest[sections:, : len(Largest)].copy_(own_largest)
                    medians[sections:].copy_(exact[:, Exact.MEDIAN])
            for slot in range(self._digested, len(names)):
                self._name_slot(slot, names[slot])
            self._digested = len(names)
            largest[:, _NAME:].copy_(self._digests)
            works = [
                dist.all_reduce(self._sums, dist.ReduceOp.SUM, self._group, async_op=True),
                dist.all_reduce(self._largest, dist.ReduceOp.MAX, self._group, async_op=True),
            ]
            for work in works:
                work.wait()  # orders the stream after it; the host goes on
            if self._merging is not None:
                self.uncollected += 1
                return
            self._merging = names, step
            self._reduce_small(stream)

    def _name_slot(self, slot: int, name: str) -> None:
        digest = name_digest(name)
        self._digests[slot, 0].fill_(digest)  # a kernel with a constant: a copy from the host might wait
        self._digests[slot, 1].fill_(-digest)

    def _reduce_small(self, stream: int) -> None:
        """Quantiles and scores of what was merged, and the copy of all that the host reads."""
        table, largest, _, _, worst = self._small_parts(self._small)
        table.copy_(tables_in(self._sums, self._slots, [SUM_ROW])[0][:, : len(Sum)])
        largest.copy_(self._largest.view(self._slots, _LARGEST_ROW))
        worst.zero_()
        for function, grid, threads, shared_bytes, arguments in self._launches:
            self._driver.launch(function, grid, threads, shared_bytes, stream, arguments)
        self._driver.copy_to_host(self._host, self._small.data_ptr(), 8 * len(self._small), stream)
        self._driver.record(self._arrived, stream)

    def _small_launches(self, functions: Mapping[str, int]) -> list[_Launch]:
        """Quantiles of all rows; scores of the sections, over all of which a rank has its highest one; and scores of
        each part of the steps by itself, as a rank that stands out in its work may stand out more in a part."""
        slots, ranks, sections = self._slots, self.ranks, self._ring.slots
        _, _, buckets, middle, worst = self._small_parts(self._small)
        sums, parts, found, middles, scores = (
            each.data_ptr() for each in (self._sums, self._parts, buckets, middle, worst)
        )
        counts = np.int32(slots), np.int32(len(QUANTILES))
        quantiles = Arguments([np.uint64(sums), counts[0], np.uint64(parts), counts[1], np.uint64(found)])
        grid = -(-slots * 32 // _QUANTILE_THREADS)
        launches = [(functions["merged_quantiles"], grid, _QUANTILE_THREADS, 0, quantiles)]
        each_row = ((sections + row, 1, 1 + row) for row in range(len(Row)))
        for slot, count, table in [(0, sections, 0), *each_row]:
            times, middle_at = np.uint64(sums + 8 * (slots * SUM_ROW + slot)), np.uint64(middles + 8 * slot)
            score_at = np.uint64(scores + 8 * ranks * table)
            sizes = np.int32(ranks), np.int32(slots)
            arguments = Arguments([times, *sizes, np.float32(MIN_SPREAD), middle_at, score_at])
            launches.append((functions["rank_scores"], count, _SCORE_THREADS, 4 * ranks, arguments))
        return launches

    def _small_parts(self, words: Any) -> list[Any]:
        """Sums, largest, quantiles' buckets (two of 32 bits a word), medians and deviations (likewise); and the ranks'
        scores, over the sections and in each part of the steps."""
        return tables_in(words, self._slots, _SMALL_WIDTHS)

    def collect(self) -> list[MergedRow] | None:
        """The last merge's rows, once; None while there is none, or it has not arrived. Sections that not all ranks
        entered in the same order, whose slots are different sections, are left out."""
        if self._merging is None or not self._driver.happened(self._arrived):
            return None
        (names, step), self._merging = self._merging, None
        buffer: Any = (ctypes.c_int64 * len(self._small)).from_address(self._host)
        result = _Result(self._small_parts(np.ctypeslib.as_array(buffer).copy()), self.ranks)
        sections = result.sections(names)
        agreed = {each.name for each in sections}
        self.disagreed |= {name for slot, name in enumerate(names) if result.times(slot)} - agreed
        return [each._replace(step=step) for each in (*sections, *result.steps(self._ring.slots))]

    @property
    def on_the_way(self) -> bool:
        """Whether there is a merge whose result has not been collected."""
        return self._merging is not None


def name_digest(name: str) -> int:
    """62 bits of a section's name: what ranks compare to see that a slot is the same section for all."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 2


class _Result:
    """What has arrived of one merge."""

    def __init__(self, tables: Sequence[Any], ranks: int) -> None:
        """tables: of _small_parts()."""
        self._table, self._largest, buckets, middle, worst = tables
        self._buckets, self._middle = buckets.view(np.int32), middle.view(np.float32)
        packed = worst.view(np.uint64).reshape(1 + len(Row), ranks)
        self._slot = (packed[0] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        self._scores = (packed >> np.uint64(32)).astype(np.uint32).view(np.float32)
        self._bounds = bucket_bounds()

    def times(self, slot: int) -> int:
        return int(self._table[slot, Sum.COUNT])

    def sections(self, names: Sequence[str]) -> list[MergedRow]:
        """Those that all ranks have in the same slot, each with the rank that has its highest score there."""
        found = []
        for slot, name in enumerate(names):
            if self.times(slot) and self._agreed(slot, name):
                here = np.flatnonzero((self._slot == slot) & (self._scores[0] > 0))
                slowest = int(here[np.argmax(self._scores[0][here])]) if len(here) else -1
                found.append(self._row(slot, name, slowest, self._scores[0]))
        return found

    def steps(self, first: int) -> list[MergedRow]:
        """Of each part of the steps, whose slots begin at `first`: the slowest rank, and those whose work stands out.
        Of the work, the second slowest too: how much sooner the step would end without the slowest is up to it."""
        in_work = self._scores[1 + Row.WORK]
        order = np.argsort(-in_work, kind="stable")[:MAX_RANKS].tolist()
        stand_out = [rank for rank in order if in_work[rank] >= STANDS_OUT]
        found = []
        for row, name in enumerate(ROW_NAMES):
            slot, scores = first + row, self._scores[1 + row]
            if not self.times(slot) or not self._agreed(slot, f"step part {name}"):
                continue
            of = [int(np.argmax(scores)), *(order[:2] if row == Row.WORK else []), *stand_out]
            ranks = [rank for rank in dict.fromkeys(of) if scores[rank] > 0]
            count = int((scores >= STANDS_OUT).sum())
            rows = [self._row(slot, name, rank, scores) for rank in ranks or [-1]]
            found += [each._replace(row=row, outstanding=count) for each in rows]
        return found

    def _agreed(self, slot: int, name: str) -> bool:
        largest = self._largest[slot]
        return bool(largest[_NAME] == -largest[_NAME + 1] == name_digest(name))

    def _row(self, slot: int, name: str, rank: int, scores: Any) -> MergedRow:
        median, mad = (float(each) for each in self._middle[slot])
        p50_ns, p99_ns = (int(self._bounds[min(int(bucket), BUCKETS - 1)]) for bucket in self._buckets[slot])
        score = float(scores[rank]) if rank >= 0 else 0.0
        return MergedRow(
            name=name,
            times=self.times(slot),
            sum_ns=int(self._table[slot, Sum.NS]),
            p50_ns=p50_ns,
            p99_ns=p99_ns,
            median_ns=round(median),
            mad_ns=round(mad),
            slowest=rank,
            score=score,
            excess_ns=round(score * max(_ROBUST_DEVIATION * mad, MIN_SPREAD * median)),
            row=SECTION,
        )
