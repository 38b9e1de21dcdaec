"""Export what was sent as OpenTelemetry events, if the usual variables name an endpoint."""

from __future__ import annotations

import os
import time

from torchlens_perf.actions.nodes import NamedNode
from torchlens_perf.exporters import semantics
from torchlens_perf.exporters.otlp_resource import SCOPE
from torchlens_perf.run.rank_ranges import format_ranges

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT")
EVENT = "torch.train.action"
TARGET, STATE, ANSWER = (
    "torch.train.action.target",
    "torch.train.action.state",
    "torch.train.action.answer",
)


def export_outcome(node: NamedNode, target: str, state: str, answer: str) -> None:
    """Send one event, and wait for its delivery. The SDK logs it if the endpoint does not answer."""
    if not any(map(os.environ.get, _ENDPOINTS)) or os.environ.get("OTEL_SDK_DISABLED") == "true":
        return
    from opentelemetry._logs import LogRecord, SeverityNumber
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor

    provider = LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(OTLPLogExporter()))
    provider.get_logger(SCOPE.name, SCOPE.version).emit(
        LogRecord(
            timestamp=time.time_ns(),
            severity_text="WARN",
            severity_number=SeverityNumber.WARN,
            body=node.reason,
            event_name=EVENT,
            attributes={
                semantics.RUN_ID: node.run,
                semantics.SUSPECT_HOST: node.host,
                semantics.RANKS: format_ranges(node.ranks),
                semantics.COST_SHARE: node.cost_share,
                TARGET: target,
                STATE: state,
                ANSWER: answer,
            },
        )
    )
    provider.shutdown()
