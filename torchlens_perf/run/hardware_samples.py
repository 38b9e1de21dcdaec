"""Samples of a node's GPUs, network ports and processes, and the quantities that they have.

A quantity is missing in a sample if the hardware or its driver does not report it, or if this
process may not read it. It is never shown as 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

GPUS, LINKS, PROCESSES = "gpus", "links", "processes"
"""Kinds of samples, and the folders of their Parquet files."""
Summary = Literal["mean", "max", "growth", "throttling", "newest", "port error", "counter", ""]
"""How a quantity is summarized over a run:

- mean, max: a gauge. Reports have its mean or its maximum for each GPU.
- growth: a counter. Reports have its increase for each GPU.
- throttling: a counter of the time with low clocks. Reports combine these counters.
- newest: reports have the newest value for each GPU.
- port error: a counter of errors of a port or its transport. It stays near zero on a healthy link.
- counter: any other counter.
"""
# Type and summary of each quantity, by kind of sample and in the order of the Parquet columns.
# Counters of GPUs start when the driver is loaded, `xids` at the first sample, those of ports when
# the adapter is reset, and those of processes with the process.
QUANTITIES: Mapping[str, Mapping[str, tuple[type, Summary]]] = {
    GPUS: {
        "uuid": (str, ""),
        # Time since the previous sample. Shares and growth are measured over it.
        "interval_ns": (int, ""),
        "sm_clock_hz": (int, "mean"),
        "sm_clock_max_hz": (int, "max"),
        "memory_clock_hz": (int, "mean"),
        # Reasons for low clocks at this time, as NVML's bit mask, see REASONS.
        "clock_reasons": (int, ""),
        "power_w": (float, "mean"),
        "power_limit_w": (float, "max"),
        "temperature_c": (int, "mean"),
        "memory_temperature_c": (int, "max"),
        "memory_used_bytes": (int, "max"),
        "memory_total_bytes": (int, "max"),
        # Share of the interval in which a kernel was running. The next five are shares of it, too.
        "busy": (float, "mean"),
        "sm_active": (float, "mean"),
        "sm_occupancy": (float, "mean"),
        "tensor_active": (float, "mean"),
        "dram_active": (float, "mean"),
        # Use of the GPU by processes other than the job's ranks. It is missing if the driver does
        # not report processes, or not by their ids here.
        "others_busy": (float, "mean"),
        # The process outside the job that used the GPU most.
        "other_pid": (int, "newest"),
        "energy_j": (float, "growth"),
        "throttle_power_ns": (int, "throttling"),
        "throttle_thermal_ns": (int, "throttling"),
        "throttle_sync_boost_ns": (int, "throttling"),
        "throttle_board_limit_ns": (int, "throttling"),
        "throttle_reliability_ns": (int, "throttling"),
        "throttle_low_utilization_ns": (int, "throttling"),
        "throttle_sw_thermal_ns": (int, "throttling"),
        "throttle_hw_thermal_ns": (int, "throttling"),
        "throttle_hw_power_brake_ns": (int, "throttling"),
        "pcie_replays": (int, "growth"),
        "pcie_transmitted_bytes": (int, "growth"),
        "pcie_received_bytes": (int, "growth"),
        "nvlink_transmitted_bytes": (int, "growth"),
        "nvlink_received_bytes": (int, "growth"),
        "nvlink_replays": (int, "growth"),
        "nvlink_recoveries": (int, "growth"),
        # CRC errors. For devices that do not report CRC errors (Blackwell), received packets with
        # an error.
        "nvlink_errors": (int, "growth"),
        "ecc_corrected": (int, "growth"),
        "ecc_uncorrected": (int, "growth"),
        # Number of memory rows that were remapped because of errors.
        "remapped_rows": (int, "growth"),
        # True if a row will be remapped when the GPU is reset.
        "remapping_pending": (bool, "newest"),
        "remapping_failed": (bool, ""),
        # Action that the driver requests: 0 for none, 1 for a GPU reset, 2 for a reboot.
        "recovery_action": (int, "newest"),
        "xids": (int, "growth"),
        "last_xid": (int, "newest"),
    },
    LINKS: {
        "device": (str, ""),
        "port": (int, ""),
        "interval_ns": (int, ""),
        # "InfiniBand" or "Ethernet".
        "layer": (str, ""),
        "active": (bool, ""),
        # Rate of the link in bits per second.
        "rate_bits": (int, ""),
        "transmitted_bytes": (int, "counter"),
        "received_bytes": (int, "counter"),
        "transmitted_packets": (int, "counter"),
        "received_packets": (int, "counter"),
        # Ticks, of a length that depends on the adapter, with data to send but no credit.
        "transmit_wait_ticks": (int, "counter"),
        "symbol_errors": (int, "port error"),
        "link_recoveries": (int, "port error"),
        "link_downs": (int, "port error"),
        "receive_errors": (int, "port error"),
        "transmit_discards": (int, "port error"),
        "integrity_errors": (int, "port error"),
        "out_of_sequence": (int, "port error"),
        "sequence_errors": (int, "port error"),
        "ack_timeouts": (int, "port error"),
        # Number of times that the receiver was not ready and the retries were used up.
        "rnr_retries": (int, "port error"),
        "retries_exceeded": (int, "port error"),
        "congestion_notifications": (int, "counter"),
    },
    # Resources that a rank's process and its children have used so far.
    PROCESSES: {
        "rank": (int, ""),
        # CPU time of all threads. If two cores are used, the value grows by 2e9 per second.
        "cpu_ns": (int, "counter"),
        # Resident memory. A page that several processes share counts for each of them.
        "resident_bytes": (int, ""),
        # Bytes of disks and file systems, without reads from the page cache.
        "read_bytes": (int, "counter"),
        "written_bytes": (int, "counter"),
        # Bytes over all interfaces, except loopback, of the process's network namespace. The
        # node's ranks may share this namespace.
        "network_received_bytes": (int, "counter"),
        "network_transmitted_bytes": (int, "counter"),
    },
}


def select_quantities(kind: str, *summaries: Summary) -> tuple[str, ...]:
    """Return the names of a kind's quantities with one of these summaries."""
    return tuple(name for name, (_, how) in QUANTITIES[kind].items() if how in summaries)


