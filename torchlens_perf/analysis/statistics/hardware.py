"""Samples of a node's GPUs, network ports and processes, and statistics over them. Pure functions and values.

None stands for what the hardware or its driver does not report, or this process may not read; it is never shown as 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class GpuSample:
    """One GPU at one instant. Counters count from the driver's loading, XIDs from the first sample."""

    uuid: str
    """As the process that computes on it reported it: "GPU-..."."""
    monotonic_ns: int
    unix_ns: int
    interval_ns: int | None = None
    """Since the sample before; None for the first."""
    sm_clock_hz: int | None = None
    sm_clock_max_hz: int | None = None
    memory_clock_hz: int | None = None
    clock_reasons: int | None = None
    """Why clocks are low at this instant: NVML's bits, see REASONS."""
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    memory_temperature_c: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    busy: float | None = None
    """Share of the time with any kernel running, since the sample before. The next four are shares too."""
    sm_active: float | None = None
    sm_occupancy: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
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
    """CRC errors. Where the device does not report those (Blackwell), packets received with an error."""
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: int | None = None
    """Of the device's memory, for corrected and for uncorrected errors."""
    remapping_pending: bool | None = None
    """A row is to be remapped when the GPU is reset."""
    remapping_failed: bool | None = None
    recovery_action: int | None = None
    """What the driver asks for: 0 nothing, 1 a reset of the GPU, 2 a reboot, 3 and more: see NVML."""
    xids: int | None = None
    last_xid: int | None = None
    grown: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By how much each counter is more than in the sample before."""


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
    "tensor_active", "dram_active",
)  # fmt: skip
# Bits of clock_reasons. Idle clocks, and clocks that somebody has set, are no throttling.
REASONS = {
    "power": 0x04,
    "hw_slowdown": 0x08 | 0x40 | 0x80,
    "sync_boost": 0x10,
    "thermal": 0x20 | 0x40,
}


@dataclasses.dataclass(frozen=True)
class LinkSample:
    """One port of an InfiniBand or RoCE adapter at one instant. Counters are the adapter's, since it was reset."""

    device: str
    port: int
    monotonic_ns: int
    unix_ns: int
    interval_ns: int | None = None
    layer: str | None = None
    """InfiniBand or Ethernet."""
    active: bool | None = None
    rate_bits: int | None = None
    """Of the link, in bits a second."""
    transmitted_bytes: int | None = None
    received_bytes: int | None = None
    transmitted_packets: int | None = None
    received_packets: int | None = None
    transmit_wait_ticks: int | None = None
    """While there was something to send and no credit; how long a tick is, only the adapter knows."""
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
    """The receiver was not ready, and the retries were used up."""
    retries_exceeded: int | None = None
    congestion_notifications: int | None = None
    grown: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """As people say it: "mlx5_0/1"."""
        return f"{self.device}/{self.port}"


# Of the port, and of the transport on top of it: what a healthy link counts none, or next to none of.
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
    """What a rank's process and its child processes have used up to one instant. Counters begin with the process."""

    rank: int
    monotonic_ns: int
    unix_ns: int
    cpu_ns: int | None = None
    """CPU time of all threads; a process that keeps two cores busy gains 2e9 a second."""
    resident_bytes: int | None = None
    """Pages that several processes share count once for each."""
    read_bytes: int | None = None
    """Read from disks and file systems; what the page cache had is not in it."""
    written_bytes: int | None = None
    network_received_bytes: int | None = None
    """Of all interfaces but loopback in the process's network namespace, which ranks of one node share."""
    network_transmitted_bytes: int | None = None


Sample = GpuSample | LinkSample | ProcessSample


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Samples of one instant, and the products' names of the GPUs by their UUIDs, where they are known."""

    gpus: tuple[GpuSample, ...]
    links: tuple[LinkSample, ...]
    names: Mapping[str, str]


