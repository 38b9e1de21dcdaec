"""Signals: what may be behind a slow rank, as numbers of one second each, and their means over steps. Pure.

A signal is a share of the time, a rate, or a level; NaN where it is not measured. All ranks have the same list, so that
a rank can be held against the others, and against itself before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

METRICS = (
    "cpu_wait_share",  # of the time: the training thread was ready and had no CPU
    "asleep_share",  # of the steps' time: it neither computed nor was ready, outside of communication
    "kernel_share",  # of the time: it computed in the kernel, as for page faults and system calls
    "neighbour_share",  # of the CPUs that the rank may use, what programs kept busy that are none of the job's
    "cpu_quota_share",  # of its control group's periods: it had used up its CPU quota
    "cpu_clock_share",  # of the highest clock of its CPU
    "gc_share",  # of the time: Python's garbage collector ran in it
    "disk_wait_share",  # of the time: it, or a loader worker that it waits for, was in uninterruptible sleep
    "major_faults_per_s",  # pages that it had to wait for
    "refaults_per_s",  # pages that its control group had evicted and needed again
    "memory_limit_share",  # used, without what can be dropped at once, of its control group's limit
    "memory_stall_share",  # of the time: something in its control group, or on its node, waited for memory (PSI)
    "sm_clock_mhz",  # while its GPU was not idle
    "sm_clock_share",  # the same, of that GPU's highest
    "thermal_share",  # of the time: its GPU's clocks were lowered for its temperature
    "power_share",  # for its power limit
    "hw_slowdown_share",  # by the board: power brake, overheating
    "temperature_c",
    "ecc_errors_per_s",  # uncorrectable
    "remapped_rows_per_s",
    "xids_per_s",  # errors that the driver reports
    "pcie_replays_per_s",
    "nvlink_errors_per_s",
    "link_errors_per_s",  # of its node's InfiniBand or RoCE ports
    "alloc_retries_per_step",  # of the device allocator: each frees its cache and waits for the device
)
CLOCKS = ("cpu_clock_share", "sm_clock_mhz", "sm_clock_share")  # signals of which less is worse
SLOTS = 32
MIN_BEFORE_S = 4.0  # of a rank's signals before it was slow: less time is mostly the job's start
_FIRST_SLOT_S = 1.0
_MAX_COUNTED = 60_000
_INDEX = {name: index for index, name in enumerate(METRICS)}
_IS_CLOCK = np.array([name in CLOCKS for name in METRICS])
# Errors and the like, single ones or bursts; page faults go on for as long as their cause.
_BURSTS = (
    "ecc_errors_per_s", "remapped_rows_per_s", "xids_per_s", "pcie_replays_per_s", "nvlink_errors_per_s",
    "link_errors_per_s", "alloc_retries_per_step",
)  # fmt: skip
_IS_BURST = np.array([name in _BURSTS for name in METRICS])


def vector(values: Mapping[str, float]) -> npt.NDArray[np.float16]:
    """Signals by name as they travel; NaN for those that are not there, and the largest number for those beyond it."""
    row = np.full(len(METRICS), np.nan, np.float64)
    for name, value in values.items():
        row[_INDEX[name]] = value
    return np.clip(row, -65504, 65504).astype(np.float16)


def named(row: npt.NDArray[np.floating[Any]]) -> dict[str, float]:
    """The signals that are measured, by name."""
    return {name: float(value) for name, value in zip(METRICS, row, strict=True) if value == value}


class _Slot:
    """Means of all ranks' signals over a stretch of time, and of how many samples each is."""

    def __init__(self, start_s: float, step: int) -> None:
        self.start_s = self.end_s = start_s
        self.first_step = self.last_step = step
        self.means = np.zeros((0, len(METRICS)), np.float32)  # half as long a number, once the slot is over
        self.counts = np.zeros((0, len(METRICS)), np.uint16)

    def grow(self, ranks: int) -> None:
        missing = ranks - len(self.counts)
        if missing > 0:
            empty = np.zeros((missing, len(METRICS)))
            self.means = np.concatenate([self.means, empty.astype(self.means.dtype)])
            self.counts = np.concatenate([self.counts, empty.astype(np.uint16)])

    def add(self, at: npt.NDArray[np.int64], values: npt.NDArray[np.float16]) -> None:
        """A sample of the ranks at these places. What was not measured neither counts nor is 0."""
        measured = ~np.isnan(values)
        count = self.counts[at] + measured
        mean = self.means[at]
        difference = np.where(measured, values.astype(np.float32) - mean, 0)
        self.means[at] = mean + difference / np.maximum(count, 1)
        self.counts[at] = np.minimum(count, _MAX_COUNTED)

    def take_in(self, later: _Slot) -> None:
        """Becomes the stretch of both."""
        ranks = max(len(self.counts), len(later.counts))
        self.grow(ranks)
        later.grow(ranks)
        counts = self.counts.astype(np.float32) + later.counts
        weighted = self.means.astype(np.float32) * self.counts + later.means.astype(np.float32) * later.counts
        self.means = (weighted / np.maximum(counts, 1)).astype(np.float16)
        self.counts = np.minimum(counts, _MAX_COUNTED).astype(np.uint16)
        self.end_s, self.last_step = later.end_s, max(self.last_step, later.last_step)


