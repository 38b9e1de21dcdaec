"""The span that started this job, in the user's own tracing: the trace context that a run begins in.

A workflow engine or a wrapper such as `otel-cli exec` hands it over in TRACEPARENT and TRACESTATE (W3C trace context;
OpenTelemetry, "Environment variables as context propagation carriers"). In a process that has spans of its own, the
active one is nearer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torchlens_perf.errors import guard

_PROPAGATORS = "OTEL_PROPAGATORS"
_DEFAULT = "tracecontext,baggage"


def calling_span(environ: Mapping[str, str]) -> tuple[str, str]:
    """The caller's traceparent and tracestate, unchecked; "" for what nobody says. On the thread that starts the watch.

    OpenTelemetry's API is asked only where the program has imported it. The environment is not, where OTEL_PROPAGATORS
    leaves `tracecontext` out.
    """
    with guard("reading the active span"):
        api = sys.modules.get("opentelemetry.trace")
        if api is not None:
            found = api.get_current_span().get_span_context()
            if found.is_valid:
                traceparent = f"00-{found.trace_id:032x}-{found.span_id:016x}-{int(found.trace_flags):02x}"
                return traceparent, found.trace_state.to_header()
    propagators = (environ.get(_PROPAGATORS) or _DEFAULT).split(",")
    if "tracecontext" not in [each.strip().lower() for each in propagators]:
        return "", ""
    return environ.get("TRACEPARENT", ""), environ.get("TRACESTATE", "")
