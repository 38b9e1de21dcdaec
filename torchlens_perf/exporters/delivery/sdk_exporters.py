"""Transports that use OpenTelemetry's own exporters, which read OTEL_EXPORTER_OTLP_* themselves."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchlens_perf.exporters.delivery.answer import NotDeliveredError, SendOutcome, SendResult

if TYPE_CHECKING:
    from torchlens_perf.exporters.delivery.grpc_calls import ClassifyingStub
    from torchlens_perf.exporters.delivery.http_session import ClassifyingSession
    from torchlens_perf.exporters.delivery.sender import Item

# For each signal, module and class of the OTLP exporter and of the console exporter.
_EXPORTERS = {
    "traces": ("trace_exporter", "OTLPSpanExporter", "trace.export", "ConsoleSpanExporter"),
    "metrics": ("metric_exporter", "OTLPMetricExporter", "metrics.export", "ConsoleMetricExporter"),
    "logs": ("_log_exporter", "OTLPLogExporter", "_logs.export", "ConsoleLogRecordExporter"),
}


class SdkTransport:
    """Sends requests through an exporter of the SDK. Not thread-safe."""

    def __init__(
        self,
        signal: str,
        exporter: Any,
        observer: ClassifyingSession | ClassifyingStub | None = None,
    ) -> None:
        """observer: classifies the endpoint's responses; None if there is no endpoint."""
        self._signal, self._exporter, self._observer = signal, exporter, observer
        # Drop the SDK's messages about failed responses, because the sender logs these at a limited
        # rate.
        self._logger = logging.getLogger(type(exporter).__module__)
        self._logger.addFilter(self._is_unclassified)

    def send(self, items: Sequence[Item]) -> SendResult:
        if self._observer is not None:
            self._observer.answer = None
        try:
            result = self._exporter.export(items[0] if self._signal == "metrics" else items)
        except NotDeliveredError:
            result = None
        answer = None if self._observer is None else self._observer.answer
        if answer is not None:
            return answer
        if result is not None and result.name == "SUCCESS":
            return SendResult(SendOutcome.DELIVERED)
        return SendResult(SendOutcome.REFUSED, "the SDK's exporter failed without a response")

    def close(self) -> None:
        self._logger.removeFilter(self._is_unclassified)
        self._exporter.shutdown()

    def _is_unclassified(self, record: logging.LogRecord) -> bool:
        return self._observer is None or self._observer.answer is None


def create_transport(signal: str, way: str) -> SdkTransport:
    """Create a transport.

    way: "http/protobuf", "grpc", or "console" for standard output. Raises RuntimeError if the
    credential provider is missing. The SDK's errors about invalid variables propagate.
    """
    module, name, console_module, console_name = _EXPORTERS[signal]
    if way == "console":
        exporters = importlib.import_module(f"opentelemetry.sdk.{console_module}")
        return SdkTransport(signal, getattr(exporters, console_name)())
    if way == "grpc":
        from torchlens_perf.exporters.delivery.grpc_calls import OPTIONS, ClassifyingStub

        exporters = importlib.import_module(f"opentelemetry.exporter.otlp.proto.grpc.{module}")
        exporter = getattr(exporters, name)(channel_options=OPTIONS)
        # The SDK has no public way to see responses. An AttributeError here disables the signal.
        exporter._client = ClassifyingStub(exporter._client)
        return SdkTransport(signal, exporter, exporter._client)
    from torchlens_perf.exporters.delivery.http_session import ClassifyingSession

    provider = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_{}CREDENTIAL_PROVIDER"
    session = ClassifyingSession(
        os.environ.get(provider.format(f"{signal.upper()}_"), "")
        or os.environ.get(provider.format(""), "")
    )
    exporters = importlib.import_module(f"opentelemetry.exporter.otlp.proto.http.{module}")
    return SdkTransport(signal, getattr(exporters, name)(session=session), session)
