"""Traces, metrics and alerts over OTLP, through the OpenTelemetry SDK. Runs in the sidecar; sets no global provider.

All OTEL_* variables act as the SDK documents them (docs/opentelemetry.md lists them, and the one exception). Without an
endpoint there is no exporter, and no network at all.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torchlens_perf.errors import guard
from torchlens_perf.exporters import sdk_log

if TYPE_CHECKING:
    from torchlens_perf.analysis.alerts.alert import Alert
    from torchlens_perf.analysis.statistics.hardware import Hardware
    from torchlens_perf.exporters import Assessment, ExportBatch, Exporter
    from torchlens_perf.exporters.otlp_alerts import AlertSender
    from torchlens_perf.exporters.otlp_http import ResponseChecker
    from torchlens_perf.exporters.otlp_metrics import MetricSender
    from torchlens_perf.exporters.otlp_spans import SpanSender
    from torchlens_perf.run.identity import Identity

logger = logging.getLogger("torchlens_perf.sidecar")

_HEARS_S = 0.25  # between two looks for signals
_SIGNALS = ("traces", "metrics", "logs")
_PROTOCOLS = ("http/protobuf", "grpc")
# By signal, where the SDK has its exporters: over OTLP, and to the console.
_SDK_EXPORTERS = {
    "traces": ("trace_exporter", "OTLPSpanExporter", "trace.export", "ConsoleSpanExporter"),
    "metrics": ("metric_exporter", "OTLPMetricExporter", "metrics.export", "ConsoleMetricExporter"),
    # ConsoleLogExporter is its name up to 1.38.
    "logs": ("_log_exporter", "OTLPLogExporter", "_logs.export", "ConsoleLogRecordExporter", "ConsoleLogExporter"),
}
_MAX_TRACED = 1024  # steps that an alert may link to
_T = TypeVar("_T")


def wanted_signals(environ: Mapping[str, str]) -> dict[str, str]:
    """For "traces", "metrics" and "logs", where switched on: the protocol, or "console".

    A signal is on if an endpoint is configured for it or for all, or its OTEL_*_EXPORTER says so; OTEL_SDK_DISABLED and
    OTEL_*_EXPORTER=none switch it off. An unknown exporter or protocol leaves the signal off, with a line in the log.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return {}
    signals = {}
    for signal in _SIGNALS:
        upper = signal.upper()
        exporter = environ.get(f"OTEL_{upper}_EXPORTER", "").strip()
        endpoint = environ.get(f"OTEL_EXPORTER_OTLP_{upper}_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        if exporter in ("", "otlp"):
            if endpoint or exporter:
                protocol = _protocol(environ, upper)
                if protocol:
                    signals[signal] = protocol
        elif exporter == "console":
            signals[signal] = "console"
        elif exporter != "none":
            logger.warning(
                "OTEL_%s_EXPORTER=%s is not supported (otlp, console, none): %s are off", upper, exporter, signal
            )
    return signals


def _protocol(environ: Mapping[str, str], upper: str) -> str:
    name = f"OTEL_EXPORTER_OTLP_{upper}_PROTOCOL"
    protocol = (environ.get(name) or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or _PROTOCOLS[0]).strip()
    if protocol not in _PROTOCOLS:
        logger.warning(
            "OTLP protocol %r is not supported (%s): %s are off", protocol, ", ".join(_PROTOCOLS), upper.lower()
        )
        return ""
    return protocol


def exporter_from_environment(environ: Mapping[str, str]) -> Exporter | None:
    """The exporter that the variables ask for, or None. The OpenTelemetry SDK is imported only if there is one."""
    signals = wanted_signals(environ)
    if not signals:
        return None
    sdk_log.install_log_filters(environ)
    spans = _make("traces", _span_sender, signals, environ)
    metrics = _make("metrics", _metric_sender, signals, environ)
    alerts = _make("logs", _alert_sender, signals, environ)
    if spans is None and metrics is None and alerts is None:
        return None
    return OtlpExporter(spans, metrics, alerts)


def _make(
    signal: str,
    sender: Callable[[Any, Callable[[], int]], _T],
    signals: Mapping[str, str],
    environ: Mapping[str, str],
) -> _T | None:
    """The signal's sender if it is wanted. A variable that the SDK refuses leaves the signal off."""
    if signal not in signals:
        return None
    with guard(f"exporting {signal} over OTLP"):  # for the SDK has no one type of error for it
        return sender(*_sdk_exporter(signal, signals[signal], environ))
    return None


def _sdk_exporter(signal: str, protocol: str, environ: Mapping[str, str]) -> tuple[Any, Callable[[], int]]:
    """The SDK's exporter, and what counts what the endpoint has rejected."""
    module, otlp, console_module, *console_names = _SDK_EXPORTERS[signal]
    if protocol == "console":
        console = importlib.import_module(f"opentelemetry.sdk.{console_module}")
        return next(getattr(console, name) for name in console_names if hasattr(console, name))(), lambda: 0
    if protocol == "grpc":
        grpc = importlib.import_module(f"opentelemetry.exporter.otlp.proto.grpc.{module}")
        return getattr(grpc, otlp)(), lambda: 0
    from torchlens_perf.exporters.otlp_http import ResponseChecker

    answers = ResponseChecker()
    http = importlib.import_module(f"opentelemetry.exporter.otlp.proto.http.{module}")
    return getattr(http, otlp)(session=_session(answers, signal.upper(), environ)), lambda: answers.rejected


def _span_sender(exporter: Any, rejected: Callable[[], int]) -> SpanSender:
    from torchlens_perf.exporters.otlp_spans import SpanSender

    return SpanSender(exporter, rejected)


def _metric_sender(exporter: Any, rejected: Callable[[], int]) -> MetricSender:
    from torchlens_perf.exporters.otlp_metrics import MetricSender

    return MetricSender(exporter, rejected)


def _alert_sender(exporter: Any, rejected: Callable[[], int]) -> AlertSender:
    from torchlens_perf.exporters.otlp_alerts import AlertSender

    return AlertSender(exporter, rejected)


def _session(answers: ResponseChecker, upper: str, environ: Mapping[str, str]) -> Any:
    """Ours, unless the user has a credential provider, which brings its own session."""
    provider = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_{}CREDENTIAL_PROVIDER"
    configured = environ.get(provider.format("")) or environ.get(provider.format(f"{upper}_"))
    return None if configured else answers.session()


class DeferredExporter:
    """Hands everything on to the exporter that `make` returns; to none where that is None. It is made when there is
    something to export: importing the SDK may take longer than a short run."""

    def __init__(self, make: Callable[[], Exporter | None]) -> None:
        """make: called once, when something is to be exported."""
        self._make: Callable[[], Exporter | None] | None = make
        self._made: Exporter | None = None

    def export(self, batch: ExportBatch) -> None:
        exporter = self._exporter()
        if exporter is not None:
            exporter.export(batch)

    def on_assessment(self, assessment: Assessment) -> None:
        exporter = self._exporter()
        if exporter is not None:
            exporter.on_assessment(assessment)

    def measured(self, identity: Identity, hardware: Hardware) -> None:
        exporter = self._exporter()
        if exporter is not None:
            exporter.measured(identity, hardware)

    def force_flush(self, timeout_s: float) -> bool:
        return self._made is None or self._made.force_flush(timeout_s)

    def shutdown(self, timeout_s: float) -> list[str]:
        return [] if self._made is None else self._made.shutdown(timeout_s)

    def _exporter(self) -> Exporter | None:
        if self._make is not None:
            make, self._make = self._make, None
            self._made = make()
        return self._made


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
            while len(self._traced) > _MAX_TRACED:
                del self._traced[next(iter(self._traced))]
            if self._metrics is not None:
                self._metrics.export(batch, sampled)

    def on_assessment(self, assessment: Assessment) -> None:
        with guard("exporting alerts over OTLP"):
            if self._metrics is not None:
                self._metrics.on_assessment(assessment)
            if self._alerts is not None:
                for alert in assessment.alerts:
                    self._alerts.send(alert, assessment.identity, self._traced_step(alert))

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
        # Not in one wait: a Ctrl-C that comes just before one is heard after it.
        while thread.is_alive() and (left_s := deadline_s - time.monotonic()) > 0:
            thread.join(min(left_s, _HEARS_S))
    return not any(thread.is_alive() for thread in threads)
