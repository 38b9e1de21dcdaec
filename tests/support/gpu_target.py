"""A /metrics page of a node with GPUs whose values a test sets, without a GPU.

Only the hardware is replaced by values. tests/exporters/test_otlp_hardware.py covers the path from
NVML to metrics.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.ranks import identity_of
from tests.support.telemetry import gpu_sample, port_sample
from torchlens_perf.analysis.statistics.memory import MemoryReading
from torchlens_perf.analysis.statistics.steps import zero_device_columns
from torchlens_perf.exporters import ExportBatch
from torchlens_perf.exporters.prometheus.endpoint import ListenAddress
from torchlens_perf.exporters.prometheus.exporter import PrometheusExporter
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.hardware_samples import COUNTERS, GPUS, LINKS, QUANTITIES, HardwareSamples
from torchlens_perf.run.records import PARTS, StepTable

GB = 1 << 30
GPU_COUNT = 2
_GPU: dict[str, Any] = {
    "sm_clock_hz": 1_700_000_000, "sm_clock_max_hz": 1_980_000_000, "memory_clock_hz": 2_600_000_000, "power_w": 640.0,
    "power_limit_w": 700.0, "temperature_c": 66, "memory_temperature_c": 80, "memory_used_bytes": 70 * GB,
    "memory_total_bytes": 80 * GB, "busy": 0.99, "sm_active": 0.8, "sm_occupancy": 0.4, "tensor_active": 0.5,
    "dram_active": 0.3,
}  # fmt: skip


class GpuTarget:
    """Two ranks with a GPU each, and a network port that is down."""

    def __init__(self, folder: Path) -> None:
        self._run = RunDirectory(folder / "gpus")
        self._exporter = PrometheusExporter(ListenAddress.parse("0"))
        self._steps = 0

    @property
    def run_id(self) -> str:
        return self._run.run_id

    @property
    def address(self) -> str:
        return str(self._exporter.endpoint.address)

    def add_step(self) -> None:
        """Add one step of each rank and one sample of each GPU and port."""
        self._steps += 1
        for rank in range(GPU_COUNT):
            identity = identity_of(self._run, rank, GPU_COUNT)
            memory = MemoryReading(
                self._steps, 40 * GB, 60 * GB, 2 * GB, 65 * GB, 79 * GB, self._steps, 0
            )
            batch = ExportBatch(
                identity, Anchor(0, 0, 0), _one_step(self._steps), (),
                {"step": np.array([200_000_000]), "forward": np.array([60_000_000])}, memory,
            )  # fmt: skip
            self._exporter.export(batch)
        grown = dict.fromkeys(COUNTERS[GPUS], 1.0) | {
            "throttle_thermal_ns": 2e8,
            "pcie_transmitted_bytes": 1e6,
        }
        gpus = tuple(gpu_sample(f"GPU-{gpu}", 0, **_GPU, grown=grown) for gpu in range(GPU_COUNT))
        ports = tuple(
            port_sample("mlx5_0", port, active=port == 1, rate_bits=400_000_000_000,
                       grown=dict.fromkeys(QUANTITIES[LINKS], 1000.0))
            for port in (1, 2)
        )  # fmt: skip
        names = {gpu.name: "NVIDIA H200" for gpu in gpus}
        self._exporter.record_hardware(
            identity_of(self._run, 0, GPU_COUNT), HardwareSamples((*gpus, *ports), names)
        )

    def close(self) -> None:
        self._exporter.endpoint.close()


def _one_step(step: int) -> StepTable:
    def column(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([values if len(values) > 1 else values[0]], np.int64)

    parts = column(*([25_000_000] * len(PARTS)))
    unknown = np.full_like(parts, -1)
    return StepTable(
        column(step), column(0), column(200_000_000), parts, column(GB), column(1), column(0), column(-1), unknown,
        unknown, **zero_device_columns(parts, unknown),
    )  # fmt: skip
