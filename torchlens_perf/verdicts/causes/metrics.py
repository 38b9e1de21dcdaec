"""Signals that may explain a slow rank, sampled each second, and their means over steps.

A signal is a share of time, a rate, or a level. A signal that is not measured is NaN. All ranks
have the same list of signals. A rank can therefore be compared with other ranks, and with its own
past.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchlens_perf.run.verdicts import range_end

METRICS = (
    "cpu_wait_share",  # share of time: the training thread was runnable without a CPU
    "asleep_share",  # share of the steps' time: the training thread slept outside communication
    "kernel_share",  # share of time: the training thread ran in the kernel (faults, system calls)
    "neighbour_share",  # share of the rank's CPUs that programs outside the job kept busy
    "cpu_quota_share",  # share of its control group's periods in which the CPU quota was exhausted
    "cpu_clock_share",  # clock of its CPU, as a share of the highest clock
    "gc_share",  # share of time: Python's garbage collector ran
    "disk_wait_share",  # share of time: the rank, or its loader worker, was in uninterruptible sleep
    "major_faults_per_s",  # pages that were read from a disk
    "refaults_per_s",  # pages that its control group had evicted and needed again
    "memory_limit_share",  # used share of its control group's memory limit, without caches
    "memory_stall_share",  # share of time: its control group, or its node, waited for memory (PSI)
    "sm_clock_mhz",  # SM clock while its GPU was not idle
    "sm_clock_share",  # SM clock as a share of the GPU's highest SM clock
    "thermal_share",  # share of time: the GPU's clocks were lowered because of its temperature
    "power_share",  # share of time: the GPU's clocks were lowered because of its power limit
    "hw_slowdown_share",  # share of time: the board lowered the GPU's clocks (power brake, heat)
    "temperature_c",
    "gpu_neighbour_share",  # share of time: programs outside the job used the GPU
    "ecc_errors_per_s",  # uncorrectable errors only
    "remapped_rows_per_s",
    "xids_per_s",  # errors that the driver reports
    "pcie_replays_per_s",
    "nvlink_errors_per_s",
    "link_errors_per_s",  # errors of its node's InfiniBand or RoCE ports
    "expert_ktokens",  # thousands of tokens that its experts receive at a time, see experts/load.py
    "expert_share",  # share of the steps' time that its experts compute
    "alloc_retries_per_step",  # the device allocator freed its cache and waited for the device
)
# For these signals, a lower value is worse.
CLOCKS = ("cpu_clock_share", "sm_clock_mhz", "sm_clock_share")
SLOTS = 32
# A rank is compared with its own past if this past has at least this many seconds.
MIN_BEFORE_S = 4.0
_FIRST_SLOT_S = 1.0
_MAX_COUNTED = 60_000
_IS_CLOCK = np.array([name in CLOCKS for name in METRICS])
# Signals that count rare events. Page faults are not rare while their cause lasts.
_BURSTS = (
    "ecc_errors_per_s", "remapped_rows_per_s", "xids_per_s", "pcie_replays_per_s", "nvlink_errors_per_s",
    "link_errors_per_s", "alloc_retries_per_step",
)  # fmt: skip
_INDEX = {name: index for index, name in enumerate(METRICS)}
_IS_BURST = np.array([name in _BURSTS for name in METRICS])


def encode_signals(values: Mapping[str, float]) -> npt.NDArray[np.float16]:
    """Return named signals as an array for transmission.

    Missing signals are NaN, and large ones are clipped.
    """
    row = np.full(len(METRICS), np.nan, np.float64)
    row[[_INDEX[name] for name in values]] = list(values.values())
    return np.clip(row, -65504, 65504).astype(np.float16)


def measured_signals(row: npt.NDArray[np.floating[Any]]) -> dict[str, float]:
    """Return the measured signals, by name."""
    return {name: float(value) for name, value in zip(METRICS, row, strict=True) if value == value}


class _TimeSlot:
    """Mean signals of all ranks over a range of time, with the number of samples of each mean."""

    def __init__(self, start_s: float, step: int) -> None:
        self.start_s = self.end_s = start_s
        self.first_step = self.last_step = step
        # Stored as float16 once the slot is complete.
        self.means = np.zeros((0, len(METRICS)), np.float32)
        self.counts = np.zeros((0, len(METRICS)), np.uint16)

    def grow_to(self, ranks: int) -> None:
        missing = ranks - len(self.counts)
        if missing > 0:
            self.means = np.pad(self.means, ((0, missing), (0, 0)))
            self.counts = np.pad(self.counts, ((0, missing), (0, 0)))

    def add_sample(self, at: npt.NDArray[np.int64], values: npt.NDArray[np.float16]) -> None:
        """Add a sample of the ranks at the indices `at`. NaN values are ignored."""
        measured = ~np.isnan(values)
        count = self.counts[at] + measured
        mean = self.means[at]
        difference = np.where(measured, values.astype(np.float32) - mean, 0)
        self.means[at] = mean + difference / np.maximum(count, 1)
        self.counts[at] = np.minimum(count, _MAX_COUNTED)

    def merge(self, later: _TimeSlot) -> None:
        """Merge the next slot into this one."""
        ranks = max(len(self.counts), len(later.counts))
        self.grow_to(ranks)
        later.grow_to(ranks)
        counts = self.counts.astype(np.float32) + later.counts
        weighted = (
            self.means.astype(np.float32) * self.counts
            + later.means.astype(np.float32) * later.counts
        )
        self.means = (weighted / np.maximum(counts, 1)).astype(np.float16)
        self.counts = np.minimum(counts, _MAX_COUNTED).astype(np.uint16)
        self.end_s, self.last_step = later.end_s, max(self.last_step, later.last_step)


class MetricHistory:
    """The signals of all ranks over the run, in at most SLOTS ranges of time.

    Older ranges are longer. Times are by the clock of the detector's node.
    """

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._slots: list[_TimeSlot] = []

    def add_signals(
        self,
        ranks: npt.NDArray[np.int64],
        steps: npt.NDArray[np.int64],
        values: npt.NDArray[np.float16],
        now_s: float,
    ) -> None:
        """Add the newest signals of some ranks.

        values: shape [ranks, signals]. steps: the step that each rank is in.
        """
        if not len(ranks):
            return
        newest = int(steps.max())
        if not self._slots or now_s - self._slots[-1].start_s >= _FIRST_SLOT_S:
            if self._slots:
                self._slots[-1].means = self._slots[-1].means.astype(np.float16)
            self._slots.append(_TimeSlot(now_s, newest))
            if len(self._slots) > SLOTS:
                self._merge_two_slots(now_s)
        slot = self._slots[-1]
        slot.end_s, slot.last_step = now_s, max(slot.last_step, newest)
        at = np.array([self._index.setdefault(rank, len(self._index)) for rank in ranks.tolist()])
        slot.grow_to(len(self._index))
        slot.add_sample(at, values)

    @property
    def ranks(self) -> list[int]:
        """The ranks with signals."""
        return list(self._index)

    def mean_signals(
        self, ranks: Sequence[int], since_step: int, until_step: int | None = None
    ) -> dict[int, npt.NDArray[np.float32]]:
        """Return each known rank's mean signals over the time of these steps.

        Ranges of time that contain other steps as well are used only if there are no better ones.
        """
        end = range_end(until_step)
        inside = [
            slot for slot in self._slots if slot.first_step >= since_step and slot.last_step < end
        ]
        if not inside:
            inside = [
                slot
                for slot in self._slots
                if slot.last_step >= since_step and slot.first_step < end
            ]
        there = [rank for rank in ranks if rank in self._index]
        total, counts = self._sum_samples(
            inside, np.array([self._index[rank] for rank in there], np.int64)
        )
        means = np.where(counts > 0, total / np.maximum(counts, 1), np.nan).astype(np.float32)
        return dict(zip(there, means, strict=True))

    def usual_signals_before(self, rank: int, step: int) -> npt.NDArray[np.float32] | None:
        """Return a rank's usual signals before a step; None if the time before it is too short.

        The usual value is the better quartile over the ranges of time. For rare events, which occur
        in bursts, the usual value is the mean. A mean of other signals would include slow steps,
        because the first slow step may have been detected too late. The first range of time is left
        out, because it contains the job's start.
        """
        inside = [slot for slot in self._slots if slot.last_step < step][1:]
        at = self._index.get(rank)
        if (
            at is None
            or not inside
            or inside[-1].end_s - inside[0].start_s + _FIRST_SLOT_S < MIN_BEFORE_S
        ):
            return None
        # _sum_samples() also grows all slots to include this rank, as the next statement requires.
        total, counts = self._sum_samples(inside, np.array([at]))
        table = np.stack(
            [
                np.where(slot.counts[at] > 0, slot.means[at].astype(np.float32), np.nan)
                for slot in inside
            ]
        )
        usual = np.full(len(METRICS), np.nan, np.float32)
        measured = ~np.isnan(table).all(axis=0)
        # A rank that was added after these slots has no signals in them.
        if measured.any():
            low, high = np.nanquantile(table[:, measured], (0.25, 0.75), axis=0)
            usual[measured] = np.where(_IS_CLOCK[measured], high, low)
        bursts = _IS_BURST & measured
        usual[bursts] = (total / np.maximum(counts, 1))[0, bursts]
        return usual

    def _sum_samples(
        self, slots: Sequence[_TimeSlot], at: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return the sums of all samples, and their counts: [ranks, signals]."""
        total = np.zeros((len(at), len(METRICS)))
        counts = np.zeros_like(total)
        for slot in slots:
            slot.grow_to(len(self._index))
            count = slot.counts[at].astype(np.float64)
            total += slot.means[at] * count
            counts += count
        return total, counts

    def _merge_two_slots(self, now_s: float) -> None:
        """Merge the two adjacent slots whose total length is shortest relative to their age."""

        def length_by_age(index: int) -> float:
            first, second = self._slots[index], self._slots[index + 1]
            return (second.end_s - first.start_s + _FIRST_SLOT_S) / (
                now_s - second.end_s + _FIRST_SLOT_S
            )

        # The newest slot is not merged, because samples are still added to it.
        index = min(range(len(self._slots) - 2), key=length_by_age)
        self._slots[index].merge(self._slots.pop(index + 1))
