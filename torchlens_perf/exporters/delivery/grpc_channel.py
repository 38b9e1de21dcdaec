"""Requests over gRPC. The bodies are encoded already: they pass through as they are."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from torchlens_perf.errors import printable
from torchlens_perf.exporters.delivery.answer import Answer, Outcome, later
from torchlens_perf.exporters.delivery.settings import Destination
from torchlens_perf.version import VERSION

_METHODS = {
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    "logs": "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
}
_COMPRESSION = {
    "none": grpc.Compression.NoCompression,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}
_PROVIDERS = "opentelemetry_otlp_credential_provider"
_DETAILS = "grpc-status-details-bin"
_REFUSES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ALREADY_EXISTS)
_MAX_REASON = 200


class GrpcTransport:
    """One signal's requests to one endpoint. One thread, beside gRPC's own."""

    def __init__(self, to: Destination) -> None:
        """Raises OSError for a certificate that cannot be read, RuntimeError for a missing credential provider."""
        self._to = to
        options = [("grpc.primary_user_agent", f"torchlens_perf/{VERSION}"), ("grpc.enable_retries", 0)]
        if to.insecure:
            self._channel = grpc.insecure_channel(to.endpoint, options, _COMPRESSION[to.compression])
        else:
            self._channel = grpc.secure_channel(to.endpoint, _credentials(to), options, _COMPRESSION[to.compression])
        self._export = self._channel.unary_unary(_METHODS[to.signal])
        self._metadata = [(name.lower(), value) for name, value in to.headers.items()]

    def send(self, body: bytes) -> Answer:
        """One try, within the timeout."""
        try:
            response = self._export(body, self._to.timeout_s, self._metadata)
        except grpc.RpcError as error:
            return _failed(error)
        return Answer(Outcome.DELIVERED, rejected=_rejected(response))

    def close(self) -> None:
        self._channel.close()


def _failed(error: grpc.RpcError) -> Answer:
    code, details = error.code(), printable(error.details() or "")[:_MAX_REASON]
    reason = f"gRPC {code.name} {details}".strip()
    if code in _REFUSES:
        return Answer(Outcome.REFUSED, reason)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return Answer(Outcome.TOO_LARGE, reason)
    return later(reason, _asked_wait_s(error))


def _asked_wait_s(error: grpc.RpcError) -> float | None:
    """What a google.rpc.RetryInfo among the error's details asks for."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS:
            try:
                for detail in Status.FromString(value).details:
                    info = RetryInfo()
                    if detail.Unpack(info):
                        asked_s: float = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
                        return max(0.0, asked_s)
            except DecodeError:
                return None
    return None


def _rejected(response: bytes) -> int:
    try:
        return max(0, int(ExportTraceServiceResponse.FromString(response).partial_success.rejected_spans))
    except DecodeError:
        return 0


def _credentials(to: Destination) -> grpc.ChannelCredentials:
    if to.credentials:
        for entry in importlib.metadata.entry_points(group=_PROVIDERS, name=to.credentials):
            found = entry.load()()
            if isinstance(found, grpc.ChannelCredentials):
                return found
            raise RuntimeError(f"the credential provider {to.credentials!r} makes no grpc.ChannelCredentials")
        raise RuntimeError(f"there is no credential provider {to.credentials!r}")

    def content(path: str) -> bytes | None:
        return Path(path).read_bytes() if path else None

    return grpc.ssl_channel_credentials(content(to.certificate), content(to.client_key), content(to.client_certificate))
