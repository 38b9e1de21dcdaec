"""One OpenTelemetry trace per iteration: its critical path as spans, with links to traced steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link

from torchlens_perf.exporters import Assessment, ExportBatch, Receiver, semantics
from torchlens_perf.exporters.otlp_resource import SCOPE, build_rank_resource
from torchlens_perf.exporters.otlp_spans import span_context_of_path, step_trace_id
from torchlens_perf.roles.iterations import (
    Event,
    Iteration,
    build_iterations,
    name_processes,
    sum_tokens,
)

SPAN_ITERATION = "rl iteration"
BATCH, PROCESS = "torch.train.iteration.batch", "torch.train.process"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
_TRACES_TIMEOUT_S = 30.0
"""Time that an iteration waits for traces of its steps, which not all steps have."""
_KEPT = 4
"""Iterations whose events are kept, because samples may be sent before the iteration begins."""


class IterationTraces(Receiver):
    """Builds the spans of whole iterations from events and traced steps. One thread."""

    def __init__(self, receivers: Sequence[Receiver] = ()) -> None:
        """receivers: these get the spans."""
        self._receivers = receivers
        self._ends = 0
        """Number of assessments since the job has ended."""
        self.labels: dict[str, str] = {}
        """Name or role of each process of the events."""
        self._events: list[Event] = []
        self._sent_s = 0.0
        self._batch: ExportBatch | None = None
        self._steps: dict[int, Link] = {}

    def export(self, batch: ExportBatch) -> None:
        """Remember which steps have traces, by their end."""
        if batch.identity.rank == 0:
            self._batch = batch
            for each in batch.traces:
                in_trace = step_trace_id(batch.identity.run_id, batch.identity.attempt, each.step)
                # A step begins with the wait for its samples, before the optimizer steps of its iteration.
                self._steps[each.start_ns + each.duration_ns] = Link(
                    span_context_of_path(in_trace, "root"), {semantics.STEP: each.step}
                )

    def on_assessment(self, assessment: Assessment) -> None:
        """Send the last iterations. The second assessment of an ended job follows its last steps."""
        self._ends = (self._ends + 1) * assessment.ended
        if self._ends > 1:
            self.add((), ended=True)

    def add(self, events: Iterable[Event], *, ended: bool = False) -> None:
        """Send the spans of each iteration that new events complete. ended: no event or step follows.

        An iteration waits for the trace of a later step, because traces of steps come later than events.
        """
        self._events += events
        if self._batch is None:
            return
        iterations = build_iterations(self._events)
        waited_s = (each.end_s - _TRACES_TIMEOUT_S for each in iterations[-1:])
        due_s = max(max(self._steps, default=0) / 1e9, *waited_s, 0.0)
        for each in iterations if ended else iterations[:-1]:
            if each.complete_s > self._sent_s and (ended or each.end_s <= due_s):
                self._sent_s = each.complete_s
                spans = self._build(each, self._batch)
                for receiver in self._receivers:
                    receiver.send_spans(spans)
        sent = [each for each in iterations if each.complete_s <= self._sent_s]
        if len(sent) >= _KEPT:
            begin_s = sent[1 - _KEPT].begin_s
            self._events = [each for each in self._events if each.time_s >= begin_s]
            self._steps = {at: each for at, each in self._steps.items() if at >= begin_s * 1e9}

    def _build(self, iteration: Iteration, batch: ExportBatch) -> list[ReadableSpan]:
        identity, resource = batch.identity, build_rank_resource(batch.identity)
        in_trace = step_trace_id(identity.run_id, identity.attempt, f"iteration {iteration.batch}")
        root = span_context_of_path(in_trace, "root")
        common: dict[str, Any] = {semantics.RUN_ID: identity.run_id, BATCH: iteration.batch}
        tokens = {
            SPAN_ITERATION: sum_tokens(each.tokens for each in iteration.samples),
            "generation": iteration.last_sample.tokens,
        }
        names = name_processes(self.labels)
        parts = [(SPAN_ITERATION, "", iteration.begin_s, iteration.end_s), *iteration.path()]
        return [
            ReadableSpan(
                name,
                span_context_of_path(in_trace, number) if number else root,
                root if number else None,
                resource,
                common
                | ({PROCESS: names.get(process, process)} if number else {})
                | ({OUTPUT_TOKENS: tokens[name]} if tokens.get(name) else {}),
                links=[
                    link
                    for at_ns, link in self._steps.items()
                    if name in (SPAN_ITERATION, "steps") and begin_s < at_ns / 1e9 <= end_s
                ],
                start_time=round(begin_s * 1e9) + batch.anchor.offset_ns,
                end_time=round(end_s * 1e9) + batch.anchor.offset_ns,
                instrumentation_scope=SCOPE,
            )
            for number, (name, process, begin_s, end_s) in enumerate(parts)
            if end_s > begin_s
        ]
