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

SIGNALS = (
    "cpu_wait_share",  # of the time: the training thread was ready and had no CPU
    "asleep_share",  # of the steps' time: it neither computed nor was ready, outside of communication
    "kernel_share",  # of the time: it computed in the kernel, as for page faults and system calls
    "neighbour_cpus",  # CPUs that other programs kept busy, of those that the rank may use
    "cpu_quota_share",  # of the time: its control group had used up its CPU quota
    "cpu_clock_share",  # of the highest clock of its CPU
    "gc_share",  # of the time: Python's garbage collector ran in it
    "disk_wait_share",  # of the time: it, or a loader worker that it waits for, was in uninterruptible sleep
    "major_faults_per_s",  # pages that it had to wait for
    "refaults_per_s",  # pages that its control group had evicted and needed again
    "memory_limit_share",  # used, of its control group's limit
    "memory_stall_share",  # of the time: something in its control group, or on its node, waited for memory (PSI)
    "io_stall_share",  # the same for block devices
    "sm_clock_mhz",
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
SLOTS = 32
_FIRST_SLOT_S = 1.0
_MOST_COUNTED = 1 << 15
CLOCKS = ("cpu_clock_share", "sm_clock_mhz")  # signals of which less is worse
LEAST_BEFORE_S = 4.0  # of a rank's signals before it was slow: less time is mostly the job's start
_IS_CLOCK = np.array([name in CLOCKS for name in SIGNALS])
_INDEX = {name: index for index, name in enumerate(SIGNALS)}


def vector(values: Mapping[str, float]) -> npt.NDArray[np.float16]:
    """Signals by name as they travel; NaN for those that are not there, and the largest number for those beyond it."""
    row = np.full(len(SIGNALS), np.nan, np.float64)
    for name, value in values.items():
        row[_INDEX[name]] = value
    return np.clip(row, -65504, 65504).astype(np.float16)


def named(row: npt.NDArray[np.floating[Any]]) -> dict[str, float]:
    """The signals that are measured, by name."""
    return {name: float(value) for name, value in zip(SIGNALS, row, strict=True) if value == value}


class SignalBoard:
    """Means of all ranks' signals in at most SLOTS slots of time. When there are more, neighbours are merged.

    Slots are the judge's seconds, and know which steps were made in them.
    """

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._slot_s = _FIRST_SLOT_S
        self._began_s: float | None = None
        self._steps: list[tuple[int, int]] = []  # of each slot: the first and the last step that was in progress in it
        self._means: list[npt.NDArray[np.float16]] = []  # of each slot: [ranks that were known then, signals]
        self._counts: list[npt.NDArray[np.uint16]] = []

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
        if self._began_s is None:
            self._began_s = now_s
        slot = int((now_s - self._began_s) / self._slot_s)
        while slot >= SLOTS:
            self._merge_neighbours()
            slot = int((now_s - self._began_s) / self._slot_s)
        newest = int(steps.max())
        while len(self._means) <= slot:
            self._steps.append((newest, newest))
            self._means.append(np.zeros((0, len(SIGNALS)), np.float16))
            self._counts.append(np.zeros(0, np.uint16))
        at = np.array([self._index.setdefault(rank, len(self._index)) for rank in ranks.tolist()])
        self._grow(slot)
        first, last = self._steps[slot]
        self._steps[slot] = first, max(last, newest)
        count = self._counts[slot][at].astype(np.float32)[:, None]
        mean = self._means[slot][at].astype(np.float32)
        new = values.astype(np.float32)
        # What is measured only now and then keeps its last value; what was never measured begins with this one.
        mixed = mean + (new - mean) / (count + 1)
        mixed = np.where(np.isnan(mean), new, np.where(np.isnan(new), mean, mixed))
        self._means[slot][at] = mixed
        self._counts[slot][at] = np.minimum(count[:, 0] + 1, _MOST_COUNTED)

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
        there = [rank for rank in ranks if rank in self._index]
        at = np.array([self._index[rank] for rank in there], np.int64)
        end = float("inf") if until_step is None else until_step
        inside = [i for i, (first, last) in enumerate(self._steps) if first >= since_step and last < end]
        if not inside:
            inside = [i for i, (first, last) in enumerate(self._steps) if last >= since_step and first < end]
        total = np.zeros((len(at), len(SIGNALS)), np.float64)
        weight = np.zeros_like(total)
        for i in inside:
            self._grow(i)
            mean = self._means[i][at].astype(np.float64)
            counted = np.where(np.isnan(mean), 0, self._counts[i][at, None])
            total += np.nan_to_num(mean) * counted
            weight += counted
        with np.errstate(invalid="ignore", divide="ignore"):
            result = (total / weight).astype(np.float32)
        return dict(zip(there, result, strict=True))

    def usual_before(self, rank: int, step: int) -> npt.NDArray[np.float32] | None:
        """What a rank's signals were in the better quarter of the time before a step; None if that is too short.

        Not their means: since when a rank is slow is found in noisy times, and may be told later than it was. Without
        the first slot, the job's start.
        """
        inside = [i for i, (_, last) in enumerate(self._steps) if last < step][1:]
        at = self._index.get(rank)
        if at is None or len(inside) * self._slot_s < LEAST_BEFORE_S:
            return None
        for i in inside:
            self._grow(i)
        rows = np.stack([self._means[i][at].astype(np.float32) for i in inside])
        usual = np.full(len(SIGNALS), np.nan, np.float32)
        measured = ~np.isnan(rows).all(axis=0)
        low, high = np.nanquantile(rows[:, measured], (0.25, 0.75), axis=0)
        usual[measured] = np.where(_IS_CLOCK[measured], high, low)
        return usual

    def _grow(self, slot: int) -> None:
        missing = len(self._index) - len(self._counts[slot])
        if missing:
            more = np.full((missing, len(SIGNALS)), np.nan, np.float16)
            self._means[slot] = np.concatenate([self._means[slot], more])
            self._counts[slot] = np.concatenate([self._counts[slot], np.zeros(missing, np.uint16)])

    def _merge_neighbours(self) -> None:
        self._slot_s *= 2
        for into in range((len(self._means) + 1) // 2):
            first, second = 2 * into, 2 * into + 1
            if second == len(self._means):
                self._steps[into], self._means[into] = self._steps[first], self._means[first]
                self._counts[into] = self._counts[first]
                continue
            self._grow(first)
            self._grow(second)
            means = [self._means[i].astype(np.float32) for i in (first, second)]
            counts = [self._counts[i].astype(np.float32) for i in (first, second)]
            weights = [np.where(np.isnan(m), 0, c[:, None]) for m, c in zip(means, counts, strict=True)]
            with np.errstate(invalid="ignore", divide="ignore"):
                mixed = sum(np.nan_to_num(m) * w for m, w in zip(means, weights, strict=True)) / sum(weights)
            self._steps[into] = self._steps[first][0], max(self._steps[first][1], self._steps[second][1])
            self._means[into] = np.asarray(mixed, np.float16)
            self._counts[into] = np.minimum(counts[0] + counts[1], _MOST_COUNTED).astype(np.uint16)
        kept = (len(self._means) + 1) // 2
        del self._steps[kept:], self._means[kept:], self._counts[kept:]
