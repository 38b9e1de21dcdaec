"""Traces and metrics over OTLP, through the OpenTelemetry SDK. Runs in the sidecar; sets no global provider.

All OTEL_* variables act as the SDK documents them. One trace per sampled step: its id is derived from run, attempt and
step, so the ranks' spans meet in one trace without talking to each other, and a replay sends the same ids again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import trace as trace_api
from opentelemetry.context import Context
from opentelemetry.metrics import Histogram
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from torchlens_perf.exporters import ExportBatch, semantics
from torchlens_perf.records import PARTS
from torchlens_perf.ring import Flag

if TYPE_CHECKING:
    from torchlens_perf.clock import Anchor
    from torchlens_perf.identity import Identity
    from torchlens_perf.records import Span, StepTrace

logger = logging.getLogger("torchlens_perf.sidecar")

_DEFAULT_QUEUE_SIZE = 2048


def trace_id(run_id: str, attempt: int, step: int) -> int:
    """The id of a step's trace: the same on all ranks, and in a replay."""
    return _hash(16, run_id, attempt, step)


def span_id(in_trace: int, *path: object) -> int:
    """The id of a span in a trace, by its place in it."""
    return _hash(8, f"{in_trace:032x}", *path)


def _hash(size: int, *parts: object) -> int:
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big") or 1


class OtlpExporter:
    """Feeds the SDK's batch processor and metric reader, and counts what they could not deliver."""

    def __init__(self, spans: SpanExporter | None, metrics: MetricExporter | None) -> None:
        """spans, metrics: the SDK's exporters, made from the environment; None for a signal that is switched off."""
        self._delivered = _SpanCounter(spans) if spans is not None else None
        self._processor = BatchSpanProcessor(self._delivered) if self._delivered is not None else None
        self._queue_size = int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE) or _DEFAULT_QUEUE_SIZE)
        self._metric_exporter = _MetricCounter(metrics) if metrics is not None else None
        self._meters: MeterProvider | None = None
        self._record: Callable[[ExportBatch], None] = lambda batch: None
        self._ranks: dict[str, _RankTracer] = {}
        self._fed = 0
        self._skipped_traces = 0

    def export(self, batch: ExportBatch) -> None:
        if self._processor is not None and batch.traces:
            self._export_spans(batch)
        if self._metric_exporter is not None:
            if self._meters is None:
                self._start_metrics(batch.identity)
            self._record(batch)

    def _export_spans(self, batch: ExportBatch) -> None:
        assert self._processor is not None
        assert self._delivered is not None
        tracer = self._ranks.get(batch.identity.key)
        if tracer is None:
            tracer = self._ranks[batch.identity.key] = _RankTracer(batch.identity, self._processor)
        for trace in batch.traces:
            size = len(trace.spans) + 2
            # A full queue drops its oldest spans without a word: leave out this trace as a whole, and count it.
            if self._fed - self._delivered.seen + size > self._queue_size:
                self._skipped_traces += 1
                continue
            self._fed += tracer.export(trace, batch.anchor)

    def _start_metrics(self, identity: Identity) -> None:
        assert self._metric_exporter is not None
        reader = PeriodicExportingMetricReader(self._metric_exporter)
        self._meters = MeterProvider([reader], resource(identity, of_rank=False), shutdown_on_exit=False)
        self._record = _Metrics(self._meters).record

    def force_flush(self, timeout_s: float) -> bool:
        """Bounded by a thread of ours: the SDK's own timeouts are not (force_flush(1 s) took up to 40 s)."""
        flushes: list[Callable[[], Any]] = []
        if self._processor is not None:
            flushes.append(self._processor.force_flush)
        if self._meters is not None:
            flushes.append(self._meters.force_flush)
        return _within(timeout_s, flushes) and not self._undelivered()

    def shutdown(self, timeout_s: float) -> list[str]:
        ends: list[Callable[[], Any]] = []
        if self._processor is not None:
            ends.append(self._processor.shutdown)
        if self._meters is not None:
            ends.append(self._meters.shutdown)
        if not _within(timeout_s, ends):
            logger.warning("the OTLP endpoint did not take everything within %g s", timeout_s)
        notes = []
        undelivered = self._undelivered()
        if undelivered:
            notes.append(f"OTLP: {undelivered} of {self._fed} spans were not delivered; replay: torchlens-perf sidecar")
        if self._skipped_traces:
            notes.append(f"OTLP: {self._skipped_traces} traces were left out because the endpoint was too slow")
        if self._metric_exporter is not None and self._metric_exporter.failures:
            notes.append(f"OTLP: {self._metric_exporter.failures} metric exports failed")
        return notes

    def _undelivered(self) -> int:
        return self._fed - self._delivered.succeeded if self._delivered is not None else 0


