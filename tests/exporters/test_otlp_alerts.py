"""Delivery of alerts and gauges to a real receiver, and behaviour if the endpoint is down."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import grpc
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsPartialSuccess,
    ExportLogsServiceResponse,
)

from tests.exporters.test_exporters import batch_of, identity
from tests.support.endpoints import answering, grpc_answering, refusing, serving, silent
from tests.support.findings import PLACES, episode, findings, hang
from tests.support.otlp_receiver import ReceivedEvent, Receiver
from tests.support.processes import ROOT
from tests.support.servers import wait_for
from torchlens_perf.exporters import Assessment, Exporter, semantics
from torchlens_perf.exporters.otlp_environment import create_exporter_from_environment
from torchlens_perf.exporters.otlp_spans import span_id_of_path, step_trace_id
from torchlens_perf.verdicts.finding_log import FindingLog
from torchlens_perf.verdicts.stragglers.findings import Findings

pytestmark = pytest.mark.distributed

HTTP = "http/protobuf"
ENDPOINT, PROTOCOL = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"
Make = Callable[..., Exporter]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that creates the exporter for the given variables, as the sidecar does."""

    def make(**told: str) -> Exporter:
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        made = create_exporter_from_environment()
        assert made is not None
        return made

    return make


def judge(exporter: Exporter, log: FindingLog, found: Findings, hung: dict | None = None) -> int:
    """Assess the job once, as the sidecar does, and return the number of alerts."""
    alerts = log.record_changes(0, found, hung, PLACES, time.time_ns())
    exporter.on_assessment(Assessment(identity(), found, hung, alerts))
    return len(alerts)


def a_run(exporter: Exporter) -> int:
    """Assess a job with a slow rank and a hang, which both end. Return the number of alerts."""
    log, slow = FindingLog("run"), episode()
    exporter.export(batch_of(identity(), [100, 110]))
    count = judge(exporter, log, findings(slow))
    slow = dataclasses.replace(slow, until_step=180)
    for hung in (None, hang(), None):
        count += judge(exporter, log, findings(slow), hung)
    return count


@pytest.mark.parametrize("protocol", [HTTP, "grpc"])
def test_each_alert_arrives_as_one_event_with_its_attributes(
    receiver: Receiver, exporter: Make, protocol: str
) -> None:
    """The event also has the resource and the trace of the alert."""
    sender = exporter(**{ENDPOINT: receiver.endpoint(protocol), PROTOCOL: protocol})
    began_ns = time.time_ns()
    assert a_run(sender) == 4
    assert sender.shutdown(10) == []
    events = receiver.events()
    started, ended = events[:2]

    assert [(event.name, event.severity) for event in events] == [
        ("torch.train.straggler.started", "WARN SEVERITY_NUMBER_WARN"),
        ("torch.train.straggler.ended", "INFO SEVERITY_NUMBER_INFO"),
        ("torch.train.hang.started", "WARN SEVERITY_NUMBER_WARN"),
        ("torch.train.hang.ended", "INFO SEVERITY_NUMBER_INFO"),
    ]
    assert started.body.startswith(
        "Rank 3 (node-a) is slow in the backward pass: it computes 80.0 ms per step, the other"
        " ranks 60.0"
    )
    assert "Next:" in started.body
    assert all(began_ns <= event.time_ns <= time.time_ns() for event in events)
    assert (started.attributes[semantics.RANK], started.attributes[semantics.PHASE]) == (
        3,
        "backward",
    )
    assert (
        started.attributes[semantics.STRAGGLER_COST],
        ended.attributes[semantics.UNTIL_STEP],
    ) == (0.015, 180)
    assert len({event.attributes[semantics.ALERT_UID] for event in events}) == 4
    assert len({event.attributes[semantics.ALERT_ABOUT] for event in events}) == 2
    assert started.resource[semantics.RUN_ID] == "run"
    assert started.resource["service.instance.id"] == "node-a/node"
    assert started.scope.startswith("torchlens_perf ")
    in_trace = step_trace_id("run", 0, 100)
    assert (started.trace_id, started.span_id) == (in_trace, span_id_of_path(in_trace, 3))
    assert in_trace in {span.trace_id for span in receiver.spans()}
    assert [event.trace_id for event in events[2:]] == [0, 0], "a step that hangs has no span"


def test_replayed_alert_events_have_the_same_ids(receiver: Receiver, exporter: Make) -> None:
    def ids(events: list[ReceivedEvent]) -> list[str]:
        return [str(event.attributes[semantics.ALERT_UID]) for event in events]

    sent = []
    for _ in range(2):
        receiver.clear()
        sender = exporter(OTEL_EXPORTER_OTLP_LOGS_ENDPOINT=f"{receiver.endpoint(HTTP)}/v1/logs")
        a_run(sender)
        assert sender.shutdown(10) == []
        sent.append(ids(receiver.events()))
    assert sent[0] == sent[1]
    assert len(set(sent[0])) == 4


