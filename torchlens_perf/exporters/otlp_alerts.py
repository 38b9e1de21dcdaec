"""Alerts as OpenTelemetry events: log records with a name, and a count of what was not delivered.

The SDK's side of logs is not stable: its exporters and records were renamed in 1.39. Only what 1.38 and later versions
have alike is used here, and an exporter's answer is known by its name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from opentelemetry import trace as trace_api
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from torchlens_perf.exporters import semantics
from torchlens_perf.exporters.otlp_resource import node_resource
from torchlens_perf.exporters.otlp_spans import span_id, trace_id
from torchlens_perf.rank_ranges import ranges
from torchlens_perf.version import VERSION

if TYPE_CHECKING:
    from opentelemetry._logs import Logger

    from torchlens_perf.alert import Alert
    from torchlens_perf.identity import Identity

logger = logging.getLogger("torchlens_perf.sidecar")

_KIND_OF_HANG = "hang"


class LogExporter(Protocol):
    """What the SDK's log exporters have in all versions."""

    def export(self, batch: Sequence[Any], /) -> Any: ...

    def shutdown(self) -> Any: ...


class AlertSender:
    """Feeds the SDK's batch processor with alerts, and counts what it could not deliver."""

    def __init__(self, exporter: LogExporter, rejected: Callable[[], int] = lambda: 0) -> None:
        """rejected: how many records the endpoint has rejected of those that the exporter could send.

        Raises ValueError if an OTEL_BLRP_* variable cannot be used.
        """
        self._rejected = rejected
        self._counter = _Counter(exporter)
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

    def force_flush(self) -> None:
        """Blocks until everything so far was delivered or has failed."""
        self._processor.force_flush()

    def shutdown(self) -> None:
        """As force_flush(), but gives up at the first batch that fails."""
        self._counter.ending = True
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def failed(self) -> int:
        """How many alerts the endpoint has not taken, without those that are on their way."""
        return self._counter.seen - self._counter.succeeded + self._rejected()

    def notes(self) -> list[str]:
        """What was not delivered; for the report."""
        undelivered = self._fed - self._counter.succeeded + self._rejected()
        if not undelivered:
            return []
        return [f"OTLP: {undelivered} of {self._fed} alerts were not delivered; the report has what they were about"]


class _Counter:
    """Passes records on and counts what became of them. On the processor's thread."""

    def __init__(self, exporter: LogExporter) -> None:
        self._exporter = exporter
        self._gave_up = False
        self.ending = False
        self.seen = 0
        self.succeeded = 0

    def export(self, batch: Sequence[Any]) -> Any:
        result, taken = None, False
        try:
            # At the end a dead endpoint costs one timeout, not one for each batch that is left.
            if not self._gave_up:
                result = self._exporter.export(batch)
                taken = result.name == "SUCCESS"
        finally:
            self.seen += len(batch)
            self.succeeded += len(batch) if taken else 0
            self._gave_up = self.ending and not taken
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True  # it holds nothing back


def _context(run_id: str, alert: Alert, traced_step: int | None) -> Context:
    """That of the suspect's span in that step's trace, which has the same ids whoever sends it."""
    if traced_step is None or alert.rank is None:
        return Context()
    in_trace = trace_id(run_id, alert.attempt, traced_step)
    span = SpanContext(
        in_trace, span_id(in_trace, alert.rank), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )
    return trace_api.set_span_in_context(NonRecordingSpan(span), Context())


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
