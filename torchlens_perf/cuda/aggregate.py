"""All ranks' windows merged on the device: one SUM and one MAX all-reduce on a stream of our own, on request.

::

    each rank: its window ─┬─ sums, and its medians in its own row of a matrix ──SUM──▶ merged histogram ─▶ quantiles
                           │                                                            medians of all   ─▶ scores
                           └─ largest, minus smallest, digests of names ─────────MAX──▶ extremes, names agreed

This is the only place where we issue collectives. They are issued at a step's end on the thread that trains, in a
group of their own, in the same steps on all ranks; their results are read when they are there, and never waited for.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from torchlens_perf.cuda.driver import Arguments, Driver
from torchlens_perf.cuda.reduction import ROW_WIDTHS, SUM_ROW, Exact, Largest, Sum, tables_in
from torchlens_perf.cuda.stamps import Leftover
from torchlens_perf.run.sketch import BUCKETS, bucket_bounds

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


class Merged(NamedTuple):
    """A section over all ranks, in one window."""

    name: str
    times: int
    sum_ns: int
    p50_ns: int
    """Upper bounds of the buckets, 2.2 % wide, in which the quantiles of all times lie."""
    p99_ns: int
    median_ns: int
    """Of the ranks' medians, as is the next."""
    mad_ns: int
    slowest: int
    """The rank with the highest score in any section, where that is this one; -1: none."""
    score: float


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

        self._device, self._driver, self._functions, self._ring, self._group = device, driver, functions, ring, group
        self.rank, self.ranks, slots = dist.get_rank(group), dist.get_world_size(group), ring.slots
        self._slots = slots
        with device.aside():
            self._sums = device.zeros(slots * SUM_ROW + self.ranks * slots)
            self._largest = device.zeros(slots * _LARGEST_ROW)
            # What goes to the host: not the histograms.
            self._small = device.zeros(slots * sum(_SMALL_WIDTHS) + self.ranks)
            self._parts = device.zeros(1)
            self._parts.fill_(int(_PARTS.view(np.int64)[0]))
            self._digests = device.zeros(2 * slots).view(slots, 2)
            self._digests.fill_(_NO_NAME)
        self._digested = 0  # names whose digests are there
        self._things = self._take(8 * len(self._small))
        self._host, self._arrived, self._rows_read = self._things.host, self._things.arrived, self._things.rows_read
        self._merging: list[str] | None = None  # names of the merge that is on its way
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
        self._ring.leftovers.append(self._things)

    def merge(self, *, window: bool) -> None:
        """Enqueues a merge; every rank must call it in the same step.

        window: whether the ring has just reduced one; else this rank takes part with nothing.
        """
        import torch.distributed as dist

        slots, names = self._slots, self._ring.names
        with self._device.aside() as stream:
            sums, medians = tables_in(self._sums, slots, [SUM_ROW])
            largest = self._largest.view(slots, _LARGEST_ROW)
            self._sums.zero_()
            largest.fill_(_NO_NAME)
            if window:
                own, own_largest, exact, _ = tables_in(self._device.words(*self._ring.rows), slots, ROW_WIDTHS)
                sums.copy_(own)
                largest[:, : len(Largest)].copy_(own_largest)
                medians.view(self.ranks, slots)[self.rank].copy_(exact[:, Exact.MEDIAN])
                self._driver.record(self._rows_read, stream)
                self._ring.read_until(self._rows_read)
            for slot in range(self._digested, len(names)):
                digest = name_digest(names[slot])
                self._digests[slot, 0].fill_(digest)  # a kernel with a constant: a copy from the host might wait
                self._digests[slot, 1].fill_(-digest)
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
            self._merging = names
            self._reduce_small(stream)

    def _reduce_small(self, stream: int) -> None:
        """Quantiles and scores of what was merged, and the copy of all that the host reads."""
        slots, ranks = self._slots, self.ranks
        table, largest, buckets, middle, worst = self._small_parts(self._small)
        table.copy_(tables_in(self._sums, slots, [SUM_ROW])[0][:, : len(Sum)])
        largest.copy_(self._largest.view(slots, _LARGEST_ROW))
        worst.zero_()
        addresses = [np.uint64(each.data_ptr()) for each in (self._sums, self._parts, buckets, middle, worst)]
        sums, parts, found, middles, scores = addresses
        self._driver.launch(
            self._functions["merged_quantiles"], -(-slots * 32 // _QUANTILE_THREADS), _QUANTILE_THREADS, 0, stream,
            Arguments([sums, np.int32(slots), parts, np.int32(len(QUANTILES)), found]),
        )  # fmt: skip
        times = np.uint64(int(sums) + 8 * slots * SUM_ROW)
        self._driver.launch(
            self._functions["rank_scores"], slots, _SCORE_THREADS, 4 * ranks, stream,
            Arguments([times, np.int32(ranks), np.int32(slots), np.float32(MIN_SPREAD), middles, scores]),
        )  # fmt: skip
        self._driver.copy_to_host(self._host, self._small.data_ptr(), 8 * len(self._small), stream)
        self._driver.record(self._arrived, stream)

    def _small_parts(self, words: Any) -> list[Any]:
        """Sums, largest, quantiles' buckets (two of 32 bits a word), medians and deviations (likewise), worst."""
        return tables_in(words, self._slots, _SMALL_WIDTHS)

    def collect(self) -> list[Merged] | None:
        """The last merge's sections, once; None while there is none, or it has not arrived. Those that not all ranks
        entered in the same order, whose slots are different sections, are left out."""
        names = self._merging
        if names is None or not self._driver.happened(self._arrived):
            return None
        self._merging = None
        buffer: Any = (ctypes.c_int64 * len(self._small)).from_address(self._host)
        words = np.ctypeslib.as_array(buffer).copy()
        table, largest, buckets, middle, worst = self._small_parts(words)
        merged = _merged(names, table, largest, buckets.view(np.int32), middle.view(np.float32), worst.view(np.uint64))
        agreed = {each.name for each in merged}
        self.disagreed |= {name for name, row in zip(names, table, strict=False) if row[Sum.COUNT]} - agreed
        return merged

    @property
    def on_the_way(self) -> bool:
        """Whether there is a merge whose result has not been collected."""
        return self._merging is not None


def name_digest(name: str) -> int:
    """62 bits of a section's name: what ranks compare to see that a slot is the same section for all."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 2


def _merged(names: Sequence[str], table: Any, largest: Any, buckets: Any, middle: Any, worst: Any) -> list[Merged]:
    bounds = bucket_bounds()
    slots_of_ranks = (worst & np.uint64(0xFFFFFFFF)).astype(np.int64)
    scores = (worst >> np.uint64(32)).astype(np.uint32).view(np.float32)
    found = []
    for slot, name in enumerate(names):
        count = int(table[slot, Sum.COUNT])
        agreed = largest[slot, _NAME] == -largest[slot, _NAME + 1] == name_digest(name)
        if not count or not agreed:
            continue
        here = np.flatnonzero((slots_of_ranks == slot) & (scores > 0))
        slowest = int(here[np.argmax(scores[here])]) if len(here) else -1
        p50_ns, p99_ns = (int(bounds[min(int(bucket), BUCKETS - 1)]) for bucket in buckets[slot])
        found.append(
            Merged(
                name=name,
                times=count,
                sum_ns=int(table[slot, Sum.NS]),
                p50_ns=p50_ns,
                p99_ns=p99_ns,
                median_ns=round(float(middle[slot, 0])),
                mad_ns=round(float(middle[slot, 1])),
                slowest=slowest,
                score=float(scores[slowest]) if slowest >= 0 else 0.0,
            )
        )
    return found
