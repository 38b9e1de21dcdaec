"""Collect signals of this node's ranks from the kernel, GPUs and network ports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.hardware import GpuTotals, LinkTotals, compute_signals
from torchlens_perf.analysis.statistics.memory import compute_memory_signals
from torchlens_perf.experts.load import ExpertLoad
from torchlens_perf.run import ring
from torchlens_perf.run.cpu_programs import OUTSIDE
from torchlens_perf.run.hardware_samples import Sample
from torchlens_perf.run.records import OWN_COLUMNS
from torchlens_perf.sidecar.host.process import HostMetrics
from torchlens_perf.verdicts.causes.metrics import METRICS

if TYPE_CHECKING:
    from torchlens_perf.analysis.statistics.memory import MemoryStatistics
    from torchlens_perf.run.rank_facts import Gpu
    from torchlens_perf.run.records import StepTable
    from torchlens_perf.sidecar.rings.source import RingSource
    from torchlens_perf.sidecar.telemetry.log import TelemetryLog

# For values of gpu_signals(): the name of the signal and a factor.
_CLOCKS = {"sm_clock_hz": ("sm_clock_mhz", 1e-6), "sm_clock_share": ("sm_clock_share", 1.0)}
_GPU_IDLE = 1  # NVML's bit nvmlClocksEventReasonGpuIdle
_LEVELS = {
    **{n: n for n in ("thermal_share", "power_share", "hw_slowdown_share", "temperature_c")},
    "others_busy": "gpu_neighbour_share",
}
_COUNTS = {
    "ecc_uncorrected": "ecc_errors_per_s", "remapped_rows": "remapped_rows_per_s", "xid_count": "xids_per_s",
    "pcie_replays": "pcie_replays_per_s", "nvlink_errors": "nvlink_errors_per_s",
}  # fmt: skip
# Allocator retries are counted over this many steps, because few steps read the allocator.
_MEMORY_STEPS = 64
# Most programs that are kept for the users of a rank's CPUs.
_MAX_PROGRAMS = 3


class HardwareSignals:
    """Signals from hardware samples. Each sample is used only once. Not thread-safe."""

    def __init__(self, log: TelemetryLog) -> None:
        self._log = log
        self._seen_ns: dict[str, int] = {}  # time of the newest used sample, by GPU or port

    def take_node_signals(self, now_ns: int) -> dict[str, float]:
        """Return signals that all ranks of the node share, from samples since the last call."""
        errors = 0.0
        elapsed_s = None
        for name in self._log.port_names:
            samples, since_s = self._take_samples(name, now_ns)
            measured = compute_signals(LinkTotals(), samples)
            if since_s is not None and "errors" in measured:
                errors, elapsed_s = errors + measured["errors"], since_s
        return {} if elapsed_s is None else {"link_errors_per_s": errors / elapsed_s}

    def take_gpu_signals(self, uuid: str, now_ns: int) -> dict[str, float]:
        """Return a GPU's signals from the samples since the last call, or {} without samples."""
        samples, elapsed_s = self._take_samples(uuid, now_ns)
        measured = compute_signals(GpuTotals(), samples)
        # An idle GPU lowers its clock. Such a low clock is an effect of a slow rank, not a cause.
        clocks = compute_signals(
            GpuTotals(), (each for each in samples if not (each["clock_reasons"] or 0) & _GPU_IDLE)
        )
        found = {
            **{name: clocks[of] * by for of, (name, by) in _CLOCKS.items() if of in clocks},
            **{name: measured[of] for of, name in _LEVELS.items() if of in measured},
        }
        if elapsed_s is not None:  # Rates of counters need two samples.
            found |= {
                name: measured[of] / elapsed_s for of, name in _COUNTS.items() if of in measured
            }
        return found

    def gpu_name(self, gpus: Sequence[Gpu]) -> str:
        """Return a name such as "GPU 0000:18:00.0 (NVIDIA H200)", or "" without a GPU.

        The name has no index, because indices differ between processes.
        """
        if not gpus:
            return ""
        return f"GPU {self._log.pci_bus_id(gpus[0]['uuid']) or gpus[0]['uuid']} ({gpus[0]['name']})"

    def _take_samples(self, name: str, now_ns: int) -> tuple[list[Sample], float | None]:
        """Return the samples since the last call, and the time since the last used sample."""
        before = self._seen_ns.get(name)
        samples = self._log.recent_samples(name, (0 if before is None else before + 1), now_ns)
        if not samples:
            return samples, None
        self._seen_ns[name] = samples[-1].monotonic_ns
        return samples, None if before is None else (samples[-1].monotonic_ns - before) / 1e9


