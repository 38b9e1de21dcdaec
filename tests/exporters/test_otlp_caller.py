"""A trace that was handed over when the job started: the run's span in it, and steps' links to it."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable

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
from torchlens_perf.exporters.delivery.otlp_requests import message
from torchlens_perf.exporters.otlp_caller import caller
from torchlens_perf.exporters.otlp_run_span import MAX_LINKS
from torchlens_perf.run.place.caller import calling_span

TRACE_ID, SPAN_ID = (int(part, 16) for part in TRACEPARENT.split("-")[1:3])
NOT_SAMPLED = TRACEPARENT[:-2] + "00"


def sent(
    traceparent: str,
    *,
    steps: int = 5,
    ended: bool = True,
    environ: dict[str, str] | None = None,
    collector: Collector | None = None,
) -> list[ReceivedSpan]:
    """The spans of a run of two ranks, all of whose steps are traced."""
    traces = Collector("traces") if collector is None else collector
    exporter = exporter_to({"traces": traces}, environ)
    for rank in (0, 1):
        exporter.export(batch_of(identity(rank, traceparent=traceparent), range(steps), spans_a_step=0))
    exporter.on_assessment(dataclasses.replace(assessment_of(), ended=ended))
    assert exporter.shutdown(20) == []
    return traces.spans()


def runs_of(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == semantics.SPAN_RUN]


def roots_of(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == semantics.SPAN_STEP]


@pytest.mark.distributed
def test_run_below_the_caller(sidecar: Callable[..., Sidecar], receiver: Receiver) -> None:
    """A recorded run has one span in the caller's trace, as long as its steps, with links to each that was sent; a
    replay sends it with the same ids."""
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


def test_without_a_caller() -> None:
    """Steps are traces without links, and nothing else is sent."""
    spans = sent("")
    assert (runs_of(spans), {root.links for root in roots_of(spans)}) == ([], {()})


@pytest.mark.parametrize("text", ["yesterday", TRACEPARENT[:-3], "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
def test_malformed(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is as if there were none, and one line says so, whatever the number of ranks and steps."""
    caller.cache_clear()
    with caplog.at_level(logging.WARNING):
        spans = sent(text)
    assert (runs_of(spans), {root.links for root in roots_of(spans)}) == ([], {()})
    assert len(roots_of(spans)) == 5
    (line,) = [record.getMessage() for record in caplog.records if "TRACEPARENT" in record.getMessage()]
    assert text[:40] in line


def test_not_sampled() -> None:
    """The caller's trace is not kept, so the run's span would hang in the air. Steps are traces of their own."""
    spans = sent(NOT_SAMPLED)
    assert runs_of(spans) == []
    assert {((TRACE_ID, SPAN_ID),)} == {root.links for root in roots_of(spans)}


@pytest.mark.parametrize(("sampler", "count"), [("always_off", 0), ("parentbased_always_off", 1)])
def test_sampler(sampler: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_TRACES_SAMPLER decides on the run's span as on any span with that parent."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)  # the SDK reads it
    spans = sent(TRACEPARENT, environ={"OTEL_TRACES_SAMPLER": sampler})
    assert [span.name for span in spans] == [semantics.SPAN_RUN] * count


def test_no_run_span_while_ranks_run() -> None:
    """A sidecar that ends before the ranks leaves the run's span to the one that is started next."""
    assert runs_of(sent(TRACEPARENT, ended=False)) == []


def test_links_are_bounded() -> None:
    """A long run has links to its first steps and to some of the later ones."""
    (run,) = runs_of(sent(TRACEPARENT, steps=1000))
    assert len(set(run.links)) == len(run.links) <= MAX_LINKS
    assert len(run.links) > MAX_LINKS // 4


def test_state_and_flags() -> None:
    """TRACESTATE goes with the run's span, and OTLP's flags say that the caller is remote."""
    traces = Collector("traces")
    exporter = exporter_to({"traces": traces})
    who = identity(0, traceparent=TRACEPARENT, tracestate="vendor=a1")
    exporter.export(batch_of(who, [0], spans_a_step=0))
    exporter.on_assessment(dataclasses.replace(assessment_of(), ended=True))
    exporter.shutdown(20)
    requests = (message("traces", items) for items in traces.taken)
    spans = [s for each in requests for of in each.resource_spans for inner in of.scope_spans for s in inner.spans]
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
def test_environment(environ: dict[str, str], expected: tuple[str, str]) -> None:
    """Without an active span, what the environment says; unless its propagators leave trace context out."""
    assert calling_span(environ) == expected


def test_active_span() -> None:
    """The program's own active span is nearer than the environment's."""
    with TracerProvider().get_tracer("users").start_as_current_span("epoch"):
        found = trace.get_current_span().get_span_context()
        traceparent, _ = calling_span({"TRACEPARENT": TRACEPARENT, "TRACESTATE": "a=b"})
    context = caller(traceparent)
    assert context is not None
    assert (context.trace_id, context.span_id) == (found.trace_id, found.span_id)
    assert context.trace_flags.sampled
    assert calling_span({"TRACEPARENT": TRACEPARENT}) == (TRACEPARENT, "")


def test_a_broken_api_is_no_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a program has under that name: the environment counts, and training goes on."""
    monkeypatch.delenv("TORCHLENS_PERF_RAISE", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", logging)
    assert calling_span({"TRACEPARENT": TRACEPARENT}) == (TRACEPARENT, "")
    assert "reading the active span" in caplog.text
    assert swallowed.by_place.pop("reading the active span") == 1


def test_nothing_is_imported(tmp_path: object) -> None:
    """A program that has no spans of its own does not get OpenTelemetry's API by us."""
    code = (
        "import sys; from torchlens_perf.run.place.caller import calling_span; "
        f"assert calling_span({{'TRACEPARENT': '{TRACEPARENT}'}})[0]; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = run_process([sys.executable, "-c", code], tmp_path)  # type: ignore[arg-type]
    assert done.stdout.strip() == "[]", done.stderr
