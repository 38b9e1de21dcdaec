"""Traces and metrics over OTLP, through the OpenTelemetry SDK. Runs in the sidecar; sets no global provider.

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
    from torchlens_perf.exporters import ExportBatch
    from torchlens_perf.exporters.otlp_metrics import MetricSender
    from torchlens_perf.exporters.otlp_spans import SpanSender

logger = logging.getLogger("torchlens_perf.sidecar")


class OtlpExporter:
    """Sends sampled steps as spans and all steps as metrics, and bounds the time that the SDK takes for it."""

    def __init__(self, spans: SpanSender | None, metrics: MetricSender | None) -> None:
        """spans, metrics: None for a signal that is switched off."""
        self._spans = spans
        self._metrics = metrics
        self._senders: list[SpanSender | MetricSender] = [each for each in (spans, metrics) if each is not None]
        self._failed_before = 0

    def export(self, batch: ExportBatch) -> None:
        with guard("exporting steps over OTLP"):
            sampled = self._spans.export(batch) if self._spans is not None else {}
            if self._metrics is not None:
                self._metrics.export(batch, sampled)

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
