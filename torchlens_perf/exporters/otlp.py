"""The OTLP exporter: it converts steps and alerts to types of the SDK. Sidecar only."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from opentelemetry.context import Context

from torchlens_perf.errors import guard
from torchlens_perf.exporters import ITEM_NAMES, UNDELIVERED, Exporter
from torchlens_perf.exporters.delivery.sender import QueueLimits, Sender
from torchlens_perf.exporters.otlp_alerts import build_log_record
from torchlens_perf.exporters.otlp_metrics import NodeMetrics
from torchlens_perf.exporters.otlp_resource import build_node_resource
from torchlens_perf.exporters.otlp_run_span import RunSpanCollector
from torchlens_perf.exporters.otlp_spans import is_sampled
from torchlens_perf.exporters.trace_sampling import FIRST, NUMBER
from torchlens_perf.run.undelivered import Undelivered, UndeliveredStep, WholeRun
from torchlens_perf.run.verdicts import Alert

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

    from torchlens_perf.exporters import Assessment, ExportBatch, NodeRole
    from torchlens_perf.exporters.delivery.sender import Transport
    from torchlens_perf.exporters.otlp_catch_up import StepReader
    from torchlens_perf.exporters.series import ArrayMeter
    from torchlens_perf.run.hardware_samples import HardwareSamples
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.records import TracedStep

_MAX_LINKABLE_STEPS = 1024
_MAX_REPLAY_BACKLOG = 8192
_READ_AGAIN_S = 10.0


@dataclasses.dataclass(frozen=True)
class SignalDelivery:
    """Transport and queue limits of one signal (traces, metrics or logs)."""

    transport: Transport
    limits: QueueLimits
    interval_s: float = 0.0
    """Seconds between exports of metrics. Other signals do not use it."""


class OtlpExporter(Exporter):
    """Sends traced steps as spans, all steps as metrics, and alerts as log records.

    Use it on the sidecar's thread only.
    """

    def __init__(
        self,
        signals: Mapping[str, SignalDelivery],
        meter: ArrayMeter,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        reader: StepReader | None = None,
        undelivered: Undelivered | None = None,
        keeps_sources: bool = False,
    ) -> None:
        """Start a sender for each signal. Raises ValueError if the sampler is invalid.

        - signals: enabled signals by name.
        - reader: builds spans that the queue has dropped; None to keep them for a replay.
        - undelivered: data that an earlier sidecar of the node has not delivered.
        - keeps_sources: True if the caller saves the result of find_undelivered().
        """
        self._clock = clock
        self._resource: Resource | None = None
        self._traces = RunSpanCollector(environ) if "traces" in signals else None
        self._metrics = NodeMetrics(meter, clock) if "metrics" in signals else None
        self._metrics_due_s = math.inf
        self._interval_s = signals["metrics"].interval_s if "metrics" in signals else math.inf
        self._is_closing = False
        self._reader, self._keeps_sources = reader, keeps_sources
        self._reading_due_s = -math.inf
        earlier = Undelivered() if undelivered is None else undelivered
        self._earlier_alerts = earlier.alerts if "logs" in signals else []
        collect = {"metrics": self._collect_metrics, "traces": self._collect_dropped_steps}
        # Alerts are queued when they arrive.
        self._senders = {
            name: Sender(
                name,
                signal.transport,
                signal.limits,
                collect.get(name, lambda sender: math.inf),
                clock,
            )
            for name, signal in signals.items()
        }
        if "traces" in signals:
            self._senders["traces"].keep_sources(earlier.steps)
        # Traced steps by (attempt, step), and the ranks of this node.
        self._traced: dict[tuple[int, int], TracedStep | None] = {}
        self._ranks: set[int] = set()

    # -- called by the sidecar

    def export(self, batch: ExportBatch) -> None:
        with guard("exporting steps over OTLP"):
            sampled: dict[int, tuple[int, int]] = {}
            if self._traces is not None:
                built = self._traces.steps.build_spans(batch)
                for step, (spans, in_trace, in_rank) in built.items():
                    sampled[step] = in_trace, in_rank
                    chosen = batch.chosen.get(step)
                    source = UndeliveredStep(batch.identity.key, step, len(spans), chosen)
                    self._senders["traces"].queue_items(spans, source)
                self._traces.add_batch(batch, sampled)
            self.spans_sent = sampled
            self._ranks.add(batch.identity.rank)
            self._traced.update(
                ((batch.identity.attempt, step), batch.chosen.get(step)) for step in sampled
            )
            while len(self._traced) > _MAX_LINKABLE_STEPS:
                del self._traced[next(iter(self._traced))]
            if self._metrics is not None:
                self._ensure_resource(batch.identity)
                self._metrics.export(batch, sampled)

    def send_spans(self, spans: Sequence[ReadableSpan]) -> None:
        if self._traces is not None and is_sampled(
            self._traces.steps.sampler, Context(), spans[0].context.trace_id, spans[0].name
        ):
            self._senders["traces"].queue_items(spans)

    def on_assessment(self, assessment: Assessment) -> None:
        with guard("exporting alerts over OTLP"):
            resource = self._ensure_resource(assessment.identity)
            if self._traces is not None:
                self._traces.on_assessment(assessment)
            if self._metrics is not None:
                self._metrics.on_assessment(assessment)
            if "logs" in self._senders:
                earlier, self._earlier_alerts = self._earlier_alerts, []
                for each in (*earlier, *assessment.alerts):
                    step = self._find_traced_step(each)
                    record = build_log_record(each, assessment.identity.run_id, step, resource)
                    self._senders["logs"].queue_items([record], each)

    def update_role(self, part: NodeRole) -> bytes:
        with guard("describing the job over OTLP"):
            if self._metrics is not None:
                return self._metrics.update_role(part)
        return b""

    def record_hardware(self, identity: Identity, hardware: HardwareSamples) -> None:
        with guard("exporting the hardware's telemetry over OTLP"):
            if self._metrics is not None:
                self._ensure_resource(identity)
                self._metrics.hardware.record_samples(hardware)

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until little undelivered data is left, an attempt fails or the timeout passes.

        Return True if the endpoints accept data.
        """
        deadline_s = self._clock() + timeout_s
        taken = True
        for sender in self._senders.values():
            if sender.is_failing or sender.waiting > _MAX_REPLAY_BACKLOG:
                taken &= sender.flush(max(0.0, deadline_s - self._clock()))
        return taken

    def shutdown(self, timeout_s: float) -> list[str]:
        deadline_s = self._clock() + timeout_s
        with guard("exporting the run's span over OTLP"):
            if self._traces is not None:
                self._senders["traces"].queue_items(self._traces.pop_spans(), WholeRun.SPAN)
        with guard("exporting the last metrics over OTLP"):
            if "metrics" in self._senders:
                self._queue_metrics(self._senders["metrics"])
        self._is_closing = True
        for sender in self._senders.values():
            sender.begin_closing()
        for sender in self._senders.values():
            sender.close(max(0.0, deadline_s - self._clock()))
        return [
            note
            for sender in self._senders.values()
            for note in describe_undelivered(sender, keeps_sources=self._keeps_sources)
        ]

    def find_undelivered(self) -> Undelivered:
        found = [each for sender in self._senders.values() for each in sender.undelivered_sources()]
        return Undelivered(
            steps=[each for each in found if isinstance(each, UndeliveredStep)],
            alerts=[*self._earlier_alerts, *(each for each in found if isinstance(each, Alert))],
            whole_run=[each for each in found if isinstance(each, WholeRun)],
        )

    # -- parts

    def _ensure_resource(self, identity: Identity) -> Resource:
        """Return the node's resource. The first call creates the resource and schedules metrics."""
        if self._resource is None:
            self._resource = build_node_resource(identity)
            if self._metrics is not None:
                self._metrics_due_s = self._clock() + self._interval_s
                self._senders["metrics"].wake()
        return self._resource

    def _collect_metrics(self, sender: Sender) -> float:
        """Queue metrics that are due. Return the seconds until the next export."""
        if self._is_closing:
            return math.inf
        left_s = self._metrics_due_s - self._clock()
        if left_s > 0:
            return left_s
        self._queue_metrics(sender)
        self._metrics_due_s = self._clock() + self._interval_s
        return self._interval_s

    def _queue_metrics(self, sender: Sender) -> None:
        if self._resource is not None and self._metrics is not None:
            data = self._metrics.collect(self._resource)
            if data is not None:
                # A replay cannot continue delta points, because it counts from the start.
                sender.queue_items([data], WholeRun.METRICS if sender.replaces else None)

    def _collect_dropped_steps(self, sender: Sender) -> float:
        """Queue steps again that the queue dropped in an outage, with spans built from records.

        Return the seconds until more steps may be in the run directory.
        """
        if self._reader is None:
            return math.inf
        # Read this first: all records are in the run directory when the exporter is closed.
        is_last = self._is_closing
        left_s = self._reading_due_s - self._clock()
        if left_s > 0 and not is_last:
            return left_s
        steps, is_read = sender.find_dropped_sources(), False
        missing = dict.fromkeys(steps)
        with guard("building spans from the run directory"):
            for source, spans in self._reader.read_spans(steps):
                del missing[source]
                sender.queue_items(spans, source)
            is_read = True
        # Missing steps may be in the next segment, but not after the end of the run.
        sender.postpone_sources(missing, give_up=is_read and is_last)
        if len(missing) < len(steps) or not steps:
            return math.inf
        self._reading_due_s = self._clock() + _READ_AGAIN_S
        return _READ_AGAIN_S

    def _find_traced_step(self, alert: Alert) -> int | None:
        """Return the first traced step in which the suspect was slow.

        Another node may have sent only the steps that all nodes send because of their numbers.
        """
        # The step of a hang has not ended, so it has no span.
        if alert.duration_s is not None:
            return None
        steps = (
            step
            for (attempt, step), chosen in self._traced.items()
            if attempt == alert.attempt
            and (
                chosen is None
                or chosen.because in (FIRST, NUMBER)
                or alert.rank is None
                or alert.rank in self._ranks
            )
        )
        return min(filter(alert.covers, steps), default=None)


def describe_undelivered(sender: Sender, *, keeps_sources: bool) -> list[str]:
    """Return notes for the report on the undelivered items of a signal.

    keeps_sources: True if a replay can build these items from the run directory.
    """
    what, fate = ITEM_NAMES[sender.signal], "were lost with the sidecar's memory"
    if keeps_sources and sender.can_rebuild:
        fate = "wait in the run directory; to send them: torchlens-perf sidecar RUN_DIR"
    missing = {
        fate: sender.waiting,
        "were rejected by the endpoint": sender.rejected,
        "were in requests that the endpoint refused for good": sender.refused,
        "were dropped, because the queue was full or their records are no longer in the run"
        " directory": sender.lost,
    }
    found = [
        f"{UNDELIVERED}{count} of these {what} {why}" for why, count in missing.items() if count
    ]
    if found:
        total = sum(missing.values())
        found.insert(0, f"{UNDELIVERED}{total} of {sender.put} {what} were not delivered")
    return found
