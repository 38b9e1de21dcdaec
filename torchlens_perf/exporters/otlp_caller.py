"""The span that started the job: read from what the ranks have recorded of it, and linked to."""

from __future__ import annotations

import functools
import logging

from opentelemetry import trace as trace_api
from opentelemetry.context import Context
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.trace import SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

logger = logging.getLogger("torchlens_perf.sidecar")

_REMOTE = 0x300  # SpanFlags: it is known whether the parent, or what is linked to, is remote; it is


@functools.lru_cache(maxsize=64)  # the same of all ranks and steps: one line in the log
def caller(traceparent: str, tracestate: str = "") -> SpanContext | None:
    """The caller's span context; None without one, or for a traceparent that is none."""
    if not traceparent:
        return None
    carrier = {"traceparent": traceparent, "tracestate": tracestate}
    found = trace_api.get_current_span(TraceContextTextMapPropagator().extract(carrier, Context())).get_span_context()
    if not found.is_valid:
        logger.warning("TRACEPARENT=%.80s is no W3C traceparent: steps get no link to it", traceparent)
        return None
    return found


def flags(context: SpanContext) -> int:
    """OTLP's flags of a link to the caller, or of its child."""
    return int(context.trace_flags) | _REMOTE


def link(traceparent: str, tracestate: str) -> list[bytes]:
    """A link to the caller's span, encoded; none without a caller."""
    found = caller(traceparent, tracestate)
    if found is None:
        return []
    message = SpanMessage.Link(
        trace_id=found.trace_id.to_bytes(16, "big"),
        span_id=found.span_id.to_bytes(8, "big"),
        trace_state=found.trace_state.to_header(),
        flags=flags(found),
    )
    return [message.SerializeToString()]
