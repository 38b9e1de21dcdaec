"""Build the spans of traced steps: one trace per step, and a deterministic id for each span.

Ids are hashes of run, attempt and step. The spans of all ranks are thus in one trace without
communication between nodes, and a replay sends the same ids again.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision, Sampler
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    TraceState,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import Status, StatusCode

from torchlens_perf.exporters import ExportBatch, semantics
from torchlens_perf.exporters.otlp_resource import SCOPE, build_rank_resource
from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.records import Span, StepTrace, TracedStep
from torchlens_perf.run.ring import Flag, kind_name

_SAMPLER = "OTEL_TRACES_SAMPLER"
_TAKES_ALL = ("", "always_on", "parentbased_always_on")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_OTHER_THREAD, _DEVICE = int(Flag.OTHER_THREAD), int(Flag.DEVICE)
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)


def step_trace_id(run_id: str, attempt: int, step: int | str) -> int:
    """Return the id of a step's trace, which is the same on all ranks and in a replay.

    step: a number, or the name of another unit of work.
    """
    return _hash_to_id(16, run_id, attempt, step)


def span_id_of_path(in_trace: int, *path: object) -> int:
    """Return the id of a span, a hash of its path in the trace."""
    return _hash_to_id(8, f"{in_trace:032x}", *path)


def span_context_of_path(
    in_trace: int, *path: object, state: TraceState | None = None
) -> SpanContext:
    """Return the context of a span, whose id is a hash of its path in the trace."""
    return SpanContext(in_trace, span_id_of_path(in_trace, *path), False, _SAMPLED, state)


def context_with_span(context: SpanContext) -> Context:
    """Return a context with a span of this span context as the current span."""
    return set_span_in_context(NonRecordingSpan(context))


def _hash_to_id(size: int, *parts: object) -> int:
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big") or 1


class SpanBuilder:
    """Builds the spans of traced steps. Not thread-safe."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Read the sampler. Raises ValueError if OTEL_TRACES_SAMPLER_ARG is invalid."""
        self.sampler: Sampler = ALWAYS_ON
        if environ.get(_SAMPLER, "").strip().lower() not in _TAKES_ALL:
            self.sampler = TracerProvider(shutdown_on_exit=False).sampler
        self._ranks: dict[str, _RankSpanBuilder] = {}

    def build_spans(self, batch: ExportBatch) -> dict[int, tuple[list[ReadableSpan], int, int]]:
        """Return each step's spans, its trace id, and the id of the rank's span."""
        if not batch.traces:
            return {}
        rank = self._ranks.get(batch.identity.key)
        # The identity changes when the run's name becomes known.
        if rank is None or rank.identity != batch.identity:
            rank = self._ranks[batch.identity.key] = _RankSpanBuilder(batch.identity)
        found: dict[int, tuple[list[ReadableSpan], int, int]] = {}
        of_steps = {
            step: {semantics.OWN_SECONDS: own_ns / 1e9, semantics.MICRO_STEPS: micro_steps}
            for step, own_ns, micro_steps in zip(
                batch.steps.step.tolist(),
                batch.steps.own_ns.tolist(),
                batch.steps.micro_steps.tolist(),
                strict=True,
            )
        }
        for trace in batch.traces:
            in_trace = step_trace_id(batch.identity.run_id, batch.identity.attempt, trace.step)
            # The sampler decides by the trace's id, which gives the same result on all ranks.
            if is_sampled(self.sampler, Context(), in_trace, _name_of_root(trace)):
                chosen = batch.chosen.get(trace.step)
                found[trace.step] = rank.build_step(
                    trace, in_trace, batch.anchor.offset_ns, of_steps.get(trace.step, {}), chosen
                )
        return found


def is_sampled(sampler: Sampler, parent: Context, trace_id: int, name: str) -> bool:
    """Return True if the sampler samples a span with this name."""
    return sampler.should_sample(parent, trace_id, name).decision is Decision.RECORD_AND_SAMPLE


# Cached, so a warning is only logged once per caller.
@functools.lru_cache(maxsize=64)
def parse_caller(traceparent: str, tracestate: str = "") -> SpanContext | None:
    """Return the caller's span context; None if `traceparent` is empty or invalid."""
    if not traceparent:
        return None
    carrier = {"traceparent": traceparent, "tracestate": tracestate}
    found = get_current_span(
        TraceContextTextMapPropagator().extract(carrier, Context())
    ).get_span_context()
    if not found.is_valid:
        logger.warning(
            "TRACEPARENT=%.80s is not a valid W3C traceparent: steps are not linked to it",
            traceparent,
        )
        return None
    return found


