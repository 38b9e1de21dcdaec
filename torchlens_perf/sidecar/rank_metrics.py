"""The signals of this node's ranks, from all that the sidecar can ask: the kernel, and its devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.analysis.statistics.hardware import gpu_signals, link_signals
from torchlens_perf.analysis.statistics.memory import memory_signals
from torchlens_perf.run import ring
from torchlens_perf.run.records import OWN_COLUMNS
from torchlens_perf.sidecar.host.process import HostMetrics
from torchlens_perf.verdicts.causes.metrics import METRICS

if TYPE_CHECKING:
    from torchlens_perf.analysis.statistics.hardware import GpuSample, LinkSample
    from torchlens_perf.analysis.statistics.memory import MemoryStatistics
    from torchlens_perf.run.identity import Gpu
    from torchlens_perf.run.records import StepTable
    from torchlens_perf.sidecar.rings.source import RingSource
    from torchlens_perf.sidecar.telemetry.log import TelemetryLog

# How gpu_signals() calls what is a signal under another name, and by how much it is to be multiplied.
_CLOCKS = {"sm_clock_hz": ("sm_clock_mhz", 1e-6), "sm_clock_share": ("sm_clock_share", 1.0)}
_GPU_IDLE = 1  # NVML's bit of a reason why clocks are low (nvmlClocksEventReasonGpuIdle)
_SAME = ("thermal_share", "power_share", "hw_slowdown_share", "temperature_c")
_COUNTS = {
    "ecc_uncorrected": "ecc_errors_per_s", "remapped_rows": "remapped_rows_per_s", "xid_count": "xids_per_s",
    "pcie_replays": "pcie_replays_per_s", "nvlink_errors": "nvlink_errors_per_s",
}  # fmt: skip
_MEMORY_STEPS = 64  # over which the device allocator's retries are taken: it is read in few of them


class HardwareMetrics:
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
            measured = link_signals(samples)
            if since_s is not None and "errors" in measured:
                errors, elapsed_s = errors + measured["errors"], since_s
        return {} if elapsed_s is None else {"link_errors_per_s": errors / elapsed_s}

    def of_gpu(self, uuid: str, now_ns: int) -> dict[str, float]:
        """What the samples of a GPU since the last call say; nothing if there are none."""
        samples, elapsed_s = self._new(uuid, self._log.samples(uuid, self._since(uuid), now_ns))
        if not samples:
            return {}
        measured = gpu_signals(samples)
        # A GPU that is given nothing to do lowers its clock: that is no cause of its having nothing to do.
        clocks = gpu_signals([sample for sample in samples if not (sample.clock_reasons or 0) & _GPU_IDLE])
        found = {signal: clocks[name] * factor for name, (signal, factor) in _CLOCKS.items() if name in clocks}
        found.update({name: measured[name] for name in _SAME if name in measured})
        if elapsed_s is not None:  # counts have no rate before the second sample
            found.update({signal: measured[name] / elapsed_s for name, signal in _COUNTS.items() if name in measured})
        return found

    def name_of(self, gpus: Sequence[Gpu]) -> str:
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


class RankMetrics:
    """Belongs to the sidecar's thread."""

    def __init__(self, telemetry: TelemetryLog) -> None:
        self._host = HostMetrics()
        self._hardware = HardwareMetrics(telemetry)
        self._asleep: dict[int, list[int]] = {}  # of each process, in the steps since the last sample: of how many ns
        self._details: dict[int, dict[str, str]] = {}  # of each process; what is known last stays when it has ended

    def update(self, sources: Iterable[RingSource], now_s: float) -> None:
        """What the ranks wait for at this instant; in every round."""
        self._host.update((source.state.identity.pid for source in _processes(sources)), now_s)

    def add_steps(self, source: RingSource, steps: StepTable) -> None:
        """Finished steps of a rank."""
        measured = (steps.cpu_ns[:, 0] >= 0) & (steps.ready_ns[:, 0] >= 0)
        own = np.array(OWN_COLUMNS)
        awake_ns = (steps.cpu_ns + steps.ready_ns)[:, own]
        asleep_ns = np.maximum(steps.parts_ns[:, own] - awake_ns, 0)[measured].sum()
        sums = self._asleep.setdefault(source.state.identity.pid, [0, 0])
        sums[0] += int(asleep_ns)
        sums[1] += int(steps.duration_ns[measured].sum())

    def sample(self, sources: Iterable[RingSource], now_s: float) -> dict[int, dict[str, float]]:
        """By rank, the signals since the last call. now_s: CLOCK_MONOTONIC."""
        running = [source for source in sources if not source.read_to_end]
        gc_ns = {source.state.identity.pid: source.reader.counter(ring.GC_NS) for source in _processes(running)}
        host = self._host.sample(gc_ns, now_s)
        for pid, signals in host.items():
            asleep_ns, duration_ns = self._asleep.pop(pid, (0, 0))
            if duration_ns:
                signals["asleep_share"] = asleep_ns / duration_ns
        now_ns = int(now_s * 1e9)
        of_node, of_gpu = self._hardware.of_node(now_ns), dict[str, dict[str, float]]()
        found = {}
        for source in running:
            state = source.state
            signals = {**host.get(state.identity.pid, {}), **of_node, **_memory(state.statistics.memory)}
            for gpu in state.gpus[:1]:  # a rank computes on one; two ranks may share it
                if gpu["uuid"] not in of_gpu:
                    of_gpu[gpu["uuid"]] = self._hardware.of_gpu(gpu["uuid"], now_ns)
                signals.update(of_gpu[gpu["uuid"]])
            if signals:
                found[state.identity.rank] = signals
        return found

    def add_cpu_users(self, source: RingSource, signals: Mapping[str, float]) -> None:
        """Keep in a process's state who uses its CPUs. signals: its newest sample."""
        pid, users = source.state.identity.pid, source.state.cpu_users
        users.cpus = self._host.cpus(pid) or users.cpus
        users.workers = max(users.workers, self._host.workers(pid))
        share = signals.get("neighbour_share")
        if share is not None:
            users.others = [users.others[0] + share, users.others[1] + 1]
            users.busiest_other = self._host.busiest_neighbour(pid) or users.busiest_other

    def details(self, source: RingSource) -> dict[str, str]:
        """Names for what was seen of this rank, for the sentences of a diagnosis."""
        pid = source.state.identity.pid
        found = {
            "neighbour": self._host.busiest_neighbour(pid),
            "control_group": self._host.control_group(pid),
            "gpu": self._hardware.name_of(source.state.gpus),
        }
        details = self._details.setdefault(pid, {})
        details.update({name: text for name, text in found.items() if text})
        return details


def _processes(sources: Iterable[RingSource]) -> Iterator[RingSource]:
    """Those whose processes the kernel has figures for."""
    return (source for source in sources if not (source.read_to_end or source.simulated))


def _memory(memory: MemoryStatistics) -> dict[str, float]:
    if memory.last is None:
        return {}
    signals = memory_signals(memory.readings, memory.last.step - _MEMORY_STEPS, memory.last.step)
    return {name: value for name, value in signals.items() if name in METRICS}
