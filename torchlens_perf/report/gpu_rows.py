"""GPUs and network ports in the report, over the whole run: rows of the JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torchlens_perf.analysis.statistics.hardware import LINK_ERRORS
from torchlens_perf.run.place.node import host_of_node
from torchlens_perf.verdicts.node_state import NodeState, ProcessState

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report_hardware import Gpu, Link

_MEANS = (
    "sm_clock_hz", "memory_clock_hz", "power_w", "temperature_c", "busy", "sm_active", "sm_occupancy", "tensor_active",
    "dram_active", "others_busy",
)  # fmt: skip
_MAXIMA = (
    "sm_clock_max_hz", "power_limit_w", "memory_temperature_c", "memory_used_bytes", "memory_total_bytes",
)  # fmt: skip
_GROWN = (
    "energy_j", "xids", "ecc_corrected", "ecc_uncorrected", "remapped_rows", "pcie_replays", "pcie_transmitted_bytes",
    "pcie_received_bytes", "nvlink_replays", "nvlink_recoveries", "nvlink_errors", "nvlink_transmitted_bytes",
    "nvlink_received_bytes",
)  # fmt: skip


def gpu_rows(nodes: list[NodeState], processes: dict[int, ProcessState]) -> list[Gpu]:
    """Return the sampled GPUs by rank, with means, maxima and growth; None if not measured."""
    rows: list[Gpu] = []
    for node in nodes:
        telemetry = node.telemetry
        for uuid, totals in telemetry.gpus.items():
            ranks = [
                rank
                for rank in sorted(processes)
                if uuid in [gpu["uuid"] for gpu in processes[rank].facts.gpus]
            ]
            known = telemetry.facts.get(uuid)
            row = {
                "uuid": uuid,
                "name": known and known.name,
                "pci_bus_id": known and known.pci_bus_id,
                "host": host_of_node(node.host),
                "ranks": ranks,
                "samples": totals.samples,
                "measured_s": totals.measured_ns / 1e9,
                "losses": telemetry.losses.get(uuid, 0),
                "slow_samples": telemetry.slow_samples.get(uuid, 0),
                **{name: totals.mean(name) for name in _MEANS},
                "typical_busy": totals.typical_busy,
                **{name: totals.most.get(name) for name in _MAXIMA},
                "temperature_max_c": totals.most.get("temperature_c"),
                "power_max_w": totals.most.get("power_w"),
                "throttled": totals.throttled_shares(),
                **{name: totals.grown.get(name) for name in _GROWN},
                **{
                    name: totals.last.get(name)
                    for name in ("last_xid", "remapping_pending", "recovery_action", "other_pid")
                },
                "signals": totals.to_signals(),
            }
            rows.append(cast("Gpu", row))
    return sorted(rows, key=lambda row: (row["ranks"] or [1 << 31], row["host"], row["uuid"]))


def network_port_rows(nodes: list[NodeState]) -> list[Link]:
    """Return the ports of InfiniBand and RoCE adapters, with their errors during the run."""
    rows: list[Link] = []
    for node in nodes:
        for name, totals in sorted(node.telemetry.links.items()):
            rows.append(
                {
                    "port": name,
                    "host": host_of_node(node.host),
                    "layer": totals.layer,
                    "rate_bits": totals.rate_bits,
                    "samples": totals.samples,
                    "measured_s": totals.measured_ns / 1e9,
                    "errors": {
                        kind: totals.grown[kind] for kind in LINK_ERRORS if totals.grown.get(kind)
                    },
                    "signals": totals.to_signals(),
                }
            )
    return rows
