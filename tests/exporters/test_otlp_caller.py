"""Trace context of the job's caller: a span of the run in the caller's trace, and links."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from tests.exporters.test_exporters import assessment_of, batch_of, identity
from tests.support.otlp_collector import Collector, exporter_to
from tests.support.otlp_receiver import ReceivedSpan, Receiver
from tests.support.processes import run as run_process
from tests.support.recorded_run import TRACEPARENT, Sidecar
from torchlens_perf.errors import swallowed
from torchlens_perf.exporters import semantics
from torchlens_perf.exporters.delivery.local import build_message
from torchlens_perf.exporters.otlp_run_span import MAX_LINKS
from torchlens_perf.exporters.otlp_spans import parse_caller
from torchlens_perf.run.failure import Failure
from torchlens_perf.run.place.caller import read_calling_span
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.run_state import DiedEvidence, FailedEvidence

TRACE_ID, SPAN_ID = (int(part, 16) for part in TRACEPARENT.split("-")[1:3])
NOT_SAMPLED = TRACEPARENT[:-2] + "00"


def sent(
    traceparent: str,
    *,
    steps: int = 5,
    ended: bool = True,
    environ: dict[str, str] | None = None,
    collector: Collector | None = None,
    crash: Any = None,
    attempt: int = 0,
) -> list[ReceivedSpan]:
    """Return the spans of a run of two ranks whose steps are all traced."""
    traces = Collector("traces") if collector is None else collector
    exporter = exporter_to({"traces": traces}, environ)
    for rank in (0, 1):
        exporter.export(
            batch_of(identity(rank, traceparent=traceparent), range(steps), spans_a_step=0)
        )
    who = identity(0, attempt=attempt)
    exporter.on_assessment(dataclasses.replace(assessment_of(who=who), ended=ended, crash=crash))
    assert exporter.shutdown(20) == []
    return traces.spans()


def runs_of(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == semantics.SPAN_RUN]


def roots_of(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == semantics.SPAN_STEP]


@pytest.mark.distributed
def test_recorded_run_is_one_span_in_the_callers_trace(
    sidecar: Callable[..., Sidecar], receiver: Receiver
) -> None:
    """The span is as long as the run's steps and links to the traced ones.

    A replay sends the run's span with the same ids.
    """
    endpoint = receiver.endpoint("http/protobuf")
    sidecar(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    spans = receiver.spans()
    (run,) = runs_of(spans)
    roots = roots_of(spans)
    assert (run.trace_id, run.parent_id) == (TRACE_ID, SPAN_ID)
    assert set(run.links) == {(root.trace_id, root.span_id) for root in roots}
    assert run.start_ns == min(root.start_ns for root in roots)
    assert run.end_ns == max(root.end_ns for root in roots)
    assert run.attributes[semantics.RUN_STEPS] == len(roots)
    assert run.resource[semantics.RANK] == run.attributes[semantics.RANK] == 0
    assert {((TRACE_ID, SPAN_ID),)} == {root.links for root in roots}

    receiver.clear()
    sidecar(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    assert runs_of(receiver.spans()) == [run]


def test_steps_have_no_links_and_no_run_span_without_a_caller() -> None:
    """Each step is a trace."""
    spans = sent("")
    assert (runs_of(spans), {root.links for root in roots_of(spans)}) == ([], {()})


@pytest.mark.parametrize(
    "text", ["yesterday", TRACEPARENT[:-3], "00-" + "0" * 32 + "-b7ad6b7169203331-01"]
)
def test_invalid_traceparent_is_ignored_and_logged_once(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has one line for any number of ranks and steps."""
    parse_caller.cache_clear()
    with caplog.at_level(logging.WARNING):
        spans = sent(text)
    assert (runs_of(spans), {root.links for root in roots_of(spans)}) == ([], {()})
    assert len(roots_of(spans)) == 5
    (line,) = [
        record.getMessage() for record in caplog.records if "TRACEPARENT" in record.getMessage()
    ]
    assert text[:40] in line


def test_no_run_span_is_sent_if_the_callers_trace_is_not_sampled() -> None:
    """Steps are still sent as traces."""
    spans = sent(NOT_SAMPLED)
    assert runs_of(spans) == []
    assert {((TRACE_ID, SPAN_ID),)} == {root.links for root in roots_of(spans)}


