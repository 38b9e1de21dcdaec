"""A stub that classifies the responses to gRPC exporters of the SDK."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from torchlens_perf.errors import printable
from torchlens_perf.exporters.delivery.answer import (
    MAX_REASON,
    NotDeliveredError,
    SendOutcome,
    SendResult,
    count_rejected_items,
    retry_result,
)

# Reconnect at least every 10 s. gRPC's default of two minutes would delay data after an outage.
OPTIONS = (("grpc.max_reconnect_backoff_ms", 10_000),)
_DETAILS = "grpc-status-details-bin"
_REFUSES = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
)


class ClassifyingStub:
    """Replaces the stub of an exporter, and classifies the responses to its calls.

    The SDK reports neither the status of a failed call nor rejected items. Failed calls raise
    NotDeliveredError.
    """

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self.answer: SendResult | None = None
        """Result of the last call; None before the first call."""

    def Export(self, **call: Any) -> Any:
        try:
            response = self._stub.Export(**call)
        except grpc.RpcError as error:
            self.answer = _classify_error(error)
            raise NotDeliveredError(self.answer.reason) from error
        rejected = count_rejected_items(response.SerializeToString())
        self.answer = SendResult(SendOutcome.DELIVERED, rejected=rejected)
        return response


def _classify_error(error: Any) -> SendResult:
    code, details = error.code(), printable(error.details() or "")[:MAX_REASON]
    reason = f"gRPC {code.name} {details}".strip()
    is_too_large = code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details
    if code in _REFUSES or is_too_large:
        return SendResult(SendOutcome.REFUSED, reason)
    return retry_result(reason, _retry_delay_s(error))


def _retry_delay_s(error: Any) -> float | None:
    """Return the delay in google.rpc.RetryInfo of the error's details; None if it is missing."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS:
            with suppress(DecodeError):
                for detail in Status.FromString(value).details:
                    info = RetryInfo()
                    if detail.Unpack(info):
                        asked_s: float = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
                        return max(0.0, asked_s)
    return None
