"""Statistics over samples of GPUs and network ports. Pure.

A value is None or missing if it was never measured. It is never shown as 0.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable

from torchlens_perf.run.hardware_samples import (
    GPU_GAUGES,
    GPUS,
    LINK_ERRORS,
    Sample,
    select_quantities,
)

# Bits of `clock_reasons` by reason. Idle clocks, and clocks set by a user, do not count as
# throttling.
REASONS = {
    "power": 0x04,
    "hw_slowdown": 0x08 | 0x40 | 0x80,
    "sync_boost": 0x10,
    "thermal": 0x20 | 0x40,
}


@dataclasses.dataclass
class GpuTotals:
    """Sums over the samples of one GPU in a period."""

    samples: int = 0
    measured_ns: int = 0
    """Sum of the intervals between samples."""
    sums: dict[str, int | float] = dataclasses.field(default_factory=dict)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    most: dict[str, int | float] = dataclasses.field(default_factory=dict)
    grown: dict[str, int | float] = dataclasses.field(default_factory=dict)
    grown_ns: dict[str, int] = dataclasses.field(default_factory=dict)
    """For each counter, the total time over which its increase is known."""
    reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    """For each reason, the number of samples in which clocks were low because of it."""
    last: dict[str, int] = dataclasses.field(default_factory=dict)
    busy_percents: dict[int, int] = dataclasses.field(default_factory=dict)
    """Number of intervals between samples by the percentage in which the GPU was busy."""

    def add_sample(self, sample: Sample) -> None:
        self.samples += 1
        interval_ns, busy = sample["interval_ns"], sample["busy"]
        for name in GPU_GAUGES:
            value = sample[name]
            if value is not None:
                self.sums[name] = self.sums.get(name, 0) + value
                self.counts[name] = self.counts.get(name, 0) + 1
                self.most[name] = max(self.most.get(name, value), value)
        if interval_ns is not None:
            self.measured_ns += interval_ns
            if busy is not None:
                percent = round(100 * busy)
                self.busy_percents[percent] = self.busy_percents.get(percent, 0) + 1
            for name, more in sample.grown.items():
                self.grown[name] = self.grown.get(name, 0) + more
                self.grown_ns[name] = self.grown_ns.get(name, 0) + interval_ns
        clock_reasons = sample["clock_reasons"]
        if clock_reasons is not None:
            self.counts["clock_reasons"] = self.counts.get("clock_reasons", 0) + 1
            for reason, bits in REASONS.items():
                self.reasons[reason] = self.reasons.get(reason, 0) + bool(clock_reasons & bits)
        newest = {name: sample[name] for name in select_quantities(GPUS, "newest")}
        self.last |= {name: int(value) for name, value in newest.items() if value is not None}

    def mean(self, name: str) -> float | None:
        """Return the mean of the gauge `name`; None if it was never measured."""
        return self.sums[name] / self.counts[name] if name in self.sums else None

    @property
    def typical_busy(self) -> float | None:
        """Busy fraction of the median interval between samples; None without intervals.

        Like a typical step, it does not depend on a start-up, an evaluation or a pause.
        """
        percents = sorted(self.busy_percents)
        seen = list(itertools.accumulate(self.busy_percents[each] for each in percents))
        return percents[bisect.bisect_left(seen, seen[-1] / 2)] / 100 if seen else None

    def throttled_shares(self) -> dict[str, float]:
        """Return for each reason the fraction of time with throttled clocks.

        Reasons for which nothing was measured are missing.

        The fraction is computed from the driver's counter, or from the samples if the GPU has no
        counter for the reason.
        """
        shares = {
            "power": self._share_of_time("throttle_power_ns"),
            "thermal": self._share_of_time(
                "throttle_thermal_ns", "throttle_sw_thermal_ns", "throttle_hw_thermal_ns"
            ),
            "hw_slowdown": self._share_of_time(
                "throttle_hw_thermal_ns", "throttle_hw_power_brake_ns"
            ),
            "sync_boost": self._share_of_time("throttle_sync_boost_ns"),
            "board_limit": self._share_of_time("throttle_board_limit_ns"),
            "reliability": self._share_of_time("throttle_reliability_ns"),
        }
        asked = self.counts.get("clock_reasons")
        for reason, found in self.reasons.items():
            if asked and shares[reason] is None:
                shares[reason] = found / asked
        return {reason: share for reason, share in shares.items() if share is not None}

    def _share_of_time(self, *counters: str) -> float | None:
        """Return the largest of these counters' fractions of time, which may overlap."""
        known = (each for each in counters if self.grown_ns.get(each))
        return max(
            (min(1.0, self.grown[each] / self.grown_ns[each]) for each in known), default=None
        )

    def to_signals(self) -> dict[str, float]:
        """Return values of the samples. Values that were not measured are missing.

        - Fractions: sm_clock_share (mean clock divided by the highest), thermal_share, power_share
          and hw_slowdown_share (time with throttled clocks), memory_used_share, sm_active,
          tensor_active, dram_active, others_busy.
        - Means: sm_clock_hz, temperature_c, power_w.
        - Increases: ecc_uncorrected, xid_count, pcie_replays, nvlink_errors and remapped_rows. A
          pending row counts as remapped.
        """
        throttled = self.throttled_shares()
        max_clock_hz, clock_hz = self.most.get("sm_clock_max_hz"), self.mean("sm_clock_hz")
        used, total = self.mean("memory_used_bytes"), self.most.get("memory_total_bytes")
        grown = self.grown.get
        pending, remapped = self.last.get("remapping_pending"), grown("remapped_rows")
        found = {
            "sm_clock_hz": clock_hz,
            "sm_clock_share": (
                clock_hz / max_clock_hz if clock_hz is not None and max_clock_hz else None
            ),
            "thermal_share": throttled.get("thermal"),
            "power_share": throttled.get("power"),
            "hw_slowdown_share": throttled.get("hw_slowdown"),
            "temperature_c": self.mean("temperature_c"),
            "power_w": self.mean("power_w"),
            "memory_used_share": used / total if used is not None and total else None,
            "sm_active": self.mean("sm_active"),
            "tensor_active": self.mean("tensor_active"),
            "dram_active": self.mean("dram_active"),
            "others_busy": self.mean("others_busy"),
            "ecc_uncorrected": grown("ecc_uncorrected"),
            "remapped_rows": remapped if pending is None else (remapped or 0) + pending,
            "xid_count": grown("xids"),
            "pcie_replays": grown("pcie_replays"),
            "nvlink_errors": _sum_of_known(
                map(grown, ("nvlink_errors", "nvlink_replays", "nvlink_recoveries"))
            ),
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclasses.dataclass
class LinkTotals:
    """Sums over samples of one port."""

    samples: int = 0
    measured_ns: int = 0
    grown: dict[str, int | float] = dataclasses.field(default_factory=dict)
    inactive: int = 0
    """Number of samples in which the port was not up."""
    layer: str | None = None
    rate_bits: int | None = None

    def add_sample(self, sample: Sample) -> None:
        self.samples += 1
        self.measured_ns += sample["interval_ns"] or 0
        self.inactive += sample["active"] is False
        self.layer, self.rate_bits = sample["layer"], sample["rate_bits"]
        for name, more in sample.grown.items():
            self.grown[name] = self.grown.get(name, 0) + more

    def to_signals(self) -> dict[str, float]:
        """Return values of the samples. Values that were not measured are missing.

        - Increases: each counter, and `errors`, the sum over LINK_ERRORS.
        - transmitted_share, received_share: used fraction of the link's rate.
        - inactive_share: fraction of the samples in which the port was down.
        """
        found = dict(self.grown)
        errors = _sum_of_known(map(self.grown.get, LINK_ERRORS))
        if errors is not None:
            found["errors"] = errors
        if self.rate_bits and self.measured_ns:
            for way in ("transmitted", "received"):
                if f"{way}_bytes" in found:
                    share = found[f"{way}_bytes"] * 8e9 / self.measured_ns / self.rate_bits
                    found[f"{way}_share"] = share
        if self.samples:
            found["inactive_share"] = self.inactive / self.samples
        return found


@dataclasses.dataclass(frozen=True)
class GpuProperties:
    """Properties of a GPU that do not change."""

    name: str | None
    pci_bus_id: str | None


@dataclasses.dataclass(frozen=True)
class HardwareTotals:
    """A node's hardware statistics over the run, for reports and for a restarted sidecar."""

    gpus: dict[str, GpuTotals] = dataclasses.field(default_factory=dict)
    """Totals by UUID. The next three fields are also by UUID."""
    facts: dict[str, GpuProperties] = dataclasses.field(default_factory=dict)
    losses: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of failed attempts to read the GPU."""
    slow_samples: dict[str, int] = dataclasses.field(default_factory=dict)
    links: dict[str, LinkTotals] = dataclasses.field(default_factory=dict)
    """Totals by the ports' names."""
    lost_samples: int = 0
    dropped_files: int = 0


def compute_signals(totals: GpuTotals | LinkTotals, samples: Iterable[Sample]) -> dict[str, float]:
    """Add consecutive samples of a GPU or a port to new totals. Return their signals."""
    for sample in samples:
        totals.add_sample(sample)
    return totals.to_signals()


def _sum_of_known(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None if no value is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
