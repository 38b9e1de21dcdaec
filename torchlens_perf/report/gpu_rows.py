"""What the report says of the nodes' hardware: GPUs and network ports, over the whole run."""

from __future__ import annotations

from typing import Any

from torchlens_perf.node_state import NodeState, ProcessState
from torchlens_perf.telemetry import LINK_ERRORS, GpuTotals, LinkTotals

_MEANS = (
    "sm_clock_hz", "memory_clock_hz", "power_w", "temperature_c", "busy", "sm_active", "sm_occupancy", "tensor_active",
    "dram_active",
)  # fmt: skip
_MOST = (
    "sm_clock_max_hz", "power_limit_w", "memory_temperature_c", "memory_used_bytes", "memory_total_bytes",
)  # fmt: skip
_GROWN = (
    "energy_j", "xids", "ecc_corrected", "ecc_uncorrected", "remapped_rows", "pcie_replays", "pcie_transmitted_bytes",
    "pcie_received_bytes", "nvlink_replays", "nvlink_recoveries", "nvlink_errors", "nvlink_transmitted_bytes",
    "nvlink_received_bytes",
)  # fmt: skip


def gpu_rows(nodes: list[NodeState], processes: dict[int, ProcessState]) -> list[dict[str, Any]]:
    """GPUs that there are samples of, by rank: means, the most there was, and growth; None is what was not measured."""
    rows = []
    for node in nodes:
        told = node.telemetry
        facts, losses, slow = told.get("facts", {}), told.get("losses", {}), told.get("slow_samples", {})
        for uuid, saved in told.get("gpus", {}).items():
            totals = GpuTotals(**saved)
            ranks = [rank for rank, process in sorted(processes.items()) if _computes_on(process, uuid)]
            known = facts.get(uuid, {})
            rows.append(
                {
                    "uuid": uuid,
                    "name": known.get("name"),
                    "pci_bus_id": known.get("pci_bus_id"),
                    "host": node.host,
                    "ranks": ranks,
                    "samples": totals.samples,
                    "measured_s": totals.measured_ns / 1e9,
                    "losses": losses.get(uuid, 0),
                    "slow_samples": slow.get(uuid, 0),
                    **{name: totals.mean(name) for name in _MEANS},
                    **{name: totals.most.get(name) for name in _MOST},
                    "temperature_max_c": totals.most.get("temperature_c"),
                    "power_max_w": totals.most.get("power_w"),
                    "throttled": totals.throttled(),
                    **{name: totals.grown.get(name) for name in _GROWN},
                    **{name: totals.last.get(name) for name in ("last_xid", "remapping_pending", "recovery_action")},
                    "signals": totals.signals(),
                }
            )
    return sorted(rows, key=lambda row: (row["ranks"] or [1 << 31], row["host"], row["uuid"]))


def _computes_on(process: ProcessState, uuid: str) -> bool:
    return any(gpu["uuid"] == uuid for gpu in process.gpus)


def link_rows(nodes: list[NodeState]) -> list[dict[str, Any]]:
    """Ports of InfiniBand or RoCE adapters, with what they counted during the run."""
    rows = []
    for node in nodes:
        for name, saved in sorted(node.telemetry.get("links", {}).items()):
            totals = LinkTotals(**saved)
            signals = totals.signals()
            rows.append(
                {
                    "port": name,
                    "host": node.host,
                    "layer": totals.layer,
                    "rate_bits": totals.rate_bits,
                    "samples": totals.samples,
                    "measured_s": totals.measured_ns / 1e9,
                    "errors": {kind: totals.grown[kind] for kind in LINK_ERRORS if totals.grown.get(kind)},
                    "signals": signals,
                }
            )
    return rows


def telemetry_notes(nodes: list[NodeState]) -> list[str]:
    """What of it was lost."""
    notes = []
    lost = sum(node.telemetry.get("lost_samples", 0) for node in nodes)
    dropped = sum(node.telemetry.get("dropped_files", 0) for node in nodes)
    if lost:
        notes.append(f"{lost} samples of GPUs and ports could not be written to the run directory; totals hold them")
    if dropped:
        notes.append(f"{dropped} oldest files of telemetry were removed to stay below disk_bytes; totals hold them")
    return notes