def test_alerts_are_sent_after_the_delay_while_the_job_runs(
    receiver: Receiver, exporter: Make
) -> None:
    """OTEL_BLRP_SCHEDULE_DELAY sets the delay."""
    sender = exporter(**{ENDPOINT: receiver.endpoint(HTTP), "OTEL_BLRP_SCHEDULE_DELAY": "50"})
    judge(sender, FindingLog("run"), findings(episode()))
    assert wait_for(receiver.events, 10)
    assert sender.shutdown(10) == []


@pytest.mark.parametrize("protocol", [HTTP, "grpc"])
def test_current_problems_arrive_as_gauges(
    receiver: Receiver, exporter: Make, protocol: str
) -> None:
    """Gauges allow alert rules without logs."""
    sender = exporter(
        **{ENDPOINT: receiver.endpoint(protocol), PROTOCOL: protocol, "OTEL_LOGS_EXPORTER": "none"}
    )
    judge(sender, FindingLog("run"), findings(episode()), hang(since_s=12))
    assert sender.shutdown(10) == []
    found = {
        (point.metric, point.unit, *point.attributes.values()): point.value
        for point in receiver.points()
        if point.form == "gauge"
    }
    assert found.pop((semantics.HANG_DURATION, "s", "missing")) >= 12
    assert found == {
        (semantics.STRAGGLER_COST, "s", 3, "backward"): 0.015,
        (semantics.STRAGGLERS, "{rank}", "slow_compute"): 1,
        (semantics.STRAGGLERS, "{rank}", "slow_data"): 0,
        (semantics.STRAGGLERS, "{rank}", "slow_host"): 0,
        (semantics.STRAGGLERS, "{rank}", "more_work"): 0,
        (semantics.DETECTABLE, "s"): 0.003,
    }
    assert receiver.events() == []


_PRINTED = """
import os
from tests.support.findings import episode, findings
from tests.exporters.test_otlp_alerts import judge
from torchlens_perf.verdicts.finding_log import FindingLog
from torchlens_perf.exporters.otlp_environment import create_exporter_from_environment
exporter = create_exporter_from_environment()
judge(exporter, FindingLog("run"), findings(episode()))
exporter.shutdown(10)
"""


def test_console_exporter_prints_events_without_an_endpoint() -> None:
    """OTEL_LOGS_EXPORTER=console enables the exporter."""
    told = {"OTEL_LOGS_EXPORTER": "console", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _PRINTED],
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Rank 3 (node-a) is slow in the backward pass" in done.stdout
    assert "log.record.uid" in json.loads(done.stdout)["attributes"]


DOWN: dict[str, tuple[Callable[[], AbstractContextManager[str]], str]] = {
    "refused": (refusing, HTTP),
    "silent": (silent, HTTP),
    "503": (lambda: serving(answering(503)), HTTP),
    "404": (lambda: serving(answering(404)), HTTP),
    "web page": (lambda: serving(answering(200, b"<html>", Content_Type="text/html")), HTTP),
    "grpc refused": (refusing, "grpc"),
    "grpc silent": (silent, "grpc"),
    "grpc knows no logs": (lambda: grpc_answering(grpc.StatusCode.OK), "grpc"),
}


@pytest.mark.parametrize("fault", DOWN)
def test_undelivered_alerts_are_counted_if_the_endpoint_is_down(exporter: Make, fault: str) -> None:
    """Alerts are accepted at once, and shutdown is in time."""
    context, protocol = DOWN[fault]
    with context() as address:
        sender = exporter(
            **{ENDPOINT: address, PROTOCOL: protocol, "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
               "OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"},
        )  # fmt: skip
        log = FindingLog("run")
        started_s = time.monotonic()
        for count in range(1, 201):
            judge(sender, log, findings(*(episode(3, since) for since in range(count))))
        judged_s = time.monotonic() - started_s
        notes = sender.shutdown(3)
        took_s = time.monotonic() - started_s
    assert notes[0] == "OTLP: 200 of 200 alerts were not delivered"
    # shutdown() limits the time of all requests together. Each request may take a second.
    assert took_s - judged_s < 5


def test_events_rejected_in_a_successful_response_count_as_undelivered(exporter: Make) -> None:
    answer = ExportLogsServiceResponse(
        partial_success=ExportLogsPartialSuccess(rejected_log_records=1)
    )
    with serving(
        answering(200, answer.SerializeToString(), Content_Type="application/x-protobuf")
    ) as address:
        sender = exporter(OTEL_EXPORTER_OTLP_LOGS_ENDPOINT=address)
        judge(sender, FindingLog("run"), findings(episode(1), episode(2)))
        notes = sender.shutdown(10)
    assert notes == [
        "OTLP: 1 of 2 alerts were not delivered",
        "OTLP: 1 of these alerts were rejected by the endpoint",
    ]


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_invalid_event_setting_is_logged_and_the_default_is_used(
    receiver: Receiver, exporter: Make, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    """The settings are OTEL_BLRP_*."""
    sender = exporter(
        **{ENDPOINT: receiver.endpoint(HTTP), "OTEL_BLRP_MAX_EXPORT_BATCH_SIZE": value}
    )
    assert "OTEL_BLRP_MAX_EXPORT_BATCH_SIZE" in caplog.text
    a_run(sender)
    assert sender.shutdown(10) == []
    assert all((receiver.spans(), receiver.points(), receiver.events()))
