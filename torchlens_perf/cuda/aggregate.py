"""Merge statistics of all ranks on the device by two all-reduces (SUM, MAX) on a separate stream.

::

    window of each rank ─┬─ sums, matrix of medians ──SUM─▶ histogram ─▶ quantiles
                         │                                  medians of ranks ─▶ scores
                         └─ largest, -smallest, digests ─MAX─▶ extremes, agreed names

The statistics of a window of steps have one row for each device section and for each part of a step
(steps.py).

No other module of the package issues collectives. All ranks issue the same all-reduces at the ends
of the same steps, on the training thread, in a separate process group. Results are read once they
have arrived, without waiting.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from torchlens_perf.cuda.driver import CudaDriver, KernelArguments
from torchlens_perf.cuda.reduction import (
    BUCKETS,
    ROW_WIDTHS,
    SUM_ROW,
    ExactColumn,
    LargestColumn,
    SumColumn,
    view_tables,
)
from torchlens_perf.cuda.stamps import ReusableMemory
from torchlens_perf.cuda.steps import BLOCK_BYTES, BLOCK_WORDS, PendingSteps, StepReduction
from torchlens_perf.errors import guard
from torchlens_perf.run.device.merged_rows import MAX_RANKS, SECTION, STANDS_OUT, MergedRow
from torchlens_perf.run.device.step_parts import ROW_NAMES, StepPart
from torchlens_perf.run.sketch import bucket_bounds

if TYPE_CHECKING:
    import torch

    from torchlens_perf.cuda.stamps import DeviceRing

QUANTILES = (0.5, 0.99)
# Lower limit of the MAD of the ranks, as a share of the median. Smaller differences do not count.
MIN_SPREAD = 0.01
_PARTS = np.array([round(quantile * (1 << 16)) for quantile in QUANTILES], np.uint32)
# Two columns follow the largest values: the digest of the slot's name, and the negated digest.
_LARGEST_ROW = len(LargestColumn) + 2
_NAME = len(LargestColumn)
_SMALL_WIDTHS = (len(SumColumn), _LARGEST_ROW, len(QUANTILES) // 2, 1)
_NO_NAME = -(2**63 - 1)
_SCORE_THREADS, _QUANTILE_THREADS = 1024, 128
# The factor by which rank_scores multiplies the MAD.
_ROBUST_DEVIATION = 1.4826
_Launch = tuple[int, int, int, int, KernelArguments]


class MergingDevice(Protocol):
    """The methods of a device that merging needs. See cuda/device.py."""

    def merge_stream(self) -> AbstractContextManager[int]:
        """Make the stream for merges the current one, ordered after the previous stream.

        The context returns the handle of the stream.
        """

    def allocate_zeros(self, words: int) -> torch.Tensor:
        """Return zeroed 64-bit words in the device's memory."""

    def view_words(self, address: int, count: int) -> torch.Tensor:
        """Return the words at an address of the device as a tensor, without a copy."""


