"""Alerts as OpenTelemetry events, encoded: log records with a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, SeverityNumber

from torchlens_perf.exporters import semantics
from torchlens_perf.exporters.delivery.wire import any_value, item, key_values
from torchlens_perf.exporters.otlp_spans import span_id, trace_id
from torchlens_perf.run.rank_ranges import ranges

if TYPE_CHECKING:
    from torchlens_perf.verdicts.alert import Alert

_KIND_OF_HANG = "hang"
_SAMPLED = 1  # of a span's flags


def encode_alert(alert: Alert, run_id: str, traced_step: int | None) -> bytes:
    """An alert as it lies in a request. traced_step: of its steps, one that was sent as spans."""
    urgent = alert.urgent
    record = LogRecord(
        time_unix_nano=alert.unix_ns,
        observed_time_unix_nano=alert.unix_ns,
        severity_number=SeverityNumber.SEVERITY_NUMBER_WARN if urgent else SeverityNumber.SEVERITY_NUMBER_INFO,
        severity_text="WARN" if urgent else "INFO",
        body=any_value(alert.text),
        attributes=key_values(_attributes(run_id, alert)),
        event_name=semantics.event_name(alert.kind, alert.change),
    )
    if traced_step is not None and alert.rank is not None:
        # That of the suspect's span in that step's trace, which has the same ids whoever sends it.
        in_trace = trace_id(run_id, alert.attempt, traced_step)
        record.trace_id = in_trace.to_bytes(16, "big")
        record.span_id = span_id(in_trace, alert.rank).to_bytes(8, "big")
        record.flags = _SAMPLED
    return item(record.SerializeToString())


def _attributes(run_id: str, alert: Alert) -> dict[str, Any]:
    of_hang = alert.kind == _KIND_OF_HANG
    found = {
        semantics.ALERT_UID: alert.id,
        semantics.ALERT_ABOUT: alert.about,
        semantics.RUN_ID: run_id,
        semantics.RESTART_COUNT: alert.attempt,
        semantics.RANK: alert.rank,
        semantics.RANKS: ranges(alert.ranks) or None,
        semantics.SUSPECT_HOST: alert.host or None,
        semantics.PHASE: alert.phase,
        semantics.SINCE_STEP: alert.since_step,
        semantics.UNTIL_STEP: alert.until_step,
        semantics.HANG_KIND if of_hang else semantics.STRAGGLER_CLASS: alert.cause or None,
        semantics.STRAGGLER_CAUSES: alert.because or None,
        semantics.STRAGGLER_SCOPE: alert.scope or None,
        semantics.STRAGGLER_COST: alert.cost_s,
        semantics.COST_SHARE: alert.cost_share,
        semantics.HANG_DURATION: alert.duration_s,
    }
    return {name: value for name, value in found.items() if value is not None}
