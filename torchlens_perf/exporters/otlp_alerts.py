"""Convert alerts to OpenTelemetry events, which are log records with a name."""

from __future__ import annotations

from typing import Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import Resource

from torchlens_perf.exporters import semantics
from torchlens_perf.exporters.otlp_resource import SCOPE
from torchlens_perf.exporters.otlp_spans import (
    context_with_span,
    span_context_of_path,
    step_trace_id,
)
from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.run.verdicts import Alert


def build_log_record(
    alert: Alert, run_id: str, traced_step: int | None, resource: Resource
) -> ReadableLogRecord:
    """Build the log record of an alert. traced_step: a step of the alert whose trace is linked."""
    context = None
    if traced_step is not None and alert.rank is not None:
        # The suspect's span may be sent by another node, with the same ids as on this node.
        context = context_with_span(
            span_context_of_path(step_trace_id(run_id, alert.attempt, traced_step), alert.rank)
        )
    record = LogRecord(
        timestamp=alert.unix_ns,
        observed_timestamp=alert.unix_ns,
        context=context,
        severity_text="WARN" if alert.urgent else "INFO",
        severity_number=SeverityNumber.WARN if alert.urgent else SeverityNumber.INFO,
        body=alert.sentence,
        attributes=_attributes_of_alert(run_id, alert),
        event_name=semantics.name_of_alert_event(alert.kind, alert.change),
    )
    return ReadableLogRecord(record, resource, SCOPE)


def _attributes_of_alert(run_id: str, alert: Alert) -> dict[str, Any]:
    of_hang = alert.kind == "hang"
    found = {
        semantics.ALERT_UID: alert.id,
        semantics.ALERT_ABOUT: alert.about,
        semantics.RUN_ID: run_id,
        semantics.RESTART_COUNT: alert.attempt,
        semantics.RANK: alert.rank,
        semantics.RANKS: format_ranges(alert.ranks) or None,
        semantics.SUSPECT_HOST: alert.host or None,
        semantics.PHASE: alert.phase,
        semantics.SINCE_STEP: alert.since_step,
        semantics.UNTIL_STEP: alert.until_step,
        semantics.HANG_KIND if of_hang else semantics.STRAGGLER_CLASS: alert.cause or None,
        semantics.STRAGGLER_CAUSES: alert.because or None,
        semantics.STRAGGLER_SCOPE: alert.scope or None,
        semantics.STRAGGLER_COST: alert.cost_s_per_step,
        semantics.COST_SHARE: alert.cost_share,
        semantics.HANG_DURATION: alert.duration_s,
    }
    return {name: value for name, value in found.items() if value is not None}
