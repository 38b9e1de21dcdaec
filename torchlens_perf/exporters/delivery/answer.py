"""The result of one OTLP request: delivered, to be retried, too large, or refused for good.

It follows the OTLP specification (https://opentelemetry.io/docs/specs/otlp/#failures), except that
requests are also retried if the server cannot be the endpoint (a wrong address, an expired token, a
web page). A user may fix that while the job runs, and waiting costs nothing but room in the outbox.
"""

from __future__ import annotations

import dataclasses
import email.utils
import enum
import time

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse


class Outcome(enum.Enum):
    DELIVERED = "delivered"
    LATER = "later"
    """To be retried: the endpoint is unreachable or busy, or the server is no OTLP endpoint."""
    TOO_LARGE = "too large"
    """The endpoint may accept the request in smaller parts."""
    REFUSED = "refused"
    """The endpoint will never accept the request: it considers it malformed."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of one attempt to send a request."""

    outcome: Outcome
    reason: str = ""
    """Why the request was not delivered, for the log."""
    after_s: float | None = None
    """Seconds that the endpoint asks to wait before a retry; None if it does not."""
    rejected: int = 0
    """Number of items of a delivered request that the endpoint reports as rejected."""


class NotDeliveredError(Exception):
    """Raised in the SDK's exporter to end an export before it retries or reports success."""


def later(reason: str, after_s: float | None = None) -> Answer:
    return Answer(Outcome.LATER, reason, after_s)


def rejected(response: bytes) -> int:
    """Return the number of rejected items. Responses of all signals have the same layout."""
    try:
        return max(
            0, int(ExportTraceServiceResponse.FromString(response).partial_success.rejected_spans)
        )
    except DecodeError:
        return 0


def wait_of(header: str, unix_s: float | None = None) -> float | None:
    """Return the seconds (at least 0) that a Retry-After header asks for; None if it is invalid.

    The header has a number of seconds or a date.
    """
    text = header.strip()
    if text.isdecimal():
        return float(text)
    try:
        until_s = email.utils.parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    return max(0.0, until_s - (time.time() if unix_s is None else unix_s))
