"""The span of the whole run, which connects the traces of steps to the trace of the caller.

The caller is the span that started the job, such as a workflow's task. The run's span is a child of
the caller's span and links to the traces of steps. The span is sent when the ranks have ended, if
the caller's trace exists and is sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util import BoundedList
from opentelemetry.trace import Link, SpanContext
from opentelemetry.trace.status import Status, StatusCode

from torchlens_perf.exporters import Assessment, ExportBatch, semantics
from torchlens_perf.exporters.otlp_resource import SCOPE, build_rank_resource
from torchlens_perf.exporters.otlp_spans import (
    SpanBuilder,
    context_with_span,
    is_sampled,
    parse_caller,
    span_context_of_path,
    step_trace_id,
)
from torchlens_perf.run.identity import Identity
from torchlens_perf.verdicts.verdict import Verdict

# OpenTelemetry's default limit of links per span.
MAX_LINKS = 128
_UNSET = Status(StatusCode.UNSET)


@dataclasses.dataclass
class _AttemptSteps:
    """The steps of rank 0 in one attempt of the run."""

    identity: Identity
    start_ns: int = 0
    """UNIX time of the first step's start."""
    end_ns: int = 0
    steps: int = 0
    traced: list[int] = dataclasses.field(default_factory=list)


class RunSpanCollector:
    """Collects the data of the run's span. Use it on the sidecar's thread only."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Read the sampler. Raises ValueError if OTEL_TRACES_SAMPLER_ARG is invalid."""
        self.steps = SpanBuilder(environ)
        """Builds the spans of the run's traced steps."""
        # Attempts by Identity.key of rank 0.
        self._attempts: dict[str, _AttemptSteps] = {}
        self._ended = False
        self._crash: Verdict | None = None
        self._attempt = 0

    def add_batch(self, batch: ExportBatch, sampled: Collection[int]) -> None:
        """Add a batch. sampled: steps of the batch whose spans are sent."""
        identity, steps = batch.identity, batch.steps
        if identity.rank != 0 or not identity.traceparent:
            return
        if identity.key not in self._attempts:
            if not len(steps):
                return
            self._attempts[identity.key] = _AttemptSteps(identity)
        found = self._attempts[identity.key]
        # The run's name may become known during the run.
        found.identity = identity
        found.traced += sampled
        if len(found.traced) > 2 * MAX_LINKS:
            # Keep the first steps and half of all later steps.
            found.traced = found.traced[: MAX_LINKS // 2] + found.traced[MAX_LINKS // 2 :: 2]
        if len(steps) and not batch.again:
            offset_ns = batch.anchor.offset_ns
            found.start_ns = found.start_ns or int(steps.start_ns[0]) + offset_ns
            found.end_ns = max(
                found.end_ns, int(steps.start_ns[-1] + steps.duration_ns[-1]) + offset_ns
            )
            found.steps += len(steps)

    def on_assessment(self, assessment: Assessment) -> None:
        self._ended, self._crash = assessment.ended, assessment.crash
        self._attempt = assessment.identity.attempt

    def pop_spans(self) -> list[ReadableSpan]:
        """Build one span per attempt, if all processes have ended. Later calls return none."""
        attempts, self._attempts = self._attempts, {}
        # If processes still run, only this sidecar stops, and its successor sends the span.
        if not self._ended:
            return []
        found = []
        for run in attempts.values():
            parent = parse_caller(run.identity.traceparent, run.identity.tracestate)
            # The span is sent if the caller's trace is sampled and OTEL_TRACES_SAMPLER agrees.
            if (
                parent is not None
                and parent.trace_flags.sampled
                and is_sampled(
                    self.steps.sampler,
                    context_with_span(parent),
                    parent.trace_id,
                    semantics.SPAN_RUN,
                )
            ):
                crash = self._crash if run.identity.attempt == self._attempt else None
                found.append(_build_run_span(run, parent, crash))
        return found


def _build_run_span(run: _AttemptSteps, parent: SpanContext, crash: Verdict | None) -> ReadableSpan:
    identity, status, events = run.identity, _UNSET, list[Event]()
    attributes: dict[str, str | int] = {
        semantics.RUN_ID: identity.run_id,
        semantics.RANK: identity.rank,
        semantics.RUN_STEPS: run.steps,
    }
    if crash is not None:
        status = Status(StatusCode.ERROR, crash.explanation)
        attributes[semantics.ERROR_TYPE] = crash.kind
        failure = crash.evidence.failure
        if failure is not None:
            attributes[semantics.ERROR_TYPE] = failure["type"] or crash.kind
            # The event of OpenTelemetry's conventions for exceptions.
            said = {
                semantics.EXCEPTION_TYPE: failure["type"],
                semantics.EXCEPTION_MESSAGE: failure["message"],
            }
            known = {name: text for name, text in said.items() if text}
            events.append(Event("exception", known, failure["unix_ns"]))
    links: BoundedList[Link] = BoundedList(MAX_LINKS)
    for step in run.traced[:MAX_LINKS]:
        in_trace = step_trace_id(identity.run_id, identity.attempt, step)
        links.append(Link(span_context_of_path(in_trace, "root"), {semantics.STEP: step}))
    links.dropped = max(0, len(run.traced) - MAX_LINKS)
    return ReadableSpan(
        semantics.SPAN_RUN,
        span_context_of_path(
            parent.trace_id, identity.run_id, identity.attempt, "run", state=parent.trace_state
        ),
        parent,
        build_rank_resource(identity),
        attributes,
        events,
        links,
        status=status,
        start_time=run.start_ns,
        end_time=max(run.end_ns, *(event.timestamp for event in events), 0),
        instrumentation_scope=SCOPE,
    )
