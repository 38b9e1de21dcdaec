"""Parse and link the caller: the span that started the job, from TRACEPARENT."""

from __future__ import annotations

import functools
import logging

from opentelemetry import trace as trace_api
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

logger = logging.getLogger("torchlens_perf.sidecar")


# Cached, so a warning is only logged once per caller.
@functools.lru_cache(maxsize=64)
def parse_caller(traceparent: str, tracestate: str = "") -> SpanContext | None:
    """Return the caller's span context; None if `traceparent` is empty or invalid."""
    if not traceparent:
        return None
    carrier = {"traceparent": traceparent, "tracestate": tracestate}
    found = trace_api.get_current_span(
        TraceContextTextMapPropagator().extract(carrier, Context())
    ).get_span_context()
    if not found.is_valid:
        logger.warning(
            "TRACEPARENT=%.80s is not a valid W3C traceparent: steps are not linked to it",
            traceparent,
        )
        return None
    return found


def links_to_caller(traceparent: str, tracestate: str) -> list[Link]:
    """Return a list with a link to the caller's span, or an empty list."""
    found = parse_caller(traceparent, tracestate)
    return [] if found is None else [Link(found)]
