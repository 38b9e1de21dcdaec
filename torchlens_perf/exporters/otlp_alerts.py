"""Alerts as OpenTelemetry events: log records with a name, and a count of what was not delivered.

The SDK's side of logs is not stable: its exporters and records were renamed in 1.39. Only what 1.38 and later versions
have alike is used here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

from torchlens_perf.exporters import semantics
from torchlens_perf.exporters.counting import BatchSender
from torchlens_perf.exporters.otlp_resource import node_resource
from torchlens_perf.exporters.otlp_spans import context_of, span_id, trace_id
from torchlens_perf.run.rank_ranges import ranges
from torchlens_perf.version import VERSION

if TYPE_CHECKING:
    from opentelemetry._logs import Logger

    from torchlens_perf.analysis.alerts.alert import Alert
    from torchlens_perf.run.identity import Identity

_KIND_OF_HANG = "hang"


class AlertSender(BatchSender):
    """Feeds the SDK's batch processor with alerts, and counts what it could not deliver."""

    def __init__(self, exporter: Any, rejected: Callable[[], int] = lambda: 0) -> None:
        """exporter: the SDK's, whose type has another name from 1.39 on. rejected: how many records the endpoint has
        rejected of those that the exporter could send.

        Raises ValueError if an OTEL_BLRP_* variable cannot be used.
        """
        super().__init__(exporter, "alerts", rejected)
        self._processor = BatchLogRecordProcessor(self._counter)  # type: ignore[arg-type]
        self._logger: Logger | None = None
        self._fed = 0

    def send(self, alert: Alert, identity: Identity, traced_step: int | None) -> None:
        """Takes an alert over. identity: of a process of this node. traced_step: of its steps, one sent as spans."""
        if self._logger is None:
            provider = LoggerProvider(node_resource(identity), shutdown_on_exit=False)
            provider.add_log_record_processor(self._processor)
            self._logger = provider.get_logger(semantics.SCOPE, VERSION)
        self._fed += 1
        self._logger.emit(
            LogRecord(
                timestamp=alert.unix_ns,
                observed_timestamp=alert.unix_ns,
                context=_context(identity.run_id, alert, traced_step),
                severity_number=SeverityNumber.WARN if alert.urgent else SeverityNumber.INFO,
                severity_text="WARN" if alert.urgent else "INFO",
                body=alert.text,
                attributes=_attributes(identity.run_id, alert),
                event_name=semantics.event_name(alert.kind, alert.change),
            )
        )

    def failed(self) -> int:
        """How many alerts the endpoint has not taken, without those that are on their way."""
        return self._counter.seen - self._counter.succeeded + self._rejected()

    def notes(self) -> list[str]:
        undelivered = self._fed - self._counter.succeeded + self._rejected()
        if not undelivered:
            return []
        return [f"OTLP: {undelivered} of {self._fed} alerts were not delivered; the report has what they were about"]


def _context(run_id: str, alert: Alert, traced_step: int | None) -> Context:
    """That of the suspect's span in that step's trace, which has the same ids whoever sends it."""
    if traced_step is None or alert.rank is None:
        return Context()
    in_trace = trace_id(run_id, alert.attempt, traced_step)
    return context_of(in_trace, span_id(in_trace, alert.rank))


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
