"""Traces, metrics and alerts over OTLP, through the OpenTelemetry SDK. Runs in the sidecar; sets no global provider.

All OTEL_* variables act as the SDK documents them (docs/opentelemetry.md lists them, and the one exception).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.errors import guard

if TYPE_CHECKING:
    from torchlens_perf.alert import Alert
    from torchlens_perf.exporters import ExportBatch, Judgement
    from torchlens_perf.exporters.otlp_alerts import AlertSender
    from torchlens_perf.exporters.otlp_metrics import MetricSender
    from torchlens_perf.exporters.otlp_spans import SpanSender
    from torchlens_perf.identity import Identity
    from torchlens_perf.telemetry import Hardware

logger = logging.getLogger("torchlens_perf.sidecar")

_MOST_TRACED = 1024  # steps that an alert may link to


class OtlpExporter:
    """Sends sampled steps as spans, all steps as metrics, and alerts; bounds the time that the SDK takes for it."""

    def __init__(
        self, spans: SpanSender | None, metrics: MetricSender | None, alerts: AlertSender | None = None
    ) -> None:
        """spans, metrics, alerts: None for a signal that is switched off."""
        self._spans = spans
        self._metrics = metrics
        self._alerts = alerts
        self._senders: list[SpanSender | MetricSender | AlertSender] = [
            each for each in (spans, metrics, alerts) if each is not None
        ]
        self._failed_before = 0
        self._traced: dict[tuple[int, int], None] = {}  # attempt and step, as they came

    def export(self, batch: ExportBatch) -> None:
        with guard("exporting steps over OTLP"):
            sampled = self._spans.export(batch) if self._spans is not None else {}
            self._traced.update(((batch.identity.attempt, step), None) for step in sampled)
            while len(self._traced) > _MOST_TRACED:
                del self._traced[next(iter(self._traced))]
            if self._metrics is not None:
                self._metrics.export(batch, sampled)

    def judged(self, judgement: Judgement) -> None:
        with guard("exporting alerts over OTLP"):
            if self._metrics is not None:
                self._metrics.judged(judgement)
            if self._alerts is not None:
                for alert in judgement.alerts:
                    self._alerts.send(alert, judgement.identity, self._traced_step(alert))

    def measured(self, identity: Identity, hardware: Hardware) -> None:
        with guard("exporting the hardware's telemetry over OTLP"):
            if self._metrics is not None:
                self._metrics.measured(identity, hardware)

    def _traced_step(self, alert: Alert) -> int | None:
        """The first step in which the suspect was slow and that was sent as spans: all ranks send the same steps."""
        if alert.since_step is None or alert.duration_s is not None:  # a step that hangs has no span yet
            return None
        end = alert.until_step if alert.until_step is not None else float("inf")
        steps = (step for attempt, step in self._traced if attempt == alert.attempt)
        return min((step for step in steps if alert.since_step <= step < end), default=None)

    def force_flush(self, timeout_s: float) -> bool:
        """Bounded by threads of ours: the SDK's own timeouts are not (force_flush(1 s) took up to 40 s)."""
        ended = _within(timeout_s, [sender.force_flush for sender in self._senders])
        before, self._failed_before = self._failed_before, sum(sender.failed() for sender in self._senders)
        return ended and self._failed_before == before

    def shutdown(self, timeout_s: float) -> list[str]:
        if not _within(timeout_s, [sender.shutdown for sender in self._senders]):
            logger.warning("the OTLP endpoint did not take everything within %g s", timeout_s)
        return [note for sender in self._senders for note in sender.notes()]


def _within(timeout_s: float, calls: Sequence[Callable[[], None]]) -> bool:
    """Runs each call in a daemon thread; whether all returned in time."""
    deadline_s = time.monotonic() + timeout_s
    # The SDK raises where its own timeouts have passed; what is missing then is counted.
    threads = [threading.Thread(target=guard("flushing OTLP")(call), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
