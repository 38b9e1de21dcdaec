"""Find the span in the user's tracing that started this job: the trace context of the run.

A workflow engine or a wrapper such as `otel-cli exec` passes the span in TRACEPARENT and TRACESTATE
(W3C trace context; OpenTelemetry, "Environment variables as context propagation carriers"). An
active span of this process takes precedence.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torchlens_perf.errors import guard

_PROPAGATORS = "OTEL_PROPAGATORS"
_DEFAULT = "tracecontext,baggage"


def read_calling_span(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the unvalidated traceparent and tracestate of the job's caller; "" if not set.

    Call this function on the thread that starts the watch. OpenTelemetry's API is only used if the
    program has imported it. The environment is ignored if OTEL_PROPAGATORS lacks `tracecontext`.
    """
    with guard("reading the active span"):
        api = sys.modules.get("opentelemetry.trace")
        if api is not None:
            found = api.get_current_span().get_span_context()
            if found.is_valid:
                traceparent = (
                    f"00-{found.trace_id:032x}-{found.span_id:016x}-{int(found.trace_flags):02x}"
                )
                return traceparent, found.trace_state.to_header()
    propagators = (environ.get(_PROPAGATORS) or _DEFAULT).split(",")
    if "tracecontext" not in [each.strip().lower() for each in propagators]:
        return "", ""
    return environ.get("TRACEPARENT", ""), environ.get("TRACESTATE", "")
