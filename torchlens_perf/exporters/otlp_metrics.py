"""Steps as metrics: histograms of durations, a counter and a gauge. Their size does not grow with the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)

from torchlens_perf.exporters import ExportBatch, semantics
from torchlens_perf.exporters.otlp_resource import node_resource
from torchlens_perf.records import PARTS
from torchlens_perf.version import VERSION

if TYPE_CHECKING:
    from torchlens_perf.identity import Identity

_UNSAMPLED = Context()

logger = logging.getLogger("torchlens_perf.sidecar")


class MetricSender:
    """Records steps into the SDK's instruments, and counts exports that failed."""

    def __init__(self, exporter: MetricExporter, rejected: Callable[[], int] = lambda: 0) -> None:
        """rejected: how many points the endpoint has rejected of those that the exporter could send."""
        self._rejected = rejected
        self._counter = _Counter(exporter)
        self._provider: MeterProvider | None = None
        self._instruments: _Instruments | None = None
        self._off = False

    def export(self, batch: ExportBatch, sampled: Mapping[int, Context]) -> None:
        """Records the batch's steps. sampled: steps whose spans are sent too, with the context of their span."""
        if self._provider is None and not self._off:
            self._start(batch.identity)
        if self._instruments is not None:
            self._instruments.record(batch, sampled)

    def _start(self, identity: Identity) -> None:
        """The resource is known with the first batch, and not before."""
        try:
            reader = PeriodicExportingMetricReader(self._counter)
            self._provider = MeterProvider([reader], node_resource(identity), shutdown_on_exit=False)
        except ValueError as error:
            self._off = True
            logger.warning("OTLP metrics are off: %s", error)
            return
        self._instruments = _Instruments(self._provider)

    def force_flush(self) -> None:
        """Blocks until everything so far was delivered or has failed."""
        if self._provider is not None:
            self._provider.force_flush()

    def shutdown(self) -> None:
        """Sends everything once more; gives up when that fails."""
        self._counter.ending = True
        if self._provider is not None:
            self._provider.shutdown()

    def failed(self) -> int:
        """How many exports, and how many points of the others, the endpoint has not taken."""
        return self._counter.tried - self._counter.succeeded + self._rejected()

    def notes(self) -> list[str]:
        """What was not delivered; for the report."""
        notes = []
        failed = self._counter.tried - self._counter.succeeded
        if failed:
            notes.append(f"OTLP: {failed} of {self._counter.tried} metric exports failed")
        if self._rejected():
            notes.append(f"OTLP: {self._rejected()} metric points were rejected by the endpoint")
        return notes


class _Counter(MetricExporter):
    """Passes metrics on and counts what became of them. On the reader's thread."""

    def __init__(self, exporter: MetricExporter) -> None:
        super().__init__(exporter._preferred_temporality, exporter._preferred_aggregation)
        self._exporter = exporter
        self._gave_up = False
        self.ending = False
        self.tried = 0
        self.succeeded = 0

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        self.tried += 1
        if self._gave_up:
            return MetricExportResult.FAILURE
        result = self._exporter.export(metrics_data, timeout_millis, **kwargs)
        if result is MetricExportResult.SUCCESS:
            self.succeeded += 1
        elif self.ending:
            self._gave_up = True
        return result

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self._exporter.shutdown(timeout_millis, **kwargs)


class _Instruments:
    """The instruments, and how a batch goes into them."""

    def __init__(self, provider: MeterProvider) -> None:
        meter = provider.get_meter(semantics.SCOPE, VERSION)

        def duration(name: str, description: str) -> Histogram:
            return meter.create_histogram(
                name, "s", description, explicit_bucket_boundaries_advisory=semantics.DURATION_BOUNDS_S
            )

        self._step = duration(semantics.STEP_DURATION, "Time from one step's end to the next")
        self._own = duration(semantics.STEP_OWN_TIME, "Step time without the time blocked in communication")
        self._phase = duration(semantics.PHASE_DURATION, "Time of one phase in one step, without nested phases")
        self._steps = meter.create_counter(semantics.STEPS, "{step}", "Steps finished")
        self._memory = meter.create_gauge(semantics.MEMORY, "By", "Memory at the end of the last step")
        self._memory_bytes: dict[int, int] = {}

    def record(self, batch: ExportBatch, sampled: Mapping[int, Context]) -> None:
        """Adds a batch's steps. On the sidecar's thread."""
        steps = batch.steps
        if not len(steps):
            return
        attributes: dict[str, Any] = {}
        per_rank = batch.identity.world_size <= semantics.MOST_RANK_SERIES
        if per_rank:
            attributes[semantics.RANK] = batch.identity.rank
        phases = [{**attributes, semantics.PHASE: part} for part in PARTS]
        for step, duration_ns, own_ns, parts_ns in zip(
            steps.step.tolist(), steps.duration_ns.tolist(), steps.own_ns.tolist(), steps.parts_ns.tolist(), strict=True
        ):
            # The SDK makes an exemplar of a value whose context is sampled: it leads from a bucket to a trace.
            context = sampled.get(step, _UNSAMPLED)
            self._step.record(duration_ns / 1e9, attributes, context)
            self._own.record(own_ns / 1e9, attributes, context)
            for part_ns, of_phase in zip(parts_ns, phases, strict=True):
                if part_ns:  # a phase that the step did not have is no phase of 0 s
                    self._phase.record(part_ns / 1e9, of_phase)
        self._steps.add(len(steps), attributes)
        if steps.memory_bytes[-1]:
            self._memory_bytes[batch.identity.rank] = memory_bytes = int(steps.memory_bytes[-1])
            # Without a series for each rank, the node's fullest rank is the one to know about.
            self._memory.set(memory_bytes if per_rank else max(self._memory_bytes.values()), attributes)
