"""What the telemetry of a rank's GPU, and of its node's network ports, adds to the rank's signals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchlens_perf.telemetry import gpu_signals, link_signals

if TYPE_CHECKING:
    from torchlens_perf.telemetry import GpuSample, LinkSample
    from torchlens_perf.telemetry_log import TelemetryLog

# How gpu_signals() calls what is a signal under another name, and by how much it is to be multiplied.
_CLOCKS = {"sm_clock_hz": ("sm_clock_mhz", 1e-6), "sm_clock_share": ("sm_clock_share", 1.0)}
_GPU_IDLE = 1  # NVML's bit of a reason why clocks are low (nvmlClocksEventReasonGpuIdle)
_SAME = ("thermal_share", "power_share", "hw_slowdown_share", "temperature_c")
_COUNTS = {
    "ecc_uncorrected": "ecc_errors_per_s", "remapped_rows": "remapped_rows_per_s", "xid_count": "xids_per_s",
    "pcie_replays": "pcie_replays_per_s", "nvlink_errors": "nvlink_errors_per_s",
}  # fmt: skip


class HardwareSignals:
    """Takes each sample of the log into account once. Belongs to the sidecar's thread."""

    def __init__(self, log: TelemetryLog) -> None:
        self._log = log
        self._seen_ns: dict[str, int] = {}  # of each GPU and port: its newest sample that was taken into account

    def of_node(self, now_ns: int) -> dict[str, float]:
        """What all ranks of the node have alike, from the samples since the last call."""
        errors = 0.0
        elapsed_s = None
        for name in self._log.links:
            samples, since_s = self._new(name, self._log.link_samples(name, self._since(name), now_ns))
            told = link_signals(samples)
            if since_s is not None and "errors" in told:
                errors, elapsed_s = errors + told["errors"], since_s
        return {} if elapsed_s is None else {"link_errors_per_s": errors / elapsed_s}

    def of_gpu(self, uuid: str, now_ns: int) -> dict[str, float]:
        """What the samples of a GPU since the last call say; nothing if there are none."""
        samples, elapsed_s = self._new(uuid, self._log.samples(uuid, self._since(uuid), now_ns))
        if not samples:
            return {}
        told = gpu_signals(samples)
        # A GPU that is given nothing to do lowers its clock: that is no cause of its having nothing to do.
        clocks = gpu_signals([sample for sample in samples if not (sample.clock_reasons or 0) & _GPU_IDLE])
        found = {signal: clocks[name] * factor for name, (signal, factor) in _CLOCKS.items() if name in clocks}
        found.update({name: told[name] for name in _SAME if name in told})
        if elapsed_s is not None:  # counts have no rate before the second sample
            found.update({signal: told[name] / elapsed_s for name, signal in _COUNTS.items() if name in told})
        return found

    def name_of(self, gpus: Sequence[dict[str, Any]]) -> str:
        """What a rank's GPU is called in a sentence: "GPU 0000:18:00.0 (NVIDIA H200)", as its index is the process's
        own; "" without one."""
        if not gpus:
            return ""
        return f"GPU {self._log.pci_bus_id(gpus[0]['uuid']) or gpus[0]['uuid']} ({gpus[0]['name']})"

    def _since(self, name: str) -> int:
        return self._seen_ns.get(name, -1) + 1

    def _new(self, name: str, samples: Sequence[GpuSample] | Sequence[LinkSample]) -> tuple[Any, float | None]:
        """The samples, and the time since the one before them; None if they are the first."""
        if not samples:
            return samples, None
        before, self._seen_ns[name] = self._seen_ns.get(name), samples[-1].monotonic_ns
        return samples, None if before is None else (samples[-1].monotonic_ns - before) / 1e9
