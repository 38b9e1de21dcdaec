"""GPUs and network ports in the report, over the whole run: rows of the JSON."""

from __future__ import annotations

from torchlens_perf.run.hardware_samples import GPUS, LINK_ERRORS, select_quantities
from torchlens_perf.run.place.node import host_of_node
from torchlens_perf.verdicts.node_state import NodeState, ProcessState
from torchlens_perf.verdicts.words.report_hardware import Gpu, Link


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
            row: Gpu = {
                "uuid": uuid,
                "name": known and known.name,
                "pci_bus_id": known and known.pci_bus_id,
                "host": host_of_node(node.host),
                "ranks": ranks,
                "samples": totals.samples,
                "measured_s": totals.measured_ns / 1e9,
                "losses": telemetry.losses.get(uuid, 0),
                "slow_samples": telemetry.slow_samples.get(uuid, 0),
                **{name: totals.mean(name) for name in select_quantities(GPUS, "mean")},
                "typical_busy": totals.typical_busy,
                **{name: totals.most.get(name) for name in select_quantities(GPUS, "max")},
                "temperature_max_c": totals.most.get("temperature_c"),
                "throttled": totals.throttled_shares(),
                **{name: totals.grown.get(name) for name in select_quantities(GPUS, "growth")},
                **{name: totals.last.get(name) for name in select_quantities(GPUS, "newest")},
                "signals": totals.to_signals(),
            }
            rows.append(row)
    return sorted(rows, key=lambda row: (row["ranks"] or [1 << 31], row["host"], row["uuid"]))


def network_port_rows(nodes: list[NodeState]) -> list[Link]:
    """Return the ports of InfiniBand and RoCE adapters, with their errors during the run."""
    return [
        {
            "port": name,
            "host": host_of_node(node.host),
            "layer": totals.layer,
            "rate_bits": totals.rate_bits,
            "samples": totals.samples,
            "measured_s": totals.measured_ns / 1e9,
            "errors": {kind: totals.grown[kind] for kind in LINK_ERRORS if totals.grown.get(kind)},
            "signals": totals.to_signals(),
        }
        for node in nodes
        for name, totals in sorted(node.telemetry.links.items())
    ]
