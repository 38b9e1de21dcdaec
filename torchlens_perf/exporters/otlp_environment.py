"""Which OTLP exporters the OTEL_* variables ask for. Without an endpoint: none, and no network at all."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchlens_perf.exporters import Exporter

logger = logging.getLogger("torchlens_perf.sidecar")

_PROTOCOLS = ("http/protobuf", "grpc")


def wanted_signals(environ: Mapping[str, str]) -> dict[str, str]:
    """For "traces" and "metrics", where switched on: the protocol, or "console".

    A signal is on if an endpoint is configured for it or for all, or its OTEL_*_EXPORTER says so; OTEL_SDK_DISABLED and
    OTEL_*_EXPORTER=none switch it off. An unknown exporter or protocol leaves the signal off, with a line in the log.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return {}
    signals = {}
    for signal in ("traces", "metrics"):
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
    protocol = environ.get(name) or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or _PROTOCOLS[0]
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

    spans = _make("traces", signals.get("traces"))
    metrics = _make("metrics", signals.get("metrics"))
    return OtlpExporter(spans, metrics) if spans is not None or metrics is not None else None


def _make(signal: str, kind: str | None) -> Any:
    """The SDK's exporter, which reads its own variables. A variable that it refuses leaves the signal off."""
    if kind is None:
        return None
    try:
        if signal == "traces":
            if kind == "console":
                from opentelemetry.sdk.trace.export import ConsoleSpanExporter

                return ConsoleSpanExporter()
            if kind == "grpc":
                from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter

                return GrpcSpanExporter()
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            return OTLPSpanExporter()
        if kind == "console":
            from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

            return ConsoleMetricExporter()
        if kind == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetricExporter

            return GrpcMetricExporter()
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        return OTLPMetricExporter()
    except (ValueError, OSError) as error:
        logger.warning("OTLP %s are off: %s", signal, error)
        return None
