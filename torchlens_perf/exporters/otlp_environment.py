"""Which OTLP exporters the OTEL_* variables ask for. Without an endpoint: none, and no network at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torchlens_perf.errors import guard
from torchlens_perf.exporters import sdk_log

if TYPE_CHECKING:
    from torchlens_perf.exporters import Exporter
    from torchlens_perf.exporters.otlp_alerts import AlertSender
    from torchlens_perf.exporters.otlp_metrics import MetricSender
    from torchlens_perf.exporters.otlp_spans import SpanSender

logger = logging.getLogger("torchlens_perf.sidecar")

_SIGNALS = ("traces", "metrics", "logs")
_PROTOCOLS = ("http/protobuf", "grpc")
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
    from torchlens_perf.exporters.otlp import OtlpExporter

    sdk_log.tame(environ)
    spans = _make("traces", _span_sender, signals, environ)
    metrics = _make("metrics", _metric_sender, signals, environ)
    alerts = _make("logs", _alert_sender, signals, environ)
    if spans is None and metrics is None and alerts is None:
        return None
    return OtlpExporter(spans, metrics, alerts)


def _make(
    signal: str, make: Callable[[str, Mapping[str, str]], _T], signals: Mapping[str, str], environ: Mapping[str, str]
) -> _T | None:
    """The signal's sender if it is wanted. A variable that the SDK refuses leaves the signal off."""
    if signal not in signals:
        return None
    with guard(f"exporting {signal} over OTLP"):  # for the SDK has no one type of error for it
        return make(signals[signal], environ)
    return None


def _span_sender(kind: str, environ: Mapping[str, str]) -> SpanSender:
    from torchlens_perf.exporters.otlp_spans import SpanSender

    if kind == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return SpanSender(ConsoleSpanExporter())
    if kind == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter

        return SpanSender(GrpcSpanExporter())
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from torchlens_perf.exporters.otlp_http import Answers

    answers = Answers()
    return SpanSender(OTLPSpanExporter(session=_session(answers, "TRACES", environ)), lambda: answers.rejected)


def _metric_sender(kind: str, environ: Mapping[str, str]) -> MetricSender:
    from torchlens_perf.exporters.otlp_metrics import MetricSender

    if kind == "console":
        from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

        return MetricSender(ConsoleMetricExporter())
    if kind == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetricExporter

        return MetricSender(GrpcMetricExporter())
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    from torchlens_perf.exporters.otlp_http import Answers

    answers = Answers()
    return MetricSender(OTLPMetricExporter(session=_session(answers, "METRICS", environ)), lambda: answers.rejected)


def _alert_sender(kind: str, environ: Mapping[str, str]) -> AlertSender:
    from torchlens_perf.exporters.otlp_alerts import AlertSender

    if kind == "console":
        from opentelemetry.sdk._logs import export

        # ConsoleLogExporter is its name up to 1.38.
        name = "ConsoleLogRecordExporter" if hasattr(export, "ConsoleLogRecordExporter") else "ConsoleLogExporter"
        return AlertSender(getattr(export, name)())
    if kind == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as GrpcLogExporter

        return AlertSender(GrpcLogExporter())
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter

    from torchlens_perf.exporters.otlp_http import Answers

    answers = Answers()
    return AlertSender(OTLPLogExporter(session=_session(answers, "LOGS", environ)), lambda: answers.rejected)


def _session(answers: Any, upper: str, environ: Mapping[str, str]) -> Any:
    """Ours, unless the user has a credential provider, which brings its own session."""
    provider = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_{}CREDENTIAL_PROVIDER"
    told = environ.get(provider.format("")) or environ.get(provider.format(f"{upper}_"))
    return None if told else answers.session()