GPU_GAUGES = select_quantities(GPUS, "mean", "max")
LINK_ERRORS = select_quantities(LINKS, "port error")
COUNTERS = {
    kind: select_quantities(kind, "growth", "throttling", "port error", "counter")
    for kind in QUANTITIES
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """State of a GPU, of a port, or of a rank's processes at one time."""

    kind: str
    """GPUS, LINKS or PROCESSES."""
    name: str
    """UUID of the GPU ("GPU-..."), port such as "mlx5_0/1", or rank."""
    monotonic_ns: int
    unix_ns: int
    values: Mapping[str, Any]
    """Values of the kind's QUANTITIES. A value that is not known is missing."""
    grown: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Increase of each counter since the previous sample."""

    def __getitem__(self, quantity: str) -> Any:
        """Return the value of a quantity, or None if it is not known."""
        return self.values.get(quantity)


@dataclasses.dataclass(frozen=True)
class HardwareSamples:
    """Samples of a node's GPUs and ports at one time."""

    samples: tuple[Sample, ...]
    names: Mapping[str, str]
    """Product names of GPUs by UUID, as far as known."""


def build_sample(
    kind: str,
    name: str,
    monotonic_ns: int,
    unix_ns: int,
    values: Mapping[str, Any],
    before: Sample | None,
) -> Sample:
    """Return a sample with the interval and the increases since the previous sample `before`.

    values: values that are not known are None or missing.
    """
    known = {quantity: value for quantity, value in values.items() if value is not None}
    if before is None:
        return Sample(kind, name, monotonic_ns, unix_ns, known)
    known["interval_ns"] = monotonic_ns - before.monotonic_ns
    grown = counter_increases(before.values, known, COUNTERS[kind])
    return Sample(kind, name, monotonic_ns, unix_ns, known, grown)


def counter_increases(
    before: Mapping[str, Any], now: Mapping[str, Any], counters: Iterable[str]
) -> dict[str, float]:
    """Return the increase of counters between two samples.

    A counter that has decreased was reset to 0 in between.
    """
    known = [name for name in counters if name in before and name in now]
    return {
        name: now[name] - before[name] if now[name] >= before[name] else now[name] for name in known
    }
