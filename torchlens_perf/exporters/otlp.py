"""The OTLP exporter: it converts steps and alerts to types of the SDK. Sidecar only."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.exporters.delivery.sender import Sender
from torchlens_perf.exporters.otlp_alerts import build_log_record
from torchlens_perf.exporters.otlp_metrics import NodeMetrics
from torchlens_perf.exporters.otlp_resource import build_node_resource
from torchlens_perf.exporters.otlp_run_span import RunSpanCollector
from torchlens_perf.exporters.otlp_spans import SpanBuilder

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

    from torchlens_perf.analysis.statistics.hardware import HardwareSamples
    from torchlens_perf.exporters import Assessment, ExportBatch, NodeRole
    from torchlens_perf.exporters.delivery.outbox import Outbox
    from torchlens_perf.exporters.delivery.sender import Transport
    from torchlens_perf.exporters.series import ArrayMeter
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.records import TracedStep
    from torchlens_perf.run.verdicts import Alert

_MAX_LINKABLE_STEPS = 1024
_MAX_REPLAY_BACKLOG = 8192
_ITEM_NAMES = {"traces": "spans", "metrics": "metric points", "logs": "alerts"}


@dataclasses.dataclass(frozen=True)
class SignalDelivery:
    """Outbox and transport of one signal (traces, metrics or logs)."""

    outbox: Outbox
    transport: Transport
    interval_s: float = 0.0
    """Seconds between exports of metrics. Other signals do not use it."""


class OtlpExporter:
    """Sends traced steps as spans, all steps as metrics, and alerts as log records.

    Use it on the sidecar's thread only.
    """

    def __init__(
        self,
        signals: Mapping[str, SignalDelivery],
        meter: ArrayMeter,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """signals: enabled signals by name. Raises ValueError if the sampler is invalid."""
        self._clock = clock
        self._resource: Resource | None = None
        self._spans = SpanBuilder(environ) if "traces" in signals else None
        self._run = RunSpanCollector(environ) if "traces" in signals else None
        self._metrics = NodeMetrics(meter, clock) if "metrics" in signals else None
        self._senders: dict[str, Sender] = {}
        self._metrics_due_s = math.inf
        self._interval_s = signals["metrics"].interval_s if "metrics" in signals else math.inf
        self._last_metrics_sent = False
        for name, signal in signals.items():
            collect = self._collect_metrics if name == "metrics" else _collect_nothing
            self._senders[name] = Sender(signal.outbox, signal.transport, collect, clock)
        # Traced steps by (attempt, step).
        self._traced: dict[tuple[int, int], TracedStep | None] = {}
        self.spans_sent: Mapping[int, tuple[int, int]] = {}
        """For each traced step of the last batch, the ids of the trace and of the rank's span."""

    # -- called by the sidecar

    def export(self, batch: ExportBatch) -> None:
        with guard("exporting steps over OTLP"):
            sampled: dict[int, tuple[int, int]] = {}
            if self._spans is not None:
                for step, (spans, in_trace, in_rank) in self._spans.build_spans(batch).items():
                    sampled[step] = in_trace, in_rank
                    self._senders["traces"].queue_items(spans)
                if self._run is not None:
                    self._run.add_batch(batch, sampled)
            self.spans_sent = sampled
            self._traced.update(
                ((batch.identity.attempt, step), batch.chosen.get(step)) for step in sampled
            )
            while len(self._traced) > _MAX_LINKABLE_STEPS:
                del self._traced[next(iter(self._traced))]
            if self._metrics is not None:
                self._ensure_resource(batch.identity)
                self._metrics.export(batch, sampled)

    def on_assessment(self, assessment: Assessment) -> None:
        with guard("exporting alerts over OTLP"):
            resource = self._ensure_resource(assessment.identity)
            if self._run is not None:
                self._run.on_assessment(assessment)
            if self._metrics is not None:
                self._metrics.on_assessment(assessment)
            if "logs" in self._senders and assessment.alerts:
                run_id = assessment.identity.run_id
                alerts = [
                    build_log_record(each, run_id, self._find_traced_step(each), resource)
                    for each in assessment.alerts
                ]
                self._senders["logs"].queue_items(alerts)

    def update_role(self, part: NodeRole) -> bytes:
        with guard("describing the job over OTLP"):
            if self._metrics is not None:
                return self._metrics.update_role(part)
        return b""

    def record_hardware(self, identity: Identity, hardware: HardwareSamples) -> None:
        with guard("exporting the hardware's telemetry over OTLP"):
            if self._metrics is not None:
                self._ensure_resource(identity)
                self._metrics.record_hardware(hardware)

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until little undelivered data is left, an attempt fails or the timeout passes.

        Return True if the endpoints accept data.
        """
        deadline_s = self._clock() + timeout_s
        taken = True
        for sender in self._senders.values():
            if sender.is_failing or sender.outbox.count_undelivered() > _MAX_REPLAY_BACKLOG:
                taken &= sender.flush(max(0.0, deadline_s - self._clock()))
        return taken

    def shutdown(self, timeout_s: float) -> list[str]:
        deadline_s = self._clock() + timeout_s
        with guard("exporting the run's span over OTLP"):
            if self._run is not None:
                self._senders["traces"].queue_items(self._run.pop_spans())
        for sender in self._senders.values():
            sender.begin_closing()
        for sender in self._senders.values():
            sender.close(max(0.0, deadline_s - self._clock()))
        return [note for sender in self._senders.values() for note in describe_undelivered(sender)]

    # -- parts

    def _ensure_resource(self, identity: Identity) -> Resource:
        """Return the node's resource. The first call creates the resource and schedules metrics."""
        if self._resource is None:
            self._resource = build_node_resource(identity)
            if self._metrics is not None:
                self._metrics_due_s = self._clock() + self._interval_s
                self._senders["metrics"].outbox.wake()
        return self._resource

    def _collect_metrics(self, everything: bool) -> float:
        """Queue metrics that are due. Return the seconds until the next export."""
        if self._last_metrics_sent:
            return math.inf
        self._last_metrics_sent = everything
        left_s = self._metrics_due_s - self._clock()
        if (left_s <= 0 or everything) and self._resource is not None and self._metrics is not None:
            data = self._metrics.collect(self._resource)
            if data is not None:
                self._senders["metrics"].queue_items([data])
            self._metrics_due_s = self._clock() + self._interval_s
            left_s = self._interval_s
        return left_s

    def _find_traced_step(self, alert: Alert) -> int | None:
        """Return the first traced step, equal on all nodes, in which the suspect was slow."""
        # The step of a hang has not ended, so it has no span.
        if alert.duration_s is not None:
            return None
        steps = (
            step
            for (attempt, step), chosen in self._traced.items()
            if attempt == alert.attempt
            and (
                chosen is None or alert.rank is None or chosen.role_of_rank(alert.rank) is not None
            )
        )
        return min(filter(alert.covers, steps), default=None)