class MetricHistory:
    """All ranks' signals over the run, in at most SLOTS slots of time: the further back, the longer they are.

    Times are by the clock of the detector's node; each slot holds which steps were in progress in it.
    """

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._slots: list[_Slot] = []

    def add(
        self,
        ranks: npt.NDArray[np.int64],
        steps: npt.NDArray[np.int64],
        values: npt.NDArray[np.float16],
        now_s: float,
    ) -> None:
        """The newest signals of some ranks. values: shape [ranks, signals]. steps: those that they are in."""
        if not len(ranks):
            return
        newest = int(steps.max())
        if not self._slots or now_s - self._slots[-1].start_s >= _FIRST_SLOT_S:
            if self._slots:
                self._slots[-1].means = self._slots[-1].means.astype(np.float16)
            self._slots.append(_Slot(now_s, newest))
            if len(self._slots) > SLOTS:
                self._merge(now_s)
        slot = self._slots[-1]
        slot.end_s, slot.last_step = now_s, max(slot.last_step, newest)
        at = np.array([self._index.setdefault(rank, len(self._index)) for rank in ranks.tolist()])
        slot.grow(len(self._index))
        slot.add(at, values)

    @property
    def ranks(self) -> list[int]:
        """Those that signals have come of."""
        return list(self._index)

    def means(
        self, ranks: Sequence[int], since_step: int, until_step: int | None = None
    ) -> dict[int, npt.NDArray[np.float32]]:
        """By rank, the signals' means over the time in which these steps were made; of those that are known.

        Time in which others were made too is left out, unless there is no other.
        """
        end = float("inf") if until_step is None else until_step
        inside = [slot for slot in self._slots if slot.first_step >= since_step and slot.last_step < end]
        if not inside:
            inside = [slot for slot in self._slots if slot.last_step >= since_step and slot.first_step < end]
        there = [rank for rank in ranks if rank in self._index]
        total, counts = self._sums(inside, np.array([self._index[rank] for rank in there], np.int64))
        means = np.where(counts > 0, total / np.maximum(counts, 1), np.nan).astype(np.float32)
        return dict(zip(there, means, strict=True))

    def usual_before(self, rank: int, step: int) -> npt.NDArray[np.float32] | None:
        """What a rank's signals were before a step: in the better quarter of that time, but for errors, which come in
        bursts: on average. None if the time is too short.

        Not the other signals' means: the step at which a rank became slow is found in noisy times, and may be too late.
        Without the first slot, the job's start.
        """
        inside = [slot for slot in self._slots if slot.last_step < step][1:]
        at = self._index.get(rank)
        if at is None or not inside or inside[-1].end_s - inside[0].start_s + _FIRST_SLOT_S < MIN_BEFORE_S:
            return None
        total, counts = self._sums(inside, np.array([at]))  # after it, all of them have room for this rank
        table = np.stack([np.where(slot.counts[at] > 0, slot.means[at].astype(np.float32), np.nan) for slot in inside])
        usual = np.full(len(METRICS), np.nan, np.float32)
        measured = ~np.isnan(table).all(axis=0)
        if measured.any():  # of a rank whose signals come later, nothing is
            low, high = np.nanquantile(table[:, measured], (0.25, 0.75), axis=0)
            usual[measured] = np.where(_IS_CLOCK[measured], high, low)
        bursts = _IS_BURST & measured
        usual[bursts] = (total / np.maximum(counts, 1))[0, bursts]
        return usual

    def _sums(
        self, slots: Sequence[_Slot], at: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Of all samples, and how many these are: [ranks, signals]."""
        total = np.zeros((len(at), len(METRICS)))
        counts = np.zeros_like(total)
        for slot in slots:
            slot.grow(len(self._index))
            count = slot.counts[at].astype(np.float64)
            total += slot.means[at] * count
            counts += count
        return total, counts

    def _merge(self, now_s: float) -> None:
        """Two neighbours become one: those that together are the shortest for their age."""

        def length_by_age(index: int) -> float:
            first, second = self._slots[index], self._slots[index + 1]
            return (second.end_s - first.start_s + _FIRST_SLOT_S) / (now_s - second.end_s + _FIRST_SLOT_S)

        index = min(range(len(self._slots) - 2), key=length_by_age)  # the newest one is still being filled
        self._slots[index].take_in(self._slots.pop(index + 1))