@pytest.mark.parametrize(("sampler", "count"), [("always_off", 0), ("parentbased_always_off", 1)])
def test_sampler_of_the_environment_applies_to_the_run_span(
    sampler: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OTEL_TRACES_SAMPLER applies as to any other span with the same parent."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)  # The SDK reads the variable itself.
    spans = sent(TRACEPARENT, environ={"OTEL_TRACES_SAMPLER": sampler})
    assert [span.name for span in spans] == [semantics.SPAN_RUN] * count


def test_run_span_is_sent_after_the_ranks_have_ended() -> None:
    """If a sidecar ends before the ranks, the next sidecar sends the run's span."""
    assert runs_of(sent(TRACEPARENT, ended=False)) == []


def crash_of(kind: str, failure: Failure | None) -> Verdict:
    evidence = DiedEvidence(4, (), "h", None, by_oom_killer=False, ranks=(0,))
    found = FailedEvidence(failure, (), (), (), (), (), "h", None, 1, 1) if failure else evidence
    return Verdict(kind=kind, confidence=1.0, rank=0, evidence=found)


@pytest.mark.parametrize(
    ("changed", "error", "said", "event"),
    [
        (
            {},
            "ValueError",
            "ValueError: bad: Next: x",
            {"exception.type": "ValueError", "exception.message": "bad: Next: x"},
        ),
        ({"message": ""}, "ValueError", "ValueError", {"exception.type": "ValueError"}),
        ({"type": ""}, "failed", "bad: Next: x", {"exception.message": "bad: Next: x"}),
    ],
)
def test_run_span_of_a_failed_run_has_the_exception(
    changed: Any, error: str, said: str, event: dict[str, str]
) -> None:
    later_ns = 4_000_000_000_000_000_000
    failure: Any = {
        "type": "ValueError", "message": "bad: Next: x", "where": "", "step": 5, "phase": "", "module": "",
        "exit_code": None, "lost_peer": False, "after_watch": False, "unix_ns": later_ns, **changed,
    }  # fmt: skip
    (run,) = runs_of(sent(TRACEPARENT, crash=crash_of("failed", failure)))

    assert (run.status, run.status_text) == (
        "STATUS_CODE_ERROR",
        f"Rank 0 (h) failed in step 5: {said}.",
    )
    assert run.attributes[semantics.ERROR_TYPE] == error
    assert run.events == (("exception", later_ns, tuple(event.items())),)
    assert run.end_ns == later_ns


def test_run_span_of_a_killed_run_has_an_error_without_an_exception() -> None:
    (run,) = runs_of(sent(TRACEPARENT, crash=crash_of("died", None)))
    (before,) = runs_of(sent(TRACEPARENT, crash=crash_of("died", None), attempt=1))
    (well,) = runs_of(sent(TRACEPARENT))

    assert (run.status, run.attributes[semantics.ERROR_TYPE]) == ("STATUS_CODE_ERROR", "died")
    assert well.status in ("", "STATUS_CODE_UNSET")
    assert run.events == well.events == ()
    # The verdict is about the last attempt, in which rank 0 made no step.
    assert before.status == well.status


def test_number_of_links_of_a_long_run_is_bounded() -> None:
    """The span of the run links to the first steps and to some later ones."""
    (run,) = runs_of(sent(TRACEPARENT, steps=1000))
    assert len(set(run.links)) == len(run.links) <= MAX_LINKS
    assert len(run.links) > MAX_LINKS // 4


def test_run_span_has_the_tracestate_and_flags_of_the_caller() -> None:
    """The flags of OTLP mark the caller as remote."""
    traces = Collector("traces")
    exporter = exporter_to({"traces": traces})
    who = identity(0, traceparent=TRACEPARENT, tracestate="vendor=a1")
    exporter.export(batch_of(who, [0], spans_a_step=0))
    exporter.on_assessment(dataclasses.replace(assessment_of(), ended=True))
    exporter.shutdown(20)
    requests = (build_message("traces", items) for items in traces.taken)
    spans = [
        s
        for each in requests
        for of in each.resource_spans
        for inner in of.scope_spans
        for s in inner.spans
    ]
    by_name = {span.name: span for span in spans}
    run, link = by_name[semantics.SPAN_RUN], by_name[semantics.SPAN_STEP].links[0]
    assert (run.trace_state, run.flags, link.flags) == ("vendor=a1", 0x300, 0x300)


# -- in the training process


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("", "")),
        ({"TRACEPARENT": TRACEPARENT}, (TRACEPARENT, "")),
        ({"TRACEPARENT": TRACEPARENT, "TRACESTATE": "a=b"}, (TRACEPARENT, "a=b")),
        ({"TRACEPARENT": TRACEPARENT, "OTEL_PROPAGATORS": "b3, tracecontext"}, (TRACEPARENT, "")),
        ({"TRACEPARENT": TRACEPARENT, "OTEL_PROPAGATORS": "none"}, ("", "")),
    ],
)
def test_traceparent_of_the_environment_is_used_without_an_active_span(
    environ: dict[str, str], expected: tuple[str, str]
) -> None:
    """The propagators must include trace context."""
    assert read_calling_span(environ) == expected


def test_active_span_has_priority_over_the_environment() -> None:
    with TracerProvider().get_tracer("users").start_as_current_span("epoch"):
        found = trace.get_current_span().get_span_context()
        traceparent, _ = read_calling_span({"TRACEPARENT": TRACEPARENT, "TRACESTATE": "a=b"})
    context = parse_caller(traceparent)
    assert context is not None
    assert (context.trace_id, context.span_id) == (found.trace_id, found.span_id)
    assert context.trace_flags.sampled
    assert read_calling_span({"TRACEPARENT": TRACEPARENT}) == (TRACEPARENT, "")


def test_environment_is_used_if_the_opentelemetry_api_is_broken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training continues if the program's OpenTelemetry API is broken."""
    monkeypatch.delenv("TORCHLENS_PERF_RAISE", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", logging)
    assert read_calling_span({"TRACEPARENT": TRACEPARENT}) == (TRACEPARENT, "")
    assert "reading the active span" in caplog.text
    assert swallowed.by_place.pop("reading the active span") == 1


def test_opentelemetry_is_not_imported_into_a_program_that_does_not_use_it(
    tmp_path: object,
) -> None:
    code = (
        "import sys; from torchlens_perf.run.place.caller import read_calling_span; "
        f"assert read_calling_span({{'TRACEPARENT': '{TRACEPARENT}'}})[0]; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = run_process([sys.executable, "-c", code], tmp_path)  # type: ignore[arg-type]
    assert done.stdout.strip() == "[]", done.stderr