class WindowMerger:
    """Merges the windows of this rank's ring with the windows of all ranks, one merge at a time."""

    def __init__(
        self,
        device: MergingDevice,
        driver: CudaDriver,
        functions: Mapping[str, int],
        ring: DeviceRing,
        group: Any,
    ) -> None:
        """group: a separate process group of all ranks. Its backend must support the device.

        Raises DeviceError if memory cannot be allocated.
        """
        import torch.distributed as dist

        self._device, self._driver, self._ring, self._group = device, driver, ring, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._slots = slots = ring.slots + len(StepPart)  # Rows of sections come first.
        with device.merge_stream():
            self._sums = device.allocate_zeros(slots * SUM_ROW + self.ranks * slots)
            self._largest = device.allocate_zeros(slots * _LARGEST_ROW)
            # Part of the result that is copied to the host. It has no histograms.
            self._small = device.allocate_zeros(
                slots * sum(_SMALL_WIDTHS) + (1 + len(StepPart)) * self.ranks
            )
            self._parts = device.allocate_zeros(1)
            self._parts.fill_(int(_PARTS.view(np.int64)[0]))
            self._digests = device.allocate_zeros(2 * slots).view(slots, 2)
            self._digests.fill_(_NO_NAME)
            for row, name in enumerate(ROW_NAMES):
                self._write_name_digest(ring.slots + row, f"step part {name}")
            memory = (
                device.allocate_zeros(BLOCK_WORDS),
                device.allocate_zeros(len(StepPart) * sum(ROW_WIDTHS)),
            )
        self._digested_count = 0  # Number of sections whose digests have been written.
        self._launches = self._plan_launches(functions)
        self._host_memory = self._get_host_memory(8 * len(self._small))
        self._host, self._arrived = self._host_memory.host, self._host_memory.arrived
        self._rows_read = self._host_memory.rows_read
        self._steps = StepReduction(
            driver, functions, ring.bounds, self._get_host_memory(BLOCK_BYTES), memory
        )
        # Section names and step of the merge whose result has not been collected.
        self._merging: tuple[list[str], int] | None = None
        self.uncollected = 0
        """Number of merges without a copied result, because an earlier result had not been read."""
        self.disagreed: set[str] = set()
        """Sections that were not merged, because ranks entered sections in different orders."""

    def _get_host_memory(self, size: int) -> ReusableMemory:
        """Return unused page-locked memory of an earlier watch, or allocate new memory."""
        for each in self._ring.leftovers:
            if each.size == size and self._driver.has_event_passed(each.arrived):
                self._ring.leftovers.remove(each)
                return each
        return ReusableMemory(
            size,
            self._driver.allocate_host(size),
            self._driver.create_event(),
            self._driver.create_event(),
        )

    def release_host_memory(self) -> None:
        """Leave page-locked memory and events to the next watch, without a call to the device.

        Freeing the memory could wait for all work of the device, and the ring may still wait for
        the events. This method must not be called in a forked child.
        """
        self._ring.leftovers += [self._host_memory, self._steps.host_memory]

    def enqueue_merge(
        self, *, window: bool, known: PendingSteps | None = None, step: int = 0
    ) -> None:
        """Enqueue a merge. All ranks must call it in the same training step.

        window: True if the ring has just reduced a window. With False, sections are left out.
        known: queue of steps that this rank contributes. The steps are removed.
        step: the number of the step on this rank.
        """
        import torch.distributed as dist

        names, sections = self._ring.names, self._ring.slots
        with self._device.merge_stream() as stream:
            sums, medians = view_tables(self._sums, self._slots, [SUM_ROW])
            medians = medians.view(self.ranks, self._slots)[self.rank]
            largest = self._largest.view(self._slots, _LARGEST_ROW)
            self._sums.zero_()
            largest.fill_(_NO_NAME)
            if window:
                own, own_largest, exact, _ = view_tables(
                    self._device.view_words(*self._ring.rows), sections, ROW_WIDTHS
                )
                sums[:sections].copy_(own)
                largest[:sections, : len(LargestColumn)].copy_(own_largest)
                medians[:sections].copy_(exact[:, ExactColumn.MEDIAN])
                self._driver.record_event(self._rows_read, stream)
                self._ring.readers_done = self._rows_read
            with guard("the device's steps of all ranks"):
                if known is not None and self._steps.enqueue_reduction(known, stream):
                    own, own_largest, exact = self._steps.tables
                    sums[sections:].copy_(own)
                    largest[sections:, : len(LargestColumn)].copy_(own_largest)
                    medians[sections:].copy_(exact[:, ExactColumn.MEDIAN])
            for slot in range(self._digested_count, len(names)):
                self._write_name_digest(slot, names[slot])
            self._digested_count = len(names)
            largest[:, _NAME:].copy_(self._digests)
            works = [
                dist.all_reduce(self._sums, dist.ReduceOp.SUM, self._group, async_op=True),
                dist.all_reduce(self._largest, dist.ReduceOp.MAX, self._group, async_op=True),
            ]
            for work in works:
                work.wait()  # Orders the stream after the collective without blocking the host.
            if self._merging is not None:
                self.uncollected += 1
                return
            self._merging = names, step
            self._enqueue_host_result(stream)

    def _write_name_digest(self, slot: int, name: str) -> None:
        digest = compute_name_digest(name)
        # Use fill_(), a kernel with a constant argument, because a copy from the host could wait.
        self._digests[slot, 0].fill_(digest)
        self._digests[slot, 1].fill_(-digest)

    def _enqueue_host_result(self, stream: int) -> None:
        """Enqueue kernels for quantiles and scores of the merged rows, and the copy to the host."""
        table, largest, _, _, worst = self._view_host_tables(self._small)
        table.copy_(view_tables(self._sums, self._slots, [SUM_ROW])[0][:, : len(SumColumn)])
        largest.copy_(self._largest.view(self._slots, _LARGEST_ROW))
        worst.zero_()
        for function, grid, threads, shared_bytes, arguments in self._launches:
            self._driver.launch_kernel(function, grid, threads, shared_bytes, stream, arguments)
        self._driver.copy_to_host(self._host, self._small.data_ptr(), 8 * len(self._small), stream)
        self._driver.record_event(self._arrived, stream)

    def _plan_launches(self, functions: Mapping[str, int]) -> list[_Launch]:
        """Return the launches that compute quantiles of all rows and scores of ranks.

        - All sections share one table, which contains each rank's highest score.
        - Each part of a step has a separate table, because a rank with slow work may have a higher
          score in another part.
        """
        slots, ranks, sections = self._slots, self.ranks, self._ring.slots
        _, _, buckets, middle, worst = self._view_host_tables(self._small)
        sums, parts, found, middles, scores = (
            each.data_ptr() for each in (self._sums, self._parts, buckets, middle, worst)
        )
        counts = np.int32(slots), np.int32(len(QUANTILES))
        quantiles = KernelArguments(
            [np.uint64(sums), counts[0], np.uint64(parts), counts[1], np.uint64(found)]
        )
        grid = -(-slots * 32 // _QUANTILE_THREADS)
        launches = [(functions["merged_quantiles"], grid, _QUANTILE_THREADS, 0, quantiles)]
        each_row = ((sections + row, 1, 1 + row) for row in range(len(StepPart)))
        for slot, count, table in [(0, sections, 0), *each_row]:
            times = np.uint64(sums + 8 * (slots * SUM_ROW + slot))
            middle_at = np.uint64(middles + 8 * slot)
            score_at = np.uint64(scores + 8 * ranks * table)
            sizes = np.int32(ranks), np.int32(slots)
            arguments = KernelArguments(
                [times, *sizes, np.float32(MIN_SPREAD), middle_at, score_at]
            )
            launches.append((functions["rank_scores"], count, _SCORE_THREADS, 4 * ranks, arguments))
        return launches

    def _view_host_tables(self, words: Any) -> list[Any]:
        """Return views of the tables that are copied to the host.

        The tables are sums, largest values, quantile buckets (two of 32 bits in a word), medians
        and deviations (two of 32 bits in a word), and the ranks' scores in sections and in each
        part of a step.
        """
        return view_tables(words, self._slots, _SMALL_WIDTHS)

    def collect_rows(self) -> list[MergedRow] | None:
        """Return the last merge's rows once, or None without a new result.

        Sections are left out if ranks entered them in different orders, because a slot then has
        different sections on different ranks.
        """
        if self._merging is None or not self._driver.has_event_passed(self._arrived):
            return None
        (names, step), self._merging = self._merging, None
        buffer: Any = (ctypes.c_int64 * len(self._small)).from_address(self._host)
        result = _MergeResult(
            self._view_host_tables(np.ctypeslib.as_array(buffer).copy()), self.ranks
        )
        sections = result.build_section_rows(names)
        agreed = {each.name for each in sections}
        self.disagreed |= {
            name for slot, name in enumerate(names) if result.count_of(slot)
        } - agreed
        return [
            each._replace(step=step)
            for each in (*sections, *result.build_step_rows(self._ring.slots))
        ]

    @property
    def is_pending(self) -> bool:
        """True if there is a merge whose result has not been collected."""
        return self._merging is not None


def compute_name_digest(name: str) -> int:
    """Return a digest of 62 bits of a section's name.

    Ranks compare digests to check that a slot has the same section on all ranks.
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 2


class _MergeResult:
    """The result of one merge on the host."""

    def __init__(self, tables: Sequence[Any], ranks: int) -> None:
        """tables: the views returned by _view_host_tables()."""
        self._table, self._largest, buckets, middle, worst = tables
        self._buckets, self._middle = buckets.view(np.int32), middle.view(np.float32)
        packed = worst.view(np.uint64).reshape(1 + len(StepPart), ranks)
        self._slot = (packed[0] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        self._scores = (packed >> np.uint64(32)).astype(np.uint32).view(np.float32)
        self._bounds = bucket_bounds()

    def count_of(self, slot: int) -> int:
        return int(self._table[slot, SumColumn.COUNT])

    def build_section_rows(self, names: Sequence[str]) -> list[MergedRow]:
        """Return the rows of all sections that have the same slot on all ranks.

        The slowest rank in a row is chosen from the ranks whose highest score is in this section.
        """
        found = []
        for slot, name in enumerate(names):
            if self.count_of(slot) and self._is_name_agreed(slot, name):
                here = np.flatnonzero((self._slot == slot) & (self._scores[0] > 0))
                slowest = int(here[np.argmax(self._scores[0][here])]) if len(here) else -1
                found.append(self._build_row(slot, name, slowest, self._scores[0]))
        return found

    def build_step_rows(self, first: int) -> list[MergedRow]:
        """Return rows for each part of a step: the slowest rank, and all ranks with slow work.

        The part "work" also has a row for the second slowest rank, which limits the gain if the
        slowest rank were faster. first: the slot of the first part.
        """
        in_work = self._scores[1 + StepPart.WORK]
        order = np.argsort(-in_work, kind="stable")[:MAX_RANKS].tolist()
        stand_out = [rank for rank in order if in_work[rank] >= STANDS_OUT]
        found = []
        for row, name in enumerate(ROW_NAMES):
            slot, scores = first + row, self._scores[1 + row]
            if not self.count_of(slot) or not self._is_name_agreed(slot, f"step part {name}"):
                continue
            of = [int(np.argmax(scores)), *(order[:2] if row == StepPart.WORK else []), *stand_out]
            ranks = [rank for rank in dict.fromkeys(of) if scores[rank] > 0]
            count = int((scores >= STANDS_OUT).sum())
            rows = [self._build_row(slot, name, rank, scores) for rank in ranks or [-1]]
            found += [each._replace(row=row, outstanding=count) for each in rows]
        return found

    def _is_name_agreed(self, slot: int, name: str) -> bool:
        largest = self._largest[slot]
        return bool(largest[_NAME] == -largest[_NAME + 1] == compute_name_digest(name))

    def _build_row(self, slot: int, name: str, rank: int, scores: Any) -> MergedRow:
        median, mad = (float(each) for each in self._middle[slot])
        p50_ns, p99_ns = (
            int(self._bounds[min(int(bucket), BUCKETS - 1)]) for bucket in self._buckets[slot]
        )
        score = float(scores[rank]) if rank >= 0 else 0.0
        return MergedRow(
            name=name,
            times=self.count_of(slot),
            sum_ns=int(self._table[slot, SumColumn.NS]),
            p50_ns=p50_ns,
            p99_ns=p99_ns,
            median_ns=round(median),
            mad_ns=round(mad),
            slowest=rank,
            score=score,
            excess_ns=round(score * max(_ROBUST_DEVIATION * mad, MIN_SPREAD * median)),
            row=SECTION,
        )