class RankMetrics:
    """Signals of this node's ranks. Not thread-safe."""

    def __init__(self, telemetry: TelemetryLog) -> None:
        self._host = HostMetrics()
        self._hardware = HardwareSignals(telemetry)
        # Time asleep and total duration of the steps since the last sample, by pid.
        self._asleep = defaultdict[int, npt.NDArray[np.int64]](lambda: np.zeros(2, np.int64))
        self._experts = defaultdict[int, ExpertLoad](ExpertLoad)  # by pid
        # Details for diagnoses, by pid. The details are kept after the process has ended.
        self._details = defaultdict[int, dict[str, str]](dict)

    def sample_disk_waits(self, sources: Iterable[RingSource], now_s: float) -> None:
        """Sample which ranks wait for a disk now. Called in every round."""
        self._host.sample_disk_waits(
            (source.state.identity.pid for source in _select_measurable(sources)), now_s
        )

    def add_steps(
        self, source: RingSource, records: npt.NDArray[np.void], steps: StepTable
    ) -> None:
        """Add finished steps of a rank. records: the records of these steps."""
        self._experts[source.state.identity.pid].add_steps(records, source.reader.names(), steps)
        measured = (steps.cpu_ns[:, 0] >= 0) & (steps.ready_ns[:, 0] >= 0)
        awake_ns = (steps.cpu_ns + steps.ready_ns)[:, OWN_COLUMNS]
        asleep_ns = np.maximum(steps.parts_ns[:, OWN_COLUMNS] - awake_ns, 0)[measured].sum()
        self._asleep[source.state.identity.pid] += asleep_ns, steps.duration_ns[measured].sum()

    def take_signals(
        self, sources: Sequence[RingSource], now_s: float
    ) -> dict[int, dict[str, float]]:
        """Return the signals since the last call, by rank. now_s: CLOCK_MONOTONIC."""
        gc_ns = {
            source.state.identity.pid: source.reader.read_counter(ring.GC_NS)
            for source in _select_measurable(sources)
        }
        host = self._host.take_signals(gc_ns, now_s)
        for pid, signals in host.items():
            asleep_ns, duration_ns = self._asleep.pop(pid, (0, 0))
            if duration_ns:
                signals["asleep_share"] = asleep_ns / duration_ns
        now_ns = int(now_s * 1e9)
        node, gpus = self._hardware.take_node_signals(now_ns), dict[str, dict[str, float]]()
        found = {}
        for source in sources:
            state = source.state
            # The experts' signals are from records, which may be read after the process has ended.
            signals = self._experts[state.identity.pid].take_signals()
            if not source.read_to_end:
                signals |= host.get(state.identity.pid, {}) | node
                signals |= _memory_signals(state.statistics.memory)
                # A rank computes on one GPU. Ranks may share a GPU, but its samples can be used
                # only once.
                for gpu in state.facts.gpus[:1]:
                    if gpu["uuid"] not in gpus:
                        gpus[gpu["uuid"]] = self._hardware.take_gpu_signals(gpu["uuid"], now_ns)
                    signals.update(gpus[gpu["uuid"]])
            if signals:
                found[state.identity.rank] = signals
        return found

    def add_cpu_use(self, source: RingSource, signals: Mapping[str, float]) -> None:
        """Add waits for a CPU and users of its CPUs to a process's state.

        signals: the newest sample.
        """
        pid, users = source.state.identity.pid, source.state.cpu_users
        users.cpus = self._host.cpu_count(pid) or users.cpus
        users.ranks = max(users.ranks, self._host.sharing_ranks(pid))
        users.workers = max(users.workers, self._host.worker_count(pid))
        share = signals.get("neighbour_share")
        if share is not None:
            users.others = [users.others[0] + share, users.others[1] + 1]
            users.programs = self._host.busiest_programs(pid)[:_MAX_PROGRAMS] or users.programs
        waits = signals.get("cpu_wait_share")
        if waits is not None:
            waited, samples = source.state.cpu_wait
            source.state.cpu_wait = [waited + waits, samples + 1]

    def diagnosis_details(self, source: RingSource) -> dict[str, str]:
        """Return the names of the rank's CPU neighbour, control group and GPU for a diagnosis."""
        pid = source.state.identity.pid
        outside = (each for each in self._host.busiest_programs(pid) if each.owner in OUTSIDE)
        found = {
            "neighbour": next((f"{each.name} (pid {each.pid})" for each in outside), ""),
            "control_group": self._host.control_group_path(pid),
            "gpu": self._hardware.gpu_name(source.state.facts.gpus),
        }
        self._details[pid].update({name: text for name, text in found.items() if text})
        return self._details[pid]


def _select_measurable(sources: Iterable[RingSource]) -> Iterator[RingSource]:
    """Select the rings of running processes that are not simulated."""
    return (
        source for source in sources if not (source.read_to_end or source.state.facts.simulated)
    )


def _memory_signals(memory: MemoryStatistics) -> dict[str, float]:
    if memory.last_reading is None:
        return {}
    signals = compute_memory_signals(
        memory.readings, memory.last_reading.step - _MEMORY_STEPS, memory.last_reading.step
    )
    return {name: value for name, value in signals.items() if name in METRICS}
