"""What became of one request: delivered, to be tried again, too large, or refused for good.

By the OTLP specification (https://opentelemetry.io/docs/specs/otlp/#failures), and beyond it in one thing: what cannot
be the endpoint (a wrong address, a token that has expired, a web page) keeps the data waiting. Somebody may mend it
while the job runs, and nothing but the room in the outbox is lost by waiting.
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
    """Not now: the endpoint is away, busy, or is not one."""
    TOO_LARGE = "too large"
    """Halves of it may be taken."""
    REFUSED = "refused"
    """It will never be taken: it is malformed to this endpoint."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one try has come to."""

    outcome: Outcome
    reason: str = ""
    """Why it was not delivered, for the log."""
    after_s: float | None = None
    """How long the endpoint asks to wait; None where it does not say."""
    rejected: int = 0
    """How many items of a delivered request the endpoint says that it has not taken."""


class NotTakenError(Exception):
    """Ends an export of the SDK at once, which would otherwise try the request again itself, or take it for taken."""


def later(reason: str, after_s: float | None = None) -> Answer:
    return Answer(Outcome.LATER, reason, after_s)


def rejected(response: bytes) -> int:
    """Return how many items a partial success leaves out. The three signals' responses are laid out alike."""
    try:
        return max(0, int(ExportTraceServiceResponse.FromString(response).partial_success.rejected_spans))
    except DecodeError:
        return 0


def wait_of(header: str, unix_s: float | None = None) -> float | None:
    """Return the seconds that a Retry-After header asks for, as a number or a date; None for anything else.

    Never negative.
    """
    text = header.strip()
    if text.isdecimal():
        return float(text)
    try:
        until_s = email.utils.parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):  # also a date that no clock reaches
        return None
    return max(0.0, until_s - (time.time() if unix_s is None else unix_s))