def growth(before: Mapping[str, Any] | None, now: Mapping[str, Any], counters: Iterable[str]) -> dict[str, float]:
    """By how much counters grew from one sample's fields to the next one's. A counter that fell began anew at 0."""
    if before is None:
        return {}
    known = [name for name in counters if before.get(name) is not None and now.get(name) is not None]
    return {name: now[name] - before[name] if now[name] >= before[name] else now[name] for name in known}


@dataclasses.dataclass
class GpuTotals:
    """A stretch of one GPU's samples, added up: of the whole run in the node's state file, or of any other time."""

    samples: int = 0
    measured_ns: int = 0
    """Of the intervals between samples."""
    sums: dict[str, int | float] = dataclasses.field(default_factory=dict)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    most: dict[str, int | float] = dataclasses.field(default_factory=dict)
    grown: dict[str, int | float] = dataclasses.field(default_factory=dict)
    grown_ns: dict[str, int] = dataclasses.field(default_factory=dict)
    """Over how long each counter was seen to grow, or not to."""
    reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    """Samples at whose instant clocks were low for this reason."""
    last: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, sample: GpuSample) -> None:
        self.samples += 1
        for name in GPU_GAUGES:
            value = getattr(sample, name)
            if value is not None:
                self.sums[name] = self.sums.get(name, 0) + value
                self.counts[name] = self.counts.get(name, 0) + 1
                self.most[name] = max(self.most.get(name, value), value)
        if sample.interval_ns is not None:
            self.measured_ns += sample.interval_ns
            for name, more in sample.grown.items():
                self.grown[name] = self.grown.get(name, 0) + more
                self.grown_ns[name] = self.grown_ns.get(name, 0) + sample.interval_ns
        if sample.clock_reasons is not None:
            self.counts["clock_reasons"] = self.counts.get("clock_reasons", 0) + 1
            for reason, bits in REASONS.items():
                self.reasons[reason] = self.reasons.get(reason, 0) + bool(sample.clock_reasons & bits)
        for name in ("last_xid", "recovery_action", "remapping_pending", "remapping_failed"):
            value = getattr(sample, name)
            if value is not None:
                self.last[name] = int(value)

    def mean(self, name: str) -> float | None:
        """Of a gauge; None where it was never measured."""
        return self.sums[name] / self.counts[name] if name in self.sums else None

    def throttled(self) -> dict[str, float]:
        """By reason, for which share of the time clocks were held down; without what is not measured.

        By the driver's counters. Where a GPU has none for a reason, by how many of the samples found it.
        """
        shares = {
            "power": self._share("throttle_power_ns"),
            "thermal": self._largest("throttle_thermal_ns", "throttle_sw_thermal_ns", "throttle_hw_thermal_ns"),
            "hw_slowdown": self._largest("throttle_hw_thermal_ns", "throttle_hw_power_brake_ns"),
            "sync_boost": self._share("throttle_sync_boost_ns"),
            "board_limit": self._share("throttle_board_limit_ns"),
            "reliability": self._share("throttle_reliability_ns"),
        }
        asked = self.counts.get("clock_reasons")
        for reason, found in self.reasons.items():
            if asked and shares[reason] is None:
                shares[reason] = found / asked
        return {reason: share for reason, share in shares.items() if share is not None}

    def _share(self, counter: str) -> float | None:
        over_ns = self.grown_ns.get(counter)
        return min(1.0, self.grown[counter] / over_ns) if over_ns else None

    def _largest(self, *counters: str) -> float | None:
        """Of counters that may run at the same time."""
        return max((share for share in map(self._share, counters) if share is not None), default=None)

    def signals(self) -> dict[str, float]:
        """See gpu_signals()."""
        throttled = self.throttled()
        max_clock_hz, clock_hz = self.most.get("sm_clock_max_hz"), self.mean("sm_clock_hz")
        used, total = self.mean("memory_used_bytes"), self.most.get("memory_total_bytes")
        grown = self.grown.get
        pending, remapped = self.last.get("remapping_pending"), grown("remapped_rows")
        found = {
            "sm_clock_hz": clock_hz,
            "sm_clock_share": clock_hz / max_clock_hz if clock_hz is not None and max_clock_hz else None,
            "thermal_share": throttled.get("thermal"),
            "power_share": throttled.get("power"),
            "hw_slowdown_share": throttled.get("hw_slowdown"),
            "temperature_c": self.mean("temperature_c"),
            "power_w": self.mean("power_w"),
            "memory_used_share": used / total if used is not None and total else None,
            "sm_active": self.mean("sm_active"),
            "tensor_active": self.mean("tensor_active"),
            "dram_active": self.mean("dram_active"),
            "ecc_uncorrected": grown("ecc_uncorrected"),
            "remapped_rows": remapped if pending is None else (remapped or 0) + pending,
            "xid_count": grown("xids"),
            "pcie_replays": grown("pcie_replays"),
            "nvlink_errors": _sum(map(grown, ("nvlink_errors", "nvlink_replays", "nvlink_recoveries"))),
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclasses.dataclass
class LinkTotals:
    """A stretch of one port's samples, added up."""

    samples: int = 0
    measured_ns: int = 0
    grown: dict[str, int | float] = dataclasses.field(default_factory=dict)
    inactive: int = 0
    """Samples in which the port was not up."""
    layer: str | None = None
    rate_bits: int | None = None

    def add(self, sample: LinkSample) -> None:
        self.samples += 1
        self.measured_ns += sample.interval_ns or 0
        self.inactive += sample.active is False
        self.layer, self.rate_bits = sample.layer, sample.rate_bits
        for name, more in sample.grown.items():
            self.grown[name] = self.grown.get(name, 0) + more

    def signals(self) -> dict[str, float]:
        """See link_signals()."""
        found = dict(self.grown)
        errors = _sum(map(self.grown.get, LINK_ERRORS))
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
class GpuFacts:
    """What of a GPU does not change."""

    name: str | None
    pci_bus_id: str | None


@dataclasses.dataclass(frozen=True)
class Telemetry:
    """What a node's hardware did in the whole run: what the report shows, and a later sidecar goes on with."""

    gpus: dict[str, GpuTotals] = dataclasses.field(default_factory=dict)
    """By UUID, as the next three."""
    facts: dict[str, GpuFacts] = dataclasses.field(default_factory=dict)
    losses: dict[str, int] = dataclasses.field(default_factory=dict)
    """How often the GPU did not answer."""
    slow_samples: dict[str, int] = dataclasses.field(default_factory=dict)
    links: dict[str, LinkTotals] = dataclasses.field(default_factory=dict)
    """By name, see LinkSample."""
    lost_samples: int = 0
    dropped_files: int = 0


def gpu_signals(samples: Sequence[GpuSample]) -> dict[str, float]:
    """What the samples of one GPU, in order, say of that time. A missing key was not measured.

    Shares of the time: sm_clock_share (mean clock by highest), thermal_share, power_share and hw_slowdown_share (held
    down for that reason), memory_used_share, and sm_active, tensor_active, dram_active. Means: sm_clock_hz,
    temperature_c, power_w. Growth: ecc_uncorrected, xid_count, pcie_replays, nvlink_errors, and remapped_rows, to which
    a pending one counts.
    """
    totals = GpuTotals()
    for sample in samples:
        totals.add(sample)
    return totals.signals()


def link_signals(samples: Sequence[LinkSample]) -> dict[str, float]:
    """What the samples of one port, in order, say of that time. A missing key was not measured.

    By how much each counter grew, `errors` for all of LINK_ERRORS, how much of the link's rate was used, and the share
    of samples in which it was down.
    """
    totals = LinkTotals()
    for sample in samples:
        totals.add(sample)
    return totals.signals()


def _sum(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
