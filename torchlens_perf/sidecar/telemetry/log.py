"""Sample a node's hardware and processes, and store samples for verdicts, report and export.

The sidecar takes samples between two rounds. For a verdict on a time interval, pass the interval's
recent_samples() to hardware.gpu_signals().
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence

from torchlens_perf.analysis.statistics.hardware import GpuTotals, HardwareTotals, LinkTotals
from torchlens_perf.run.clock import Anchor, HostClock
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.hardware_samples import HardwareSamples, Sample
from torchlens_perf.sidecar.telemetry.gpu import GpuTelemetry
from torchlens_perf.sidecar.telemetry.infiniband import LinkTelemetry
from torchlens_perf.sidecar.telemetry.processes import sample_processes
from torchlens_perf.store.samples import SampleWriter

_SECOND_NS = 1_000_000_000
_GPU_PERIOD_NS = _SECOND_NS
# Ports are read less often than GPUs: each counter is a request to the adapter's firmware.
_LINK_PERIOD_NS = 5 * _SECOND_NS
_MIN_LINK_IDLE_RATIO = 20
_PROCESS_PERIOD_NS = _SECOND_NS
# This ratio limits the time for reading /proc to 0.25% of a core.
_MIN_PROCESS_IDLE_RATIO = 400
_MAX_SAMPLES_IN_MEMORY = 900  # per GPU or port
# While the run directory cannot be written, samples wait in memory. The oldest ones are dropped.
_MAX_UNWRITTEN = 20_000
# Young runs write files more often, to have their first samples on disk soon.
_MIN_FILE_PERIOD_NS, _MAX_FILE_PERIOD_NS = 10 * _SECOND_NS, 120 * _SECOND_NS
_DISK_DIVISOR = 16


class TelemetryLog:
    """Sampler of GPUs, ports and processes that keeps recent samples and totals."""

    def __init__(
        self,
        run: RunDirectory,
        host: str,
        saved: HardwareTotals,
        gpus: GpuTelemetry | None = None,
        links: LinkTelemetry | None = None,
        now: Callable[[], Anchor] | None = None,
    ) -> None:
        """saved: the run_totals() of an earlier sidecar. gpus, links, now: replaced in tests."""
        self._gpus = gpus if gpus is not None else GpuTelemetry()
        self.notes = self._gpus.notes
        """Reasons why values are not measured."""
        self._links = links if links is not None else LinkTelemetry()
        self._now = now if now is not None else HostClock().anchor
        self._writer = SampleWriter(run, host)
        self._gpu_due_ns = self._link_due_ns = self._process_due_ns = 0
        self._first_sample_ns: int | None = None
        self._written_ns = 0
        self._recent: dict[str, deque[Sample]] = {}  # samples by GPU or port
        self._unwritten: list[Sample] = []
        self._gpu_totals, self._link_totals, self._facts = saved.gpus, saved.links, saved.facts
        # Totals that earlier sidecars have counted.
        self._losses, self._slow = Counter(saved.losses), Counter(saved.slow_samples)
        self._lost, self._dropped = saved.lost_samples, saved.dropped_files

    def sample_due_sources(
        self, uuids: Collection[str], pids: Mapping[int, int]
    ) -> HardwareSamples | None:
        """Sample GPUs, ports and processes that are due. Return GPU and port samples, or None.

        uuids: GPUs to sample. pids: process ids by rank.
        """
        now = self._now()
        gpus: dict[str, Sample] = {}
        links: dict[str, Sample] = {}
        if uuids and now.monotonic_ns >= self._gpu_due_ns:
            self._gpu_due_ns = now.monotonic_ns + _GPU_PERIOD_NS
            gpus = self._gpus.sample_gpus(uuids, now.monotonic_ns, now.unix_ns, set(pids.values()))
        if now.monotonic_ns >= self._link_due_ns:
            links = self._links.sample(now.monotonic_ns, now.unix_ns)
            took_ns = self._now().monotonic_ns - now.monotonic_ns
            self._link_due_ns = now.monotonic_ns + max(
                _LINK_PERIOD_NS, _MIN_LINK_IDLE_RATIO * took_ns
            )
        if pids and now.monotonic_ns >= self._process_due_ns:
            began_ns = self._now().monotonic_ns
            self._add_unwritten(now, [*sample_processes(pids, now.monotonic_ns, now.unix_ns)])
            took_ns = self._now().monotonic_ns - began_ns
            self._process_due_ns = now.monotonic_ns + max(
                _PROCESS_PERIOD_NS, _MIN_PROCESS_IDLE_RATIO * took_ns
            )
        if not gpus and not links:
            return None
        self._add_samples(now, gpus, links)
        names = {uuid: name for uuid in gpus if (name := self._facts[uuid].name)}
        return HardwareSamples((*gpus.values(), *links.values()), names)

    def _add_samples(
        self, now: Anchor, gpus: Mapping[str, Sample], links: Mapping[str, Sample]
    ) -> None:
        for uuid, gpu in gpus.items():
            self._gpu_totals.setdefault(uuid, GpuTotals()).add_sample(gpu)
            self._facts[uuid] = self._gpus.facts[uuid]
        for name, link in links.items():
            self._link_totals.setdefault(name, LinkTotals()).add_sample(link)
        for name, sample in (*gpus.items(), *links.items()):
            self._recent.setdefault(name, deque(maxlen=_MAX_SAMPLES_IN_MEMORY)).append(sample)
        self._add_unwritten(now, [*gpus.values(), *links.values()])

    def _add_unwritten(self, now: Anchor, samples: Sequence[Sample]) -> None:
        self._lost += max(0, len(self._unwritten) + len(samples) - _MAX_UNWRITTEN)
        self._unwritten = [*self._unwritten, *samples][-_MAX_UNWRITTEN:]
        if self._first_sample_ns is None:
            self._first_sample_ns = self._written_ns = now.monotonic_ns

    def recent_samples(self, name: str, since_ns: int, until_ns: int) -> list[Sample]:
        """Return samples of a GPU or port between two times of CLOCK_MONOTONIC.

        name: the GPU's UUID, or a port such as "mlx5_0/1". Only samples of the last 15 minutes of a
        GPU, and of about the last hour of a port, are available.
        """
        samples = self._recent.get(name, ())
        return [sample for sample in samples if since_ns <= sample.monotonic_ns <= until_ns]

    def pci_bus_id(self, uuid: str) -> str:
        """Return a GPU's PCI bus id, such as "00000000:18:00.0", or "" if it is not known."""
        known = self._facts.get(uuid)
        return (known.pci_bus_id if known is not None else None) or ""

    @property
    def port_names(self) -> list[str]:
        """Names of the ports that have samples."""
        return [name for name in self._link_totals if name in self._recent]

    def write_if_due(self, disk_bytes: int, *, final: bool = False) -> None:
        """Write new samples if a file is due or the run has ended. Raises OSError."""
        if not self._unwritten or self._first_sample_ns is None:
            return
        now_ns = self._now().monotonic_ns
        period_ns = min(
            _MAX_FILE_PERIOD_NS, max(_MIN_FILE_PERIOD_NS, (now_ns - self._first_sample_ns) // 20)
        )
        if not final and now_ns - self._written_ns < period_ns:
            return
        self._written_ns = now_ns
        self._writer.write(self._unwritten, telemetry_disk_share(disk_bytes))
        self._unwritten.clear()

    def run_totals(self) -> HardwareTotals:
        """Return the totals of all samples of the run. Later samples change this object."""
        return HardwareTotals(
            gpus=self._gpu_totals,
            facts=self._facts,
            losses=dict(self._losses + self._gpus.losses),
            slow_samples=dict(self._slow + self._gpus.slow_samples),
            links=self._link_totals,
            lost_samples=self._lost,
            dropped_files=self._dropped + self._writer.dropped_files,
        )

    def close(self) -> None:
        self._gpus.close()


def telemetry_disk_share(disk_bytes: int) -> int:
    """Return the part of a node's disk_bytes that telemetry may use."""
    return disk_bytes // _DISK_DIVISOR
