"""Sampled steps as spans: one trace per step, a deterministic id for each span, and a count of what was not delivered.

The ids are derived from run, attempt and step, so the ranks' spans meet in one trace without talking to each other, and
a replay sends the same ids again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import trace as trace_api
from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from torchlens_perf.analysis.statistics.steps import kind_name
from torchlens_perf.exporters import ExportBatch, semantics
from torchlens_perf.exporters.counting import BatchSender
from torchlens_perf.exporters.otlp_resource import rank_resource
from torchlens_perf.run.ring import Flag
from torchlens_perf.version import VERSION

if TYPE_CHECKING:
    from torchlens_perf.run.clock import Anchor
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.records import Span, StepTrace

logger = logging.getLogger("torchlens_perf.sidecar")

# More than the SDK's 2048: a step with gradient accumulation has several thousand spans, and is sent as a whole.
DEFAULT_QUEUE_SIZE = 8192


def trace_id(run_id: str, attempt: int, step: int) -> int:
    """The id of a step's trace: the same on all ranks, and in a replay."""
    return _hash(16, run_id, attempt, step)


def span_id(in_trace: int, *path: object) -> int:
    """The id of a span in a trace, by its place in it."""
    return _hash(8, f"{in_trace:032x}", *path)


def _hash(size: int, *parts: object) -> int:
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big") or 1


class SpanSender(BatchSender):
    """Feeds the SDK's batch processor with the sampled steps, and counts what it could not deliver."""

    def __init__(self, exporter: SpanExporter, rejected: Callable[[], int] = lambda: 0) -> None:
        """rejected: how many spans the endpoint has rejected of those that the exporter could send.

        Raises ValueError if an OTEL_BSP_* or OTEL_SPAN_* variable cannot be used.
        """
        super().__init__(exporter, "spans", rejected)
        self._limits = SpanLimits()
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        self._queue_size = _queue_size()
        self._processor = BatchSpanProcessor(self._counter, max_queue_size=self._queue_size)  # type: ignore[arg-type]
        self._tracers: dict[str, _RankTracer] = {}
        self._fed = 0
        self._left_out = 0
        self._too_large = 0

    def export(self, batch: ExportBatch) -> dict[int, Context]:
        """Takes the batch's traces over; leaves out those that the queue has no room for, and counts them.

        Returns for each step that it took the context of the rank's step span.
        """
        taken: dict[int, Context] = {}
        if not batch.traces:
            return taken
        tracer = self._tracers.get(batch.identity.key)
        if tracer is None:
            tracer = _RankTracer(batch.identity, self._processor, self._sampler, self._limits)
            self._tracers[batch.identity.key] = tracer
        rows = {step: row for row, step in enumerate(batch.steps.step.tolist())}
        for trace in batch.traces:
            if not tracer.samples(trace):
                continue
            size = tracer.size(trace)
            # A full queue would drop its oldest spans without a word: leave out this trace as a whole.
            if self._fed - self._counter.seen + size > self._queue_size:
                self._left_out += size
                self._too_large += size > self._queue_size
                continue
            taken[trace.step] = tracer.export(trace, batch.anchor, _of_step(batch, rows.get(trace.step)))
            self._fed += size
        return taken

    def failed(self) -> int:
        """How many spans of the sampled steps the endpoint has not taken, without those that are on their way."""
        return self._counter.seen - self._counter.succeeded + self._rejected() + self._left_out

    def notes(self) -> list[str]:
        """What was not delivered, and why; for the report."""
        notes = []
        undelivered, sampled = self._fed - self._counter.seen + self.failed(), self._fed + self._left_out
        if undelivered:
            notes.append(
                f"OTLP: {undelivered} of {sampled} spans were not delivered; to send them again: torchlens-perf "
                "sidecar RUN_DIR"
            )
        if self._rejected():
            notes.append(f"OTLP: {self._rejected()} of these spans were rejected by the endpoint")
        if self._left_out:
            notes.append(f"OTLP: {self._left_out} of these spans were left out because the endpoint was too slow")
        if self._too_large:
            notes.append(
                f"OTLP: {self._too_large} steps have more than {self._queue_size} spans on a rank, which is more than "
                f"the queue holds; set {OTEL_BSP_MAX_QUEUE_SIZE}"
            )
        return notes


def _queue_size() -> int:
    text = os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE, "").strip()
    try:
        return int(text) if text else DEFAULT_QUEUE_SIZE
    except ValueError:
        logger.warning("%s=%s is not a number: %d is used", OTEL_BSP_MAX_QUEUE_SIZE, text, DEFAULT_QUEUE_SIZE)
        return DEFAULT_QUEUE_SIZE


