"""The whole run as one span: the child of the span that started the job, with links to the traces of steps.

Steps have traces of their own. This span is how one gets from the caller's trace, that of a workflow's task, to them.
It is sent when the ranks have ended; a run without a caller, or whose caller's trace is not sampled, has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util import BoundedList
from opentelemetry.trace import Link

from torchlens_perf.exporters import Assessment, ExportBatch, semantics
from torchlens_perf.exporters.delivery.otlp_requests import in_span
from torchlens_perf.exporters.otlp_caller import caller
from torchlens_perf.exporters.otlp_resource import SCOPE, rank_resource
from torchlens_perf.exporters.otlp_spans import sampler, span_context, trace_id

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

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

    def spans(self) -> list[ReadableSpan]:
        """Of each attempt that has ended, once."""
        attempts, self._attempts = self._attempts, {}
        if not self._ended:  # the sidecar alone ends: the one that is started next sends it
            return []
        found = []
        for run in attempts.values():
            parent = caller(run.identity.traceparent, run.identity.tracestate)
            if parent is not None and self._takes(parent):
                found.append(_span(run, parent))
        return found

    def _takes(self, parent: SpanContext) -> bool:
        """As OpenTelemetry's default sampler: where the caller's trace is not sampled, its children are not either."""
        if not parent.trace_flags.sampled:
            return False
        if self._sampler is None:
            return True
        from opentelemetry.sdk.trace.sampling import Decision

        decision = self._sampler.should_sample(in_span(parent), parent.trace_id, semantics.SPAN_RUN).decision
        return decision is Decision.RECORD_AND_SAMPLE


def _span(run: _Attempt, parent: SpanContext) -> ReadableSpan:
    who = run.identity
    links = BoundedList.from_seq(MAX_LINKS, [_link(who, step) for step in run.traced[:MAX_LINKS]])
    links.dropped = max(0, len(run.traced) - MAX_LINKS)
    return ReadableSpan(
        semantics.SPAN_RUN,
        span_context(parent.trace_id, who.run_id, who.attempt, "run", state=parent.trace_state),
        parent,
        rank_resource(who),
        {semantics.RUN_ID: who.run_id, semantics.RANK: who.rank, semantics.RUN_STEPS: run.steps},
        links=links,
        start_time=run.start_ns,
        end_time=run.end_ns,
        instrumentation_scope=SCOPE,
    )


def _link(who: Identity, step: int) -> Link:
    return Link(span_context(trace_id(who.run_id, who.attempt, step), "root"), {semantics.STEP: step})
