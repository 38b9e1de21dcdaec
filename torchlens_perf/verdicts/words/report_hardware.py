"""Types for GPUs and network ports in `report --json`. See report.py."""

from __future__ import annotations

from typing import TypedDict


class Gpu(TypedDict):
    """Means, extremes and counter increases of one GPU over the run."""

    uuid: str
    name: str | None
    pci_bus_id: str | None
    host: str
    ranks: list[int]
    samples: int
    measured_s: float
    losses: int
    slow_samples: int
    sm_clock_hz: float | None
    memory_clock_hz: float | None
    power_w: float | None
    temperature_c: float | None
    busy: float | None
    typical_busy: float | None
    """Share of the median second in which a kernel of any process was running; None if not
    measured."""
    others_busy: float | None
    """Share of the time in which processes outside the job used the GPU; None if not measured."""
    other_pid: int | None
    """The process outside the job that used the GPU most, at the newest sample with one."""
    sm_active: float | None
    sm_occupancy: float | None
    tensor_active: float | None
    dram_active: float | None
    sm_clock_max_hz: float | None
    power_limit_w: float | None
    memory_temperature_c: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    temperature_max_c: float | None
    power_max_w: float | None
    throttled: dict[str, float]
    """Share of the time in which clocks were lowered, for each reason."""
    energy_j: float | None
    xids: float | None
    ecc_corrected: float | None
    ecc_uncorrected: float | None
    remapped_rows: float | None
    pcie_replays: float | None
    pcie_transmitted_bytes: float | None
    pcie_received_bytes: float | None
    nvlink_replays: float | None
    nvlink_recoveries: float | None
    nvlink_errors: float | None
    nvlink_transmitted_bytes: float | None
    nvlink_received_bytes: float | None
    last_xid: int | None
    remapping_pending: int | None
    recovery_action: int | None
    signals: dict[str, float]


class Link(TypedDict):
    """Means and errors of one network port over the run."""

    port: str
    host: str
    layer: str | None
    rate_bits: int | None
    samples: int
    measured_s: float
    errors: dict[str, float]
    signals: dict[str, float]