def _of_step(batch: ExportBatch, row: int | None) -> dict[str, Any]:
    """Attributes of a rank's step span that are about the step as a whole."""
    if row is None:
        return {}
    return {
        semantics.OWN_SECONDS: int(batch.steps.own_ns[row]) / 1e9,
        semantics.MICRO_STEPS: int(batch.steps.micro_steps[row]),
    }


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

    def __init__(self, identity: Identity, processor: BatchSpanProcessor, sampler: Sampler, limits: SpanLimits) -> None:
        self._identity = identity
        self._sampler = sampler
        self._ids = _PresetIds()
        provider = TracerProvider(
            sampler, rank_resource(identity), shutdown_on_exit=False, id_generator=self._ids, span_limits=limits
        )
        provider.add_span_processor(processor)
        self._tracer = provider.get_tracer(semantics.SCOPE, VERSION)
        self._links = _links(identity.traceparent)

    def samples(self, trace: StepTrace) -> bool:
        """Whether OTEL_TRACES_SAMPLER takes the step's trace: all ranks decide alike, by its id."""
        in_trace = trace_id(self._identity.run_id, self._identity.attempt, trace.step)
        decision = self._sampler.should_sample(Context(), in_trace, _root_name(trace)).decision
        return decision is Decision.RECORD_AND_SAMPLE

    def size(self, trace: StepTrace) -> int:
        """How many spans export() makes of it."""
        return len(trace.spans) + (2 if self._identity.rank == 0 else 1)

    def export(self, trace: StepTrace, anchor: Anchor, of_step: Mapping[str, Any]) -> Context:
        """Hands the step's spans to the processor. Returns the context of the rank's step span.

        of_step: more attributes of that span.
        """
        identity = self._identity
        self._ids.trace_id = in_trace = trace_id(identity.run_id, identity.attempt, trace.step)
        root_id, rank_id = span_id(in_trace, "root"), span_id(in_trace, identity.rank)
        offset_ns = anchor.unix_ns - anchor.monotonic_ns
        common = {
            semantics.RUN_ID: identity.run_id,
            semantics.STEP: trace.step,
            semantics.RANK: identity.rank,
        }
        start_ns, end_ns = trace.start_ns + offset_ns, trace.start_ns + trace.duration_ns + offset_ns
        if identity.rank == 0:
            root = self._start(root_id, _root_name(trace), Context(), start_ns, common, self._links)
            root.end(end_ns)
        context = context_of(in_trace, root_id)
        self._start(rank_id, semantics.SPAN_RANK_STEP, context, start_ns, {**common, **of_step}).end(end_ns)
        in_step = context_of(in_trace, rank_id)
        for index, (span, parent) in enumerate(nest(trace.spans)):
            context = in_step if parent is None else context_of(in_trace, span_id(in_trace, identity.rank, parent))
            this_id = span_id(in_trace, identity.rank, index)
            begin_ns = span.start_ns + offset_ns
            emitted = self._start(this_id, span.name or span.kind, context, begin_ns, {**common, **_details(span)})
            if span.flags & Flag.EXCEPTION:
                emitted.set_status(Status(StatusCode.ERROR))
            emitted.end(begin_ns + span.duration_ns)
        return in_step

    def _start(
        self, this_id: int, name: str, context: Context, start_ns: int, attributes: Mapping[str, Any],
        links: Sequence[Link] = (),
    ) -> trace_api.Span:  # fmt: skip
        self._ids.span_id = this_id
        return self._tracer.start_span(name, context, attributes=attributes, links=links, start_time=start_ns)


def _root_name(trace: StepTrace) -> str:
    return semantics.SPAN_INFERENCE_STEP if trace.flags & Flag.INFERENCE else semantics.SPAN_STEP


def nest(spans: Sequence[Span]) -> list[tuple[Span, int | None]]:
    """Spans by start, each with the index of the smallest span that contains it; None: it lies in the step itself.

    Nothing on the training thread lies in a span of another thread or of the device: they only happen at the same
    time. A collective lies where it was issued, or where its kernel began on the device; it may last longer than what
    is around it, and nothing lies in it.
    """
    ordered = sorted(spans, key=lambda span: (span.start_ns, -span.duration_ns, span.depth))
    nested: list[tuple[Span, int | None]] = []
    running: list[int] = []  # those before this one that have not ended at its start
    for index, span in enumerate(ordered):
        running = [other for other in running if _end(ordered[other]) >= span.start_ns]
        around = [
            other
            for other in running
            if _end(ordered[other]) >= (span.start_ns if span.kind == "collective" else _end(span))
            and ordered[other].kind != "collective"
            and (span.flags & Flag.OTHER_THREAD or not ordered[other].flags & Flag.OTHER_THREAD)
            and _on_device(span) == _on_device(ordered[other])
        ]
        # Of several that last equally long, the last one is the innermost.
        parent = min(around, key=lambda other: (ordered[other].duration_ns, -other), default=None)
        nested.append((span, parent))
        running.append(index)
    return nested


def _on_device(span: Span) -> bool:
    return span.kind == "device" or (span.kind == "collective" and bool(span.flags & Flag.DEVICE))


def _end(span: Span) -> int:
    return span.start_ns + span.duration_ns


def _details(span: Span) -> dict[str, Any]:
    details: dict[str, Any] = {semantics.SPAN_KIND: span.kind}
    if span.kind == "device":
        return {semantics.SPAN_KIND: kind_name(span.value0), semantics.ON_DEVICE: True}
    if span.kind == "collective":
        details[semantics.BYTES], details[semantics.SEQUENCE] = span.value0, span.value1 & 0xFFFFFFFF
        if _on_device(span):
            details[semantics.ON_DEVICE] = True
    return details


def context_of(in_trace: int, parent_id: int) -> Context:
    """For what lies in a span, or points to it."""
    parent = SpanContext(in_trace, parent_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return trace_api.set_span_in_context(NonRecordingSpan(parent), Context())


def _links(traceparent: str) -> tuple[Link, ...]:
    """A link to the trace that started the job, if the environment named one (W3C traceparent)."""
    context = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())
    found = trace_api.get_current_span(context).get_span_context()
    return (Link(found),) if found.is_valid else ()
