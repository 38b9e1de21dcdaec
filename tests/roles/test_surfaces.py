"""One cost and one part of an iteration have the same number on all surfaces."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from tests.exporters.test_exporters import assessment_of, batch_of, identity
from tests.roles.test_report import RECORDED, report_on
from tests.support.otlp_environment import exporter_for
from tests.support.otlp_receiver import ReceivedSpan, Receiver
from tests.support.reports import as_json
from torchlens_perf.exporters import ExportBatch, semantics
from torchlens_perf.exporters import Receiver as TraceReceiver
from torchlens_perf.exporters.otlp_spans import step_trace_id
from torchlens_perf.query.engine import run_query
from torchlens_perf.roles import table
from torchlens_perf.roles.evidence import describe_iterations
from torchlens_perf.roles.lanes import draw_lanes
from torchlens_perf.roles.table import read_events
from torchlens_perf.roles.traces import BATCH, OUTPUT_TOKENS, SPAN_ITERATION, IterationTraces
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.view.tables import build_tables
from torchlens_perf.view.terminal import render_full

FAULT, COST, MEAN = "slow_engine", "578 ms (45%)", "1.29 s"


@pytest.fixture(scope="module")
def report() -> Any:
    return report_on(FAULT)


def test_cost_is_the_same_in_report_json_page_and_top(report: Any) -> None:
    cause = as_json(report)["iterations"]["causes"][0]
    assert f"{1e3 * cause['seconds'] / as_json(report)['iterations']['count']:.0f} ms" in COST
    # The terminal breaks lines. Pages have the same sentence.
    text = re.sub(r"\s+", " ", render_full(report, "run", columns=100, color=False))
    assert f"an iteration of {MEAN} would be {COST} shorter" in text
    assert describe_iterations(report)[1] == f"largest cause: slow engine engine-1, {COST}"
    assert describe_iterations(report)[0].startswith(f"iteration of {MEAN} (mean of 7)")


def test_lanes_and_tables_have_the_times_of_the_report(report: Any) -> None:
    found = report["iterations"]
    assert [each.key for each in build_tables(report)][:2] == ["iterations", "iteration_changes"]
    assert {each.kind for each in found.lanes} == {"typical", "slowest"}
    for each in found.lanes:
        assert f"({each.seconds:.2f} s)" in draw_lanes(each)[0]
        assert sum(part.end_s - part.begin_s for part in each.path) == pytest.approx(each.seconds)


def test_queries_have_the_numbers_of_the_report(report: Any) -> None:
    found = report["iterations"]
    sql = (
        "SELECT count(*), avg(seconds), avg(steps_s), avg(weights_s), avg(other_s) FROM iterations"
    )
    ((count, *means),) = run_query(sql, [str(RECORDED / FAULT)], []).rows
    assert count == found.count
    parts = [found.parts.get(each, 0.0) for each in ("steps", "weights", "other")]
    assert means == pytest.approx([found.mean_s, *parts])
    sql = "SELECT engine, count(*), sum(tokens) FROM samples GROUP BY engine ORDER BY engine"
    assert run_query(sql, [str(RECORDED / FAULT)], []).rows == [
        (each.name, each.samples, each.tokens) for each in found.engines
    ]


def test_query_of_both_tables_reads_the_events_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    original = table.read_events
    monkeypatch.setattr(table, "read_events", lambda *args: read.append(args) or original(*args))
    sql = "SELECT iterations.batch, count(*) FROM iterations JOIN samples USING (batch) GROUP BY 1"
    found = run_query(sql, [str(RECORDED / FAULT)], []).rows

    assert len(found) == 7
    assert len(read) == 1


def sent_traces(receiver: Receiver) -> dict[int, list[ReceivedSpan]]:
    """Send the iterations of the recorded job. Return the received spans by trace."""
    exporter = exporter_for(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint("http/protobuf"),
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        }
    )
    events = read_events(RunDirectory(RECORDED / FAULT), []).events
    traces = IterationTraces([exporter])
    batch = batch_of(identity(), [3])
    first = next(each for each in events if each.name == "steps_begin" and each.batch == "2")
    (step,) = batch.traces
    # It begins with the wait for the samples, and lasts 6 ms.
    at_ns = round(first.time_s * 1e9) - 3_000_000
    traces.export(
        ExportBatch(
            batch.identity, batch.anchor, batch.steps, (dataclasses.replace(step, start_ns=at_ns),)
        )
    )
    # The second half of the events arrives later.
    traces.add(events[:500])
    traces.add(events[500:])
    for _ in range(2):
        traces.on_assessment(dataclasses.replace(assessment_of(), ended=True))
    assert not exporter.shutdown(10)
    found: dict[int, list[ReceivedSpan]] = {}
    for each in receiver.spans():
        found.setdefault(each.trace_id, []).append(each)
    return found


def test_each_iteration_is_one_trace_of_its_critical_path(report: Any, receiver: Receiver) -> None:
    traces = sent_traces(receiver)
    # The report leaves out the first iteration.
    assert len(traces) == report["iterations"].count + 1
    sums: dict[str, float] = {}
    for spans in traces.values():
        (root,) = (each for each in spans if each.parent_id is None)
        assert root.name == SPAN_ITERATION
        children = [each for each in spans if each is not root]
        assert {each.parent_id for each in children} == {root.span_id}
        assert sum(each.duration_ns for each in children) == pytest.approx(root.duration_ns, abs=99)
        if root.attributes[BATCH] != "0":
            for each in spans:
                sums[each.name] = sums.get(each.name, 0.0) + each.duration_ns / 1e9
        (generation,) = (each for each in children if each.name == "generation")
        assert 0 < generation.attributes[OUTPUT_TOKENS] < root.attributes[OUTPUT_TOKENS]
        assert generation.attributes["torch.train.process"].startswith("engine-")
        linked = [each.name for each in spans if each.links]
        assert linked == [SPAN_ITERATION, "steps"] * (root.attributes[BATCH] == "2")
        for each in spans:
            assert each.attributes[semantics.RUN_ID] == identity().run_id
            if each.links:
                ((in_trace, _),) = each.links
                assert in_trace == step_trace_id(identity().run_id, identity().attempt, 3)
    found = report["iterations"]
    assert sums.pop(SPAN_ITERATION) / found.count == pytest.approx(found.mean_s, rel=1e-6)
    means = {name: seconds / found.count for name, seconds in sums.items()}
    assert means == pytest.approx(found.parts, abs=1e-7)


def test_iteration_is_sent_after_the_traces_of_its_steps(report: Any) -> None:
    """The trace of a later step, or the second assessment after the end, sends an iteration."""
    sent: list[str] = []

    class Spans(TraceReceiver):
        def send_spans(self, spans: Any) -> None:
            sent.append(spans[0].attributes[BATCH])

    events = read_events(RunDirectory(RECORDED / FAULT), []).events
    traces, batch = IterationTraces([Spans()]), batch_of(identity(), [3])
    traces.export(batch)
    traces.add(events)
    assert sent == []
    (end,) = (each for each in events if each.name == "weights_publish_end" and each.batch == "2")
    late = dataclasses.replace(batch.traces[0], start_ns=round(end.time_s * 1e9))
    traces.export(dataclasses.replace(batch, traces=(late,)))
    traces.add(())
    assert sent == ["0", "1", "2"]
    ended = dataclasses.replace(assessment_of(), ended=True)
    traces.on_assessment(ended)
    assert sent == ["0", "1", "2"]
    traces.on_assessment(ended)
    assert sent == [str(each) for each in range(report["iterations"].count + 1)]
