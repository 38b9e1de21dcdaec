"""Samples of a node's GPUs, network ports and processes, and statistics over samples. Pure.

A value is None if the hardware or its driver does not report it, or if this process may not read
it. None is never shown as 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class GpuSample:
    """State of a GPU. Counters start when the driver is loaded, `xids` at the first sample."""

    uuid: str
    """UUID as reported by processes that use the GPU: "GPU-..."."""
    monotonic_ns: int
    unix_ns: int
    interval_ns: int | None = None
    """Time since the previous sample; None for the first."""
    sm_clock_hz: int | None = None
    sm_clock_max_hz: int | None = None
    memory_clock_hz: int | None = None
    clock_reasons: int | None = None
    """Reasons for low clocks at this time, as NVML's bit mask, see REASONS."""
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    memory_temperature_c: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    busy: float | None = None
    """Fraction of the time since the previous sample in which a kernel was running. The next four
    fields are also fractions of this time.
    """
    sm_active: float | None = None
    sm_occupancy: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
    others_busy: float | None = None
    """Fraction of the time since the previous sample in which other processes than the job's ranks
    used the GPU; None if the driver does not report processes, or not by their ids here."""
    other_pid: int | None = None
    """The process that used the GPU most, of those outside the job; None without any."""
    energy_j: float | None = None
    throttle_power_ns: int | None = None
    throttle_thermal_ns: int | None = None
    throttle_sync_boost_ns: int | None = None
    throttle_board_limit_ns: int | None = None
    throttle_reliability_ns: int | None = None
    throttle_low_utilization_ns: int | None = None
    throttle_sw_thermal_ns: int | None = None
    throttle_hw_thermal_ns: int | None = None
    throttle_hw_power_brake_ns: int | None = None
    pcie_replays: int | None = None
    pcie_transmitted_bytes: int | None = None
    pcie_received_bytes: int | None = None
    nvlink_transmitted_bytes: int | None = None
    nvlink_received_bytes: int | None = None
    nvlink_replays: int | None = None
    nvlink_recoveries: int | None = None
    nvlink_errors: int | None = None
    """Number of CRC errors. For devices that do not report CRC errors (Blackwell), it is the number
    of received packets with an error.
    """
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: int | None = None
    """Number of memory rows that were remapped because of errors."""
    remapping_pending: bool | None = None
    """True if a row will be remapped when the GPU is reset."""
    remapping_failed: bool | None = None
    recovery_action: int | None = None
    """Action that the driver requests: 0 for none, 1 for a GPU reset, 2 for a reboot."""
    xids: int | None = None
    last_xid: int | None = None
    grown: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Increase of each counter since the previous sample."""


GPU_COUNTERS = (
    "energy_j", "throttle_power_ns", "throttle_thermal_ns", "throttle_sync_boost_ns", "throttle_board_limit_ns",
    "throttle_reliability_ns", "throttle_low_utilization_ns", "throttle_sw_thermal_ns", "throttle_hw_thermal_ns",
    "throttle_hw_power_brake_ns", "pcie_replays", "pcie_transmitted_bytes", "pcie_received_bytes",
    "nvlink_transmitted_bytes", "nvlink_received_bytes", "nvlink_replays", "nvlink_recoveries", "nvlink_errors",
    "ecc_corrected", "ecc_uncorrected", "remapped_rows", "xids",
)  # fmt: skip
GPU_GAUGES = (
    "sm_clock_hz", "sm_clock_max_hz", "memory_clock_hz", "power_w", "power_limit_w", "temperature_c",
    "memory_temperature_c", "memory_used_bytes", "memory_total_bytes", "busy", "sm_active", "sm_occupancy",
    "tensor_active", "dram_active", "others_busy",
)  # fmt: skip
# Bits of `clock_reasons` by reason. Idle clocks, and clocks set by a user, do not count as
# throttling.
REASONS = {
    "power": 0x04,
    "hw_slowdown": 0x08 | 0x40 | 0x80,
    "sync_boost": 0x10,
    "thermal": 0x20 | 0x40,
}


@dataclasses.dataclass(frozen=True)
class LinkSample:
    """State of one port of an InfiniBand or RoCE adapter at one time.

    Counters start when the adapter is reset.
    """

    device: str
    port: int
    monotonic_ns: int
    unix_ns: int
    interval_ns: int | None = None
    layer: str | None = None
    """"InfiniBand" or "Ethernet"."""
    active: bool | None = None
    rate_bits: int | None = None
    """Rate of the link in bits per second."""
    transmitted_bytes: int | None = None
    received_bytes: int | None = None
    transmitted_packets: int | None = None
    received_packets: int | None = None
    transmit_wait_ticks: int | None = None
    """Ticks, of a length that depends on the adapter, with data to send but no credit."""
    symbol_errors: int | None = None
    link_recoveries: int | None = None
    link_downs: int | None = None
    receive_errors: int | None = None
    transmit_discards: int | None = None
    integrity_errors: int | None = None
    out_of_sequence: int | None = None
    sequence_errors: int | None = None
    ack_timeouts: int | None = None
    rnr_retries: int | None = None
    """Number of times that the receiver was not ready and the retries were used up."""
    retries_exceeded: int | None = None
    congestion_notifications: int | None = None
    grown: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Display name, such as "mlx5_0/1"."""
        return f"{self.device}/{self.port}"


