"""An interceptor that classifies the responses to gRPC exporters of the SDK."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from torchlens_perf.errors import printable
from torchlens_perf.exporters.delivery.answer import (
    NotDeliveredError,
    SendOutcome,
    SendResult,
    count_rejected_items,
    retry_result,
)

# Reconnect at least every 10 s. gRPC's default of two minutes would delay data after an outage.
OPTIONS = (("grpc.max_reconnect_backoff_ms", 10_000), ("grpc.enable_retries", 0))
_DETAILS = "grpc-status-details-bin"
_REFUSES = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
)
_MAX_REASON = 200


class ClassifyingInterceptor(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Classifies the responses to an exporter's calls.

    Failed calls raise NotDeliveredError, so the SDK does not retry by itself.
    """

    def __init__(self) -> None:
        self.answer: SendResult | None = None
        """Result of the last call; None before the first call."""

    def intercept_calls_of(self, exporter: Any) -> None:
        """Intercept all calls of an exporter of the SDK.

        Raises AttributeError if the SDK's private attributes have changed.
        """
        exporter._channel = grpc.intercept_channel(exporter._channel, self)
        exporter._client = exporter._stub(exporter._channel)

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        call = continuation(details, request)
        error = call.exception()
        if error is None:
            self.answer = SendResult(
                SendOutcome.DELIVERED,
                rejected=count_rejected_items(call.result().SerializeToString()),
            )
            return call
        self.answer = _classify_error(error)
        raise NotDeliveredError(self.answer.reason)


def _classify_error(error: Any) -> SendResult:
    code, details = error.code(), printable(error.details() or "")[:_MAX_REASON]
    reason = f"gRPC {code.name} {details}".strip()
    if code in _REFUSES:
        return SendResult(SendOutcome.REFUSED, reason)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return SendResult(SendOutcome.TOO_LARGE, reason)
    return retry_result(reason, _retry_delay_s(error))


def _retry_delay_s(error: Any) -> float | None:
    """Return the delay in google.rpc.RetryInfo of the error's details; None if it is missing."""
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