def _collect_nothing(everything: bool) -> float:
    """Collect nothing, because items of this signal are queued when they arrive."""
    return math.inf


def describe_undelivered(sender: Sender) -> list[str]:
    """Return notes for the report on the undelivered items of a signal."""
    what, found = _ITEM_NAMES[sender.signal], []
    waiting, dropped = sender.outbox.count_undelivered(), sender.outbox.dropped
    missing = waiting + dropped + sender.refused + sender.rejected
    if missing:
        found.append(f"OTLP: {missing} of {sender.put} {what} were not delivered")
    if waiting:
        where = (
            "wait in the run directory"
            if sender.outbox.on_disk
            else "were lost with the sidecar's memory"
        )
        found.append(
            f"OTLP: {waiting} of these {what} {where}"
            + ("; to send them: torchlens-perf sidecar RUN_DIR" if sender.outbox.on_disk else "")
        )
    if sender.rejected:
        found.append(f"OTLP: {sender.rejected} of these {what} were rejected by the endpoint")
    if sender.refused:
        found.append(
            f"OTLP: {sender.refused} of these {what} were in requests that the endpoint refused for"
            " good"
        )
    if dropped:
        found.append(
            f"OTLP: {dropped} of these {what} were dropped for newer ones because the outbox was"
            " full"
        )
    return found