# Error counters of the port and its transport. On a healthy link, these counters stay near zero.
LINK_ERRORS = (
    "symbol_errors", "link_recoveries", "link_downs", "receive_errors", "transmit_discards", "integrity_errors",
    "out_of_sequence", "sequence_errors", "ack_timeouts", "rnr_retries", "retries_exceeded",
)  # fmt: skip
LINK_COUNTERS = (
    "transmitted_bytes", "received_bytes", "transmitted_packets", "received_packets", "transmit_wait_ticks",
    "congestion_notifications", *LINK_ERRORS,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ProcessSample:
    """Resources that a rank's process and its children have used so far.

    Counters start with the process.
    """

    rank: int
    monotonic_ns: int
    unix_ns: int
    cpu_ns: int | None = None
    """CPU time of all threads. If the process uses two cores, the value grows by 2e9 per second."""
    resident_bytes: int | None = None
    """Resident memory. A page that several processes share counts for each of them."""
    read_bytes: int | None = None
    """Bytes read from disks and file systems. Reads from the page cache are not included."""
    written_bytes: int | None = None
    network_received_bytes: int | None = None
    """Bytes received over all interfaces, except loopback, of the process's network namespace. The
    node's ranks may share this namespace.
    """
    network_transmitted_bytes: int | None = None


Sample = GpuSample | LinkSample | ProcessSample


@dataclasses.dataclass(frozen=True)
class HardwareSamples:
    """Samples of a node at one time. `names` are product names of GPUs by UUID, as far as known."""

    gpus: tuple[GpuSample, ...]
    links: tuple[LinkSample, ...]
    names: Mapping[str, str]


def counter_increases(
    before: Mapping[str, Any] | None, now: Mapping[str, Any], counters: Iterable[str]
) -> dict[str, float]:
    """Return the increase of counters between two samples.

    A counter that has decreased was reset to 0 in between.
    """
    if before is None:
        return {}
    known = [
        name for name in counters if before.get(name) is not None and now.get(name) is not None
    ]
    return {
        name: now[name] - before[name] if now[name] >= before[name] else now[name] for name in known
    }


_LAST_VALUES = (
    "last_xid",
    "recovery_action",
    "remapping_pending",
    "remapping_failed",
    "other_pid",
)


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

    def add_sample(self, sample: GpuSample) -> None:
        self.samples += 1
        for name in GPU_GAUGES:
            value = getattr(sample, name)
            if value is not None:
                self.sums[name] = self.sums.get(name, 0) + value
                self.counts[name] = self.counts.get(name, 0) + 1
                self.most[name] = max(self.most.get(name, value), value)
        if sample.interval_ns is not None:
            self.measured_ns += sample.interval_ns
            if sample.busy is not None:
                percent = round(100 * sample.busy)
                self.busy_percents[percent] = self.busy_percents.get(percent, 0) + 1
            for name, more in sample.grown.items():
                self.grown[name] = self.grown.get(name, 0) + more
                self.grown_ns[name] = self.grown_ns.get(name, 0) + sample.interval_ns
        if sample.clock_reasons is not None:
            self.counts["clock_reasons"] = self.counts.get("clock_reasons", 0) + 1
            for reason, bits in REASONS.items():
                self.reasons[reason] = self.reasons.get(reason, 0) + bool(
                    sample.clock_reasons & bits
                )
        for name in _LAST_VALUES:
            value = getattr(sample, name)
            if value is not None:
                self.last[name] = int(value)

    def mean(self, name: str) -> float | None:
        """Return the mean of the gauge `name`; None if it was never measured."""
        return self.sums[name] / self.counts[name] if name in self.sums else None

    @property
    def typical_busy(self) -> float | None:
        """Busy fraction of the median interval between samples; None without intervals.

        Like a typical step, it does not depend on a start-up, an evaluation or a pause.
        """
        intervals = sum(self.busy_percents.values())
        seen = 0
        for percent in sorted(self.busy_percents):
            seen += self.busy_percents[percent]
            if 2 * seen >= intervals:
                return percent / 100
        return None

    def throttled_shares(self) -> dict[str, float]:
        """Return for each reason the fraction of time with throttled clocks.

        Reasons for which nothing was measured are missing.

        The fraction is computed from the driver's counter, or from the samples if the GPU has no
        counter for the reason.
        """
        shares = {
            "power": self._share_of_time("throttle_power_ns"),
            "thermal": self._largest_share_of_time(
                "throttle_thermal_ns", "throttle_sw_thermal_ns", "throttle_hw_thermal_ns"
            ),
            "hw_slowdown": self._largest_share_of_time(
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

    def _share_of_time(self, counter: str) -> float | None:
        over_ns = self.grown_ns.get(counter)
        return min(1.0, self.grown[counter] / over_ns) if over_ns else None

    def _largest_share_of_time(self, *counters: str) -> float | None:
        """Return the largest of these counters' fractions of time, which may overlap."""
        return max(
            (share for share in map(self._share_of_time, counters) if share is not None),
            default=None,
        )

    def to_signals(self) -> dict[str, float]:
        """Return the values that compute_gpu_signals() describes."""
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

    def add_sample(self, sample: LinkSample) -> None:
        self.samples += 1
        self.measured_ns += sample.interval_ns or 0
        self.inactive += sample.active is False
        self.layer, self.rate_bits = sample.layer, sample.rate_bits
        for name, more in sample.grown.items():
            self.grown[name] = self.grown.get(name, 0) + more

    def to_signals(self) -> dict[str, float]:
        """Return the values that compute_link_signals() describes."""
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
    """Totals by LinkSample.name."""
    lost_samples: int = 0
    dropped_files: int = 0


def compute_gpu_signals(samples: Sequence[GpuSample]) -> dict[str, float]:
    """Compute values of one GPU from consecutive samples.

    Values that were not measured are missing.

    - Fractions: sm_clock_share (mean clock divided by the highest), thermal_share, power_share and
      hw_slowdown_share (time with throttled clocks), memory_used_share, sm_active, tensor_active,
      dram_active, others_busy.
    - Means: sm_clock_hz, temperature_c, power_w.
    - Increases: ecc_uncorrected, xid_count, pcie_replays, nvlink_errors and remapped_rows. A
      pending row counts as remapped.
    """
    totals = GpuTotals()
    for sample in samples:
        totals.add_sample(sample)
    return totals.to_signals()


def compute_link_signals(samples: Sequence[LinkSample]) -> dict[str, float]:
    """Compute values of one port from consecutive samples.

    Values that were not measured are missing.

    - Increases: each counter, and `errors`, the sum over LINK_ERRORS.
    - transmitted_share, received_share: used fraction of the link's rate.
    - inactive_share: fraction of the samples in which the port was down.
    """
    totals = LinkTotals()
    for sample in samples:
        totals.add_sample(sample)
    return totals.to_signals()


def _sum_of_known(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None if no value is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
