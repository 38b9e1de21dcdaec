"""The signals of this node's ranks, from all that the sidecar can ask: the kernel, and its devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf import ring
from torchlens_perf.hardware_signals import HardwareSignals
from torchlens_perf.host_signals import HostSignals
from torchlens_perf.memory_statistics import memory_signals
from torchlens_perf.records import OWN_PARTS, PARTS
from torchlens_perf.signals import SIGNALS

if TYPE_CHECKING:
    from torchlens_perf.memory_statistics import MemoryStatistics
    from torchlens_perf.records import StepTable
    from torchlens_perf.ring_source import RingSource
    from torchlens_perf.telemetry_log import TelemetryLog

_MEMORY_STEPS = 64  # over which the device allocator's retries are taken: it is read in few of them


class RankSignals:
    """Belongs to the sidecar's thread."""

    def __init__(self, telemetry: TelemetryLog) -> None:
        self._host = HostSignals()
        self._hardware = HardwareSignals(telemetry)
        self._asleep: dict[int, list[int]] = {}  # of each process, in the steps since the last sample: of how many ns
        self._details: dict[int, dict[str, str]] = {}  # of each process; what is known last stays when it has ended

    def look(self, sources: Iterable[RingSource], now_s: float) -> None:
        """What the ranks wait for at this instant; in every round."""
        self._host.look((source.state.identity.pid for source in _processes(sources)), now_s)

    def add_steps(self, source: RingSource, steps: StepTable) -> None:
        """Finished steps of a rank."""
        measured = (steps.cpu_ns[:, 0] >= 0) & (steps.ready_ns[:, 0] >= 0)
        own = np.array([PARTS.index(part) for part in OWN_PARTS])
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
    """Those of which the kernel knows something."""
    return (source for source in sources if not (source.read_to_end or source.simulated))


def _memory(memory: MemoryStatistics) -> dict[str, float]:
    if memory.last is None:
        return {}
    told = memory_signals(memory.readings, memory.last.step - _MEMORY_STEPS, memory.last.step)
    return {name: value for name, value in told.items() if name in SIGNALS}