def _within(timeout_s: float, calls: Sequence[Callable[[], Any]]) -> bool:
    """Runs each call in a daemon thread; whether all returned in time."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    return not any(thread.is_alive() for thread in threads)


class _SpanCounter(SpanExporter):
    """Passes spans on and counts what became of them."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.seen = 0
        self.succeeded = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        self.seen += len(spans)
        if result is SpanExportResult.SUCCESS:
            self.succeeded += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _MetricCounter(MetricExporter):
    """Passes metrics on and counts failed exports."""

    def __init__(self, exporter: MetricExporter) -> None:
        super().__init__(exporter._preferred_temporality, exporter._preferred_aggregation)
        self._exporter = exporter
        self.failures = 0

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        result = self._exporter.export(metrics_data, timeout_millis, **kwargs)
        self.failures += result is not MetricExportResult.SUCCESS
        return result

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self._exporter.shutdown(timeout_millis, **kwargs)


class _PresetIds(IdGenerator):
    """Hands out the ids that were set just before; one thread."""

    def __init__(self) -> None:
        self.trace_id = self.span_id = 1

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _RankTracer:
    """Builds one rank's spans, under a resource of its own."""

    def __init__(self, identity: Identity, processor: BatchSpanProcessor) -> None:
        self._identity = identity
        self._ids = _PresetIds()
        self._provider = TracerProvider(
            resource=resource(identity, of_rank=True), id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(semantics.SCOPE)
        self._links = _links(identity.traceparent)

    def export(self, trace: StepTrace, anchor: Anchor) -> int:
        """Emits the step's spans; returns how many went to the processor."""
        identity = self._identity
        self._ids.trace_id = in_trace = trace_id(identity.run_id, identity.attempt, trace.step)
        root_id = span_id(in_trace, "root")
        offset_ns = anchor.unix_ns - anchor.monotonic_ns
        inference = bool(trace.flags & Flag.INFERENCE)
        name = semantics.SPAN_INFERENCE_STEP if inference else semantics.SPAN_STEP
        common = {
            semantics.RUN_ID: identity.run_id,
            semantics.STEP: trace.step,
            semantics.RANK: identity.rank,
        }
        start_ns, end_ns = trace.start_ns + offset_ns, trace.start_ns + trace.duration_ns + offset_ns
        emitted = 0
        if identity.rank == 0:
            root = self._start(root_id, name, Context(), start_ns, common, self._links)
            root.end(end_ns)
            sampled = root.get_span_context().trace_flags.sampled
            emitted += root.is_recording() or sampled
        else:
            # Not our span: its sampling is decided as rank 0's sidecar decides it, from the trace id.
            decision = self._provider.sampler.should_sample(None, in_trace, name).decision
            sampled = decision is Decision.RECORD_AND_SAMPLE
        if not sampled:
            return 0
        parents = {(): _context(in_trace, root_id)}
        emitted += self._emit(
            span_id(in_trace, identity.rank), semantics.SPAN_RANK_STEP, parents[()], start_ns, end_ns, common, 0
        )
        rank_context = _context(in_trace, span_id(in_trace, identity.rank))
        for index, (span, parent) in enumerate(nest(trace.spans)):
            this_id = span_id(in_trace, identity.rank, index)
            context = rank_context if parent is None else _context(in_trace, span_id(in_trace, identity.rank, parent))
            begin_ns = span.start_ns + offset_ns
            emitted += self._emit(
                this_id, span.name, context, begin_ns, begin_ns + span.duration_ns, {**common, **_details(span)},
                span.flags,
            )  # fmt: skip
        return emitted

    def _start(
        self, this_id: int, name: str, context: Context, start_ns: int, attributes: Mapping[str, Any],
        links: Sequence[Link] = (),
    ) -> trace_api.Span:  # fmt: skip
        self._ids.span_id = this_id
        return self._tracer.start_span(name, context, attributes=attributes, links=links, start_time=start_ns)

    def _emit(
        self, this_id: int, name: str, context: Context, start_ns: int, end_ns: int, attributes: Mapping[str, Any],
        flags: int,
    ) -> int:  # fmt: skip
        span = self._start(this_id, name, context, start_ns, attributes)
        if flags & Flag.EXCEPTION:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)
        return 1


