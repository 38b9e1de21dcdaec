"""The whole run as one span: the child of the span that started the job, with links to the traces of steps.

Steps have traces of their own. This span is how one gets from the caller's trace, that of a workflow's task, to them.
It is sent when the ranks have ended; a run without a caller, or whose caller's trace is not sampled, has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.trace import NonRecordingSpan, SpanContext, set_span_in_context

from torchlens_perf.exporters import Assessment, ExportBatch, semantics
from torchlens_perf.exporters.delivery.wire import item, key_values
from torchlens_perf.exporters.otlp_caller import caller, flags
from torchlens_perf.exporters.otlp_resource import encoded, rank_resource
from torchlens_perf.exporters.otlp_spans import sampler, span_id, trace_id

if TYPE_CHECKING:
    from torchlens_perf.run.identity import Identity

MAX_LINKS = 128  # as OpenTelemetry has it for a span


@dataclasses.dataclass
class _Attempt:
    """What is known of rank 0 in one attempt of the run."""

    identity: Identity
    start_ns: int = 0
    """UNIX time, as the next."""
    end_ns: int = 0
    steps: int = 0
    traced: list[int] = dataclasses.field(default_factory=list)


class RunSpan:
    """Gathers what the run's span says. On the sidecar's thread."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Raises ValueError if OTEL_TRACES_SAMPLER_ARG cannot be used."""
        self._sampler = sampler(environ)
        self._attempts: dict[str, _Attempt] = {}  # by rank 0's process
        self._ended = False

    def saw(self, batch: ExportBatch, sampled: Collection[int]) -> None:
        """sampled: those of the batch's steps whose spans are sent."""
        who, steps = batch.identity, batch.steps
        if who.rank != 0 or not who.traceparent:
            return
        if who.key not in self._attempts:
            if not len(steps):
                return
            self._attempts[who.key] = _Attempt(who)
        found = self._attempts[who.key]
        found.identity = who  # the run's name may be known later
        found.traced += sampled
        if len(found.traced) > 2 * MAX_LINKS:  # the first half, and every other one of the rest
            found.traced = found.traced[: MAX_LINKS // 2] + found.traced[MAX_LINKS // 2 :: 2]
        if len(steps) and not getattr(batch, "again", False):
            offset_ns = batch.anchor.unix_ns - batch.anchor.monotonic_ns
            found.start_ns = found.start_ns or int(steps.start_ns[0]) + offset_ns
            found.end_ns = max(found.end_ns, int(steps.start_ns[-1] + steps.duration_ns[-1]) + offset_ns)
            found.steps += len(steps)

    def judged(self, assessment: Assessment) -> None:
        self._ended = assessment.ended

    def encode(self) -> list[tuple[bytes, bytes]]:
        """Of each attempt that has ended: the resource and the span, once."""
        attempts, self._attempts = self._attempts, {}
        if not self._ended:  # the sidecar alone ends: the one that is started next sends it
            return []
        found = []
        for run in attempts.values():
            parent = caller(run.identity.traceparent, run.identity.tracestate)
            if parent is not None and self._takes(parent):
                found.append((encoded(rank_resource(run.identity)), _encoded(run, parent)))
        return found

    def _takes(self, parent: SpanContext) -> bool:
        """As OpenTelemetry's default sampler: where the caller's trace is not sampled, its children are not either."""
        if not parent.trace_flags.sampled:
            return False
        if self._sampler is None:
            return True
        from opentelemetry.sdk.trace.sampling import Decision

        below = set_span_in_context(NonRecordingSpan(parent))
        decision = self._sampler.should_sample(below, parent.trace_id, semantics.SPAN_RUN).decision
        return decision is Decision.RECORD_AND_SAMPLE


def _encoded(run: _Attempt, parent: SpanContext) -> bytes:
    who = run.identity
    attributes: Mapping[str, str | int] = {
        semantics.RUN_ID: who.run_id,
        semantics.RANK: who.rank,
        semantics.RUN_STEPS: run.steps,
    }
    span = SpanMessage(
        trace_id=parent.trace_id.to_bytes(16, "big"),
        span_id=span_id(parent.trace_id, who.run_id, who.attempt, "run").to_bytes(8, "big"),
        parent_span_id=parent.span_id.to_bytes(8, "big"),
        trace_state=parent.trace_state.to_header(),
        flags=flags(parent),
        name=semantics.SPAN_RUN,
        kind=SpanMessage.SpanKind.SPAN_KIND_INTERNAL,
        start_time_unix_nano=run.start_ns,
        end_time_unix_nano=run.end_ns,
        attributes=key_values(attributes),
        links=[_link(who, step) for step in run.traced[:MAX_LINKS]],
        dropped_links_count=max(0, len(run.traced) - MAX_LINKS),
    )
    return item(span.SerializeToString())


def _link(who: Identity, step: int) -> SpanMessage.Link:
    in_trace = trace_id(who.run_id, who.attempt, step)
    return SpanMessage.Link(
        trace_id=in_trace.to_bytes(16, "big"),
        span_id=span_id(in_trace, "root").to_bytes(8, "big"),
        attributes=key_values({semantics.STEP: step}),
    )