class _RankSpanBuilder:
    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self._resource = build_rank_resource(identity)
        caller = parse_caller(identity.traceparent, identity.tracestate)
        self._links = [] if caller is None else [Link(caller)]

    def build_step(
        self,
        trace: StepTrace,
        in_trace: int,
        offset_ns: int,
        of_step: Mapping[str, Any],
        chosen: TracedStep | None = None,
    ) -> tuple[list[ReadableSpan], int, int]:
        """Return the step's spans, its trace id, and the id of the rank's span.

        - offset_ns: UNIX time minus CLOCK_MONOTONIC.
        - of_step: additional attributes of the rank's span.
        - chosen: why the step is sent, if known.
        """
        rank = self.identity.rank
        root = span_context_of_path(in_trace, "root")
        common: dict[str, Any] = {
            semantics.RUN_ID: self.identity.run_id,
            semantics.STEP: trace.step,
            semantics.RANK: rank,
        }
        times = trace.start_ns + offset_ns, trace.start_ns + offset_ns + trace.duration_ns
        found = []
        if rank == 0:
            why = dict(common)
            if chosen is not None:
                why[semantics.SAMPLED_BECAUSE] = chosen.because
                why[semantics.STEPS_LEFT_OUT] = chosen.left_out
            found.append(
                self._make_span(_name_of_root(trace), root, None, why, times, links=self._links)
            )
        if trace.flags & Flag.WITHOUT_MODULES:
            of_step = {**of_step, semantics.MODULES_TIMED: False}
        of_rank = span_context_of_path(in_trace, rank)
        of_step = {**common, semantics.SPAN_KIND: semantics.STEP_KIND, **of_step}
        found.append(
            self._make_span(f"{semantics.SPAN_RANK} {rank}", of_rank, root, of_step, times)
        )
        # This loop computes the ids of span_id_of_path(), but hashes the common prefix only once.
        path = hashlib.sha256(f"{in_trace:032x}/{rank}/".encode())
        contexts: list[SpanContext] = []
        for index, (span, parent) in enumerate(find_parents(trace.spans)):
            around = of_rank if parent is None else contexts[parent]
            digest = path.copy()
            digest.update(b"%d" % index)
            context = SpanContext(
                in_trace, int.from_bytes(digest.digest()[:8], "big"), False, _SAMPLED
            )
            contexts.append(context)
            begin_ns = span.start_ns + offset_ns
            attributes = {**common, **_span_attributes(span)}
            times = begin_ns, begin_ns + span.duration_ns
            found.append(
                self._make_span(
                    span.name or span.kind, context, around, attributes, times,
                    _ERROR if span.flags & Flag.EXCEPTION else _UNSET,
                )
            )  # fmt: skip
        return found, in_trace, of_rank.span_id

    def _make_span(
        self, name: str, context: SpanContext, parent: SpanContext | None, attributes: Mapping[str, Any],
        times: tuple[int, int], status: Status = _UNSET, links: Sequence[Link] = (),
    ) -> ReadableSpan:  # fmt: skip
        return ReadableSpan(
            name, context, parent, self._resource, attributes, links=links, status=status, start_time=times[0],
            end_time=times[1], instrumentation_scope=SCOPE,
        )  # fmt: skip


def _span_attributes(span: Span) -> dict[str, Any]:
    """Return the attributes that depend on the kind of a span."""
    if span.kind == "device":
        return {semantics.SPAN_KIND: kind_name(span.value0), semantics.ON_DEVICE: True}
    if span.kind != "collective":
        return {semantics.SPAN_KIND: span.kind}
    on_device = {semantics.ON_DEVICE: True} if span.flags & Flag.DEVICE else {}
    counted = {semantics.BYTES: span.value0, semantics.SEQUENCE: span.value1 & 0xFFFFFFFF}
    return {semantics.SPAN_KIND: span.kind, **on_device, **counted}


def _name_of_root(trace: StepTrace) -> str:
    return semantics.SPAN_INFERENCE_STEP if trace.flags & Flag.INFERENCE else semantics.SPAN_STEP


def find_parents(spans: Sequence[Span]) -> list[tuple[Span, int | None]]:
    """Sort spans by start, and find the index of each span's parent; None if the parent is the
    step.

    The parent is the shortest span that encloses the span. A span of another thread or of the
    device is never the parent of a span of the training thread. The parent of a collective is the
    span in which it was issued, or in which its kernel started. A collective may end after its
    parent, and it is never a parent.
    """
    ordered = sorted(spans, key=lambda span: (span.start_ns, -span.duration_ns, span.depth))
    nested: list[tuple[Span, int | None]] = []
    # Open spans: end, duration, index, other thread, on device.
    running: list[tuple[int, int, int, int, bool]] = []
    for index, span in enumerate(ordered):
        start_ns, duration_ns, flags = span.start_ns, span.duration_ns, span.flags
        is_collective, other_thread = span.kind == "collective", flags & _OTHER_THREAD
        on_device = span.kind == "device" or (is_collective and bool(flags & _DEVICE))
        end_ns = start_ns + duration_ns
        needed_ns = start_ns if is_collective else end_ns
        parent, shortest_ns, ended = None, -1, False
        for around in running:
            if around[0] < start_ns:
                ended = True
            elif (
                around[0] >= needed_ns
                and (other_thread or not around[3])
                and around[4] == on_device
                # Of spans with equal durations, the last is the innermost.
                and (parent is None or around[1] <= shortest_ns)
            ):
                parent, shortest_ns = around[2], around[1]
        if ended:
            running = [around for around in running if around[0] >= start_ns]
        nested.append((span, parent))
        if not is_collective:
            running.append((end_ns, duration_ns, index, other_thread, on_device))
    return nested