def nest(spans: Sequence[Span]) -> list[tuple[Span, int | None]]:
    """Spans by start, each with the index of the smallest span that contains it; None: it lies in the step itself."""
    ordered = sorted(spans, key=lambda span: (span.start_ns, -span.duration_ns))
    nested: list[tuple[Span, int | None]] = []
    around: list[int] = []
    for index, span in enumerate(ordered):
        end_ns = span.start_ns + span.duration_ns
        while around and _end(ordered[around[-1]]) < end_ns:
            around.pop()
        nested.append((span, around[-1] if around else None))
        around.append(index)
    return nested


def _end(span: Span) -> int:
    return span.start_ns + span.duration_ns


def _details(span: Span) -> dict[str, Any]:
    details: dict[str, Any] = {semantics.SPAN_KIND: span.kind}
    if span.kind == "collective":
        details[semantics.BYTES], details[semantics.SEQUENCE] = span.value0, span.value1
    return details


def _context(in_trace: int, parent_id: int) -> Context:
    parent = SpanContext(in_trace, parent_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return trace_api.set_span_in_context(NonRecordingSpan(parent), Context())


def _links(traceparent: str) -> tuple[Link, ...]:
    """A link to the trace that started the job, if the environment named one (W3C traceparent)."""
    context = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())
    found = trace_api.get_current_span(context).get_span_context()
    return (Link(found),) if found.is_valid else ()


class _Metrics:
    """The instruments, and how a batch goes into them."""

    def __init__(self, provider: MeterProvider) -> None:
        meter = provider.get_meter(semantics.SCOPE)

        def duration(name: str, description: str) -> Histogram:
            return meter.create_histogram(
                name, "s", description, explicit_bucket_boundaries_advisory=semantics.DURATION_BOUNDS_S
            )

        self._step = duration(semantics.STEP_DURATION, "Time from one step's end to the next")
        self._own = duration(semantics.STEP_OWN_TIME, "Step time without the time blocked in communication")
        self._phase = duration(semantics.PHASE_DURATION, "Time of one phase in one step, without nested phases")
        self._steps = meter.create_counter(semantics.STEPS, "{step}", "Steps finished")
        self._memory = meter.create_gauge(semantics.MEMORY, "By", "Memory at the end of the last step")

    def record(self, batch: ExportBatch) -> None:
        """Adds a batch's steps. On the sidecar's thread."""
        steps = batch.steps
        if not len(steps):
            return
        attributes: dict[str, Any] = {}
        if batch.identity.world_size <= semantics.MOST_RANK_SERIES:
            attributes[semantics.RANK] = batch.identity.rank
        phases = [{**attributes, semantics.PHASE: part} for part in PARTS]
        used = [index for index in range(len(PARTS)) if steps.parts_ns[:, index].any()]
        for duration_ns, own_ns, parts_ns in zip(
            steps.duration_ns.tolist(), steps.own_ns.tolist(), steps.parts_ns.tolist(), strict=True
        ):
            self._step.record(duration_ns / 1e9, attributes)
            self._own.record(own_ns / 1e9, attributes)
            for index in used:
                self._phase.record(parts_ns[index] / 1e9, phases[index])
        self._steps.add(len(steps), attributes)
        if steps.memory_bytes[-1]:
            self._memory.set(int(steps.memory_bytes[-1]), attributes)


def resource(identity: Identity, *, of_rank: bool) -> Resource:
    """What OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME say, over what we know of the rank or of its node."""
    known: dict[str, Any] = {
        "service.name": identity.attributes.get("slurm.job.name") or identity.program.removesuffix(".py"),
        "service.instance.id": f"{identity.host}/{identity.key if of_rank else 'node'}",
        "host.name": identity.host,
        semantics.RUN_ID: identity.run_id,
        semantics.WORLD_SIZE: identity.world_size,
        semantics.RESTART_COUNT: identity.attempt,
        **identity.attributes,
    }
    if of_rank:
        known["process.pid"] = identity.pid
        known[semantics.RANK], known[semantics.LOCAL_RANK] = identity.rank, identity.local_rank
    return Resource.create().merge(Resource(known)).merge(OTELResourceDetector().detect())
