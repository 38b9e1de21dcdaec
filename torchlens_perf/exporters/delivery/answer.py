"""The result of sending an OTLP request: delivered, to be retried, too large, or refused.

Results follow the OTLP specification (https://opentelemetry.io/docs/specs/otlp/#failures) with one
exception. Requests are also retried if the server does not seem to be the endpoint (a wrong
address, an expired token, a web page). The user may fix this error while the job runs.
"""

from __future__ import annotations

import dataclasses
import email.utils
import enum
import time

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

MAX_REASON = 200
"""Largest number of characters of an endpoint's reason in a message."""


class SendOutcome(enum.Enum):
    DELIVERED = "delivered"
    LATER = "later"
    """Retry: the endpoint is unreachable or busy, or the server is no OTLP endpoint."""
    REFUSED = "refused"
    """The endpoint will never accept the request: it is malformed or too large."""


@dataclasses.dataclass(frozen=True)
class SendResult:
    """The result of one attempt to send a request."""

    outcome: SendOutcome
    reason: str = ""
    """Reason, for the log, why the request was not delivered."""
    after_s: float | None = None
    """Delay before a retry that the endpoint requests, in seconds; None if it requests none."""
    rejected: int = 0
    """Number of items of a delivered request that the endpoint reports as rejected."""


class NotDeliveredError(Exception):
    """Raised in an exporter of the SDK to end an export, because the sender itself retries.

    The SDK's own retries would delay the end of a run by the timeout of a request.
    """


def retry_result(reason: str, after_s: float | None = None) -> SendResult:
    return SendResult(SendOutcome.LATER, reason, after_s)


def count_rejected_items(response: bytes) -> int:
    """Return the number of rejected items in a response, which has one layout for all signals."""
    try:
        return max(
            0, int(ExportTraceServiceResponse.FromString(response).partial_success.rejected_spans)
        )
    except DecodeError:
        return 0


def parse_retry_after(header: str, unix_s: float | None = None) -> float | None:
    """Return the delay in seconds (at least 0) in a Retry-After header; None if it is invalid.

    The header contains a number of seconds or a date.
    """
    text = header.strip()
    if text.isdecimal():
        return float(text)
    try:
        until_s = email.utils.parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    return max(0.0, until_s - (time.time() if unix_s is None else unix_s))
