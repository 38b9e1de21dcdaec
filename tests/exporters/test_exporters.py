"""Exporters without a network: spans, ids, metrics, alerts, and rules for every exporter."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource

from tests.support.findings import PLACES, episode, findings, hang, shared
from tests.support.in_memory import InMemoryExporter
from tests.support.otlp_collector import Collector, exporter_to
from tests.support.otlp_receiver import ReceivedPoint
from tests.support.processes import ROOT
from tests.support.tables import MS, step_table
from torchlens_perf.config import Config
from torchlens_perf.diagnosis.utilization import StepFlops
from torchlens_perf.errors import RAISE, swallowed
from torchlens_perf.exporters import (
    FIRST_TRACED_STEPS,
    Assessment,
    ExportBatch,
    Exporter,
    NodeRole,
    semantics,
)
from torchlens_perf.exporters.otlp_metrics import NodeMetrics
from torchlens_perf.exporters.otlp_resource import build_node_resource, build_rank_resource
from torchlens_perf.exporters.otlp_spans import (
    SpanBuilder,
    find_parents,
    span_id_of_path,
    step_trace_id,
)
from torchlens_perf.exporters.series_room import max_ranks_with_own_series
from torchlens_perf.run.clock import HostClock
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.records import Span, StepTrace
from torchlens_perf.run.ring import Flag
from torchlens_perf.store.segments import SPANS
from torchlens_perf.verdicts.causes.straggler_groups import add_straggler_groups
from torchlens_perf.verdicts.finding_log import FindingLog
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings, count_stragglers_by_class

MAX_RANK_SERIES = max_ranks_with_own_series(NodeRole().max_series)
OTHER_THREAD = int(Flag.OTHER_THREAD)


def identity(rank: int = 0, **changed: Any) -> Identity:
    """Return the identity of a rank."""
    values: dict[str, Any] = {
        "run_id": "run", "rank": rank, "local_rank": rank, "world_size": 2, "local_world_size": 2, "attempt": 0,
        "host": "node-a", "pid": 4711, "process_started": 1, "launcher_pid": 1, "elastic": False,
        "program": "train.py", "traceparent": "", "attributes": {},
    }  # fmt: skip
    return Identity(**{**values, **changed})


def span(
    start_ns: int,
    duration_ns: int,
    depth: int = 1,
    flags: int = 0,
    name: str = "",
    kind: str = "module",
) -> Span:
    """Return a span."""
    return Span(kind, name, 0, start_ns, duration_ns, depth, flags, 0, 0)


def batch_of(who: Identity, steps: Sequence[int], spans_a_step: int = 3) -> ExportBatch:
    """Return steps of a rank. Each step has its own span and the given number of other spans."""
    spans = tuple(span(index, 1, name=f"layer{index}") for index in range(spans_a_step))
    table = step_table(
        [{"forward": 5, "communication": 1}] * len(steps), first_step=steps[0], memory=1000
    )
    traces = tuple(StepTrace(step, 0, 6 * MS, 0, spans) for step in steps)
    return ExportBatch(who, HostClock().anchor(), table, traces)


def assessment_of(
    found: Findings = NOTHING,
    log: FindingLog | None = None,
    hung: dict[str, Any] | None = None,
    who: Identity | None = None,
    whole_job: bool = True,
) -> Assessment:
    """Return an assessment of the job.

    If a log is given, its new alerts are included.
    """
    alerts = (
        log.record_changes(0, found, hung, PLACES, 1_700_000_000_000_000_000)
        if log is not None
        else ()
    )
    return Assessment(
        who or identity(), add_straggler_groups(found, PLACES), hung, alerts, whole_job
    )


# -- nesting of spans


def contains(outer: Span, inner: Span) -> bool:
    """Return True if a span can be another's parent."""
    in_time = outer.start_ns <= inner.start_ns
    in_time = in_time and inner.start_ns + inner.duration_ns <= outer.start_ns + outer.duration_ns
    return in_time and not (outer.flags & OTHER_THREAD and not inner.flags & OTHER_THREAD)


intervals = st.builds(
    span,
    start_ns=st.integers(0, 30),
    duration_ns=st.integers(0, 20),
    depth=st.integers(1, 3),
    flags=st.sampled_from([0, OTHER_THREAD]),
)


@given(st.lists(intervals, max_size=12))
def test_parent_is_the_smallest_span_that_contains_its_child(spans: list[Span]) -> None:
    """The parent precedes the child."""
    nested = find_parents(spans)
    assert Counter(spans) == Counter(each for each, _ in nested)
    for index, (each, parent) in enumerate(nested):
        around = [
            other
            for place, (other, _) in enumerate(nested)
            if place != index
            and contains(other, each)
            and (place < index or other.duration_ns > each.duration_ns)
        ]
        if parent is None:
            assert around == []
        else:
            assert parent < index
            assert contains(nested[parent][0], each)
            assert min(other.duration_ns for other in around) == nested[parent][0].duration_ns


@st.composite
def call_trees(draw: st.DrawFn) -> list[tuple[Span, int]]:
    """Draw calls of one thread in the order of their ends, each with its caller's index or -1."""
    calls: list[tuple[Span, int]] = []
    clock, names = 0, iter(range(1000))

    def call(depth: int, caller: int) -> None:
        nonlocal clock
        name, start_ns = next(names), clock
        clock += 1
        for _ in range(draw(st.integers(0, 3)) if depth < 4 else 0):
            call(depth + 1, name)
        clock += 1
        calls.append((span(start_ns, clock - start_ns, depth, name=str(name)), caller))

    for _ in range(draw(st.integers(1, 3))):
        call(1, -1)
    return calls


@given(call_trees())
def test_parent_of_a_span_of_one_thread_is_its_caller(calls: list[tuple[Span, int]]) -> None:
    nested = find_parents([each for each, _ in calls])
    found = {
        each.name: "-1" if parent is None else nested[parent][0].name for each, parent in nested
    }
    assert {each.name: str(caller) for each, caller in calls} == found


def test_first_opened_of_two_equal_spans_is_the_parent() -> None:
    """Both spans have the same times."""
    inner, outer = span(0, 5, depth=2, name="inner"), span(0, 5, depth=1, name="outer")
    assert find_parents([inner, outer]) == [(outer, None), (inner, 0)]


# -- ids of spans


def test_ids_of_spans_equal_their_pinned_values() -> None:
    """Ids are the first bytes of `printf RUN/0/7 | sha256sum`, and must never change."""
    in_trace = step_trace_id("20261121-093000-cafe0123", 0, 7)
    assert f"{in_trace:032x}" == "5677985fb49f873b8ee55b8c393f52ef"
    assert f"{span_id_of_path(in_trace, 1, 3):016x}" == "bda21ad76c4b1a30"
    assert f"{span_id_of_path(in_trace, 'root'):016x}" == "4438057ff3978638"


def test_span_ids_differ_by_run_attempt_step_rank_and_position() -> None:
    traces = {
        step_trace_id(run, attempt, step)
        for run in "ab"
        for attempt in range(3)
        for step in range(100)
    }
    assert len(traces) == 600
    spans = {
        span_id_of_path(in_trace, rank, index)
        for in_trace in list(traces)[:5]
        for rank in range(8)
        for index in range(50)
    }
    assert len(spans) == 2000


# -- resources


@pytest.mark.parametrize(
    ("who", "environ", "expected"),
    [
        (identity(), {}, "train"),
        (identity(program="launch.sh"), {}, "launch.sh"),
        (identity(program="analysis.ipynb"), {}, "analysis"),
        (identity(attributes={"slurm.job.name": "llama"}), {}, "llama"),
        (identity(), {"OTEL_RESOURCE_ATTRIBUTES": "service.name=told"}, "told"),
        (identity(attributes={"slurm.job.name": "llama"}), {"OTEL_SERVICE_NAME": "mine"}, "mine"),
        (
            identity(),
            {"OTEL_RESOURCE_ATTRIBUTES": "service.name=told", "OTEL_SERVICE_NAME": "mine"},
            "mine",
        ),
    ],
)
def test_service_name_comes_from_environment_then_job_then_script(
    monkeypatch: pytest.MonkeyPatch, who: Identity, environ: dict[str, str], expected: str
) -> None:
    """In the environment, OTEL_SERVICE_NAME comes before OTEL_RESOURCE_ATTRIBUTES."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert build_rank_resource(who).attributes["service.name"] == expected
    assert build_node_resource(who).attributes["service.name"] == expected


def test_replay_without_the_nodes_state_file_omits_unknown_attributes() -> None:
    """Attributes that OpenTelemetry requires are sent with the value "unknown"."""
    attributes = build_rank_resource(identity(program="", pid=0)).attributes
    assert "process.pid" not in attributes
    assert str(attributes["service.name"]).startswith("unknown_service")


def test_resource_of_node_metrics_has_no_rank() -> None:
    """The resource has no process and no attempt either."""
    rank, node = (
        build_rank_resource(identity(1)).attributes,
        build_node_resource(identity(1)).attributes,
    )
    of_rank = {semantics.RANK, semantics.LOCAL_RANK, semantics.RESTART_COUNT, "process.pid"}
    of_rank |= {semantics.LENS_RANK, semantics.LENS_LOCAL_RANK}
    assert rank.keys() - node.keys() == of_rank
    assert rank["service.instance.id"] != node["service.instance.id"] == "node-a/node"


# -- rules for every exporter


def memory() -> tuple[Exporter, Callable[[], tuple[int, int]]]:
    """Return the in-memory exporter, and a function that counts its steps and traced steps."""
    exporter = InMemoryExporter()
    return exporter, lambda: (
        sum(len(batch.steps) for batch in exporter.batches),
        sum(len(batch.traces) for batch in exporter.batches),
    )


def otlp() -> tuple[Exporter, Callable[[], tuple[int, int]]]:
    """Return the OTLP exporter, and a function that counts what its endpoint has received."""
    of = {name: Collector(name) for name in ("traces", "metrics", "logs")}
    return exporter_to(of), lambda: (
        sum(point.count for point in of["metrics"].last(semantics.STEP_DURATION)),
        sum(
            each.attributes.get(semantics.SPAN_KIND) == semantics.STEP_KIND
            for each in of["traces"].spans()
        ),
    )


@pytest.mark.parametrize("make", [memory, otlp])
def test_every_exporter_has_delivered_everything_after_shutdown(make: Callable[[], Any]) -> None:
    """shutdown() returns no notes, with or without a flush before."""
    exporter, delivered = make()
    for rank in (0, 1):
        exporter.export(batch_of(identity(rank), range(10)))
    assert exporter.wait_for_room(10) is True
    exporter.export(batch_of(identity(1), range(10, 15)))
    assert exporter.shutdown(10) == []
    assert delivered() == (25, 25)


@pytest.mark.parametrize("make", [memory, otlp])
def test_every_exporter_accepts_a_batch_without_traces(make: Callable[[], Any]) -> None:
    """A batch may have steps without traces, or nothing at all."""
    exporter, delivered = make()
    full = batch_of(identity(), range(4))
    exporter.export(ExportBatch(full.identity, full.anchor, full.steps, ()))
    exporter.export(ExportBatch(full.identity, full.anchor, step_table([]), ()))
    assert exporter.wait_for_room(10) is True
    assert exporter.shutdown(10) == []
    assert delivered() == (4, 0)


@pytest.mark.parametrize("make", [memory, otlp])
def test_every_exporter_delivers_an_assessment_before_any_batch(make: Callable[[], Any]) -> None:
    """The assessment may or may not have alerts."""
    exporter, delivered = make()
    log = FindingLog("run")
    exporter.on_assessment(assessment_of(NOTHING, log))
    exporter.on_assessment(assessment_of(findings(episode()), log, hang()))
    assert exporter.wait_for_room(10) is True
    exporter.export(batch_of(identity(), range(4)))
    assert exporter.shutdown(10) == []
    assert delivered() == (4, 4)


@pytest.mark.parametrize("make", [memory, otlp])
def test_every_unused_exporter_shuts_down_without_notes(make: Callable[[], Any]) -> None:
    exporter, delivered = make()
    assert exporter.wait_for_room(10) is True
    assert exporter.shutdown(10) == []
    assert delivered() == (0, 0)


def test_exception_while_spans_are_created_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception does not reach the sidecar's loop."""

    def fails(*arguments: Any) -> Any:
        raise RuntimeError("on purpose")

    exporter = exporter_to({"traces": Collector("traces")})
    with monkeypatch.context() as lenient:
        lenient.setenv(RAISE, "0")
        lenient.setattr(swallowed, "by_place", Counter[str]())
        lenient.setattr(SpanBuilder, "build_spans", fails)
        exporter.export(batch_of(identity(), [0]))
        assert dict(swallowed.by_place) == {"exporting steps over OTLP": 1}
    assert exporter.shutdown(10) == []


# -- spans


def test_step_with_thousands_of_spans_is_sent_in_several_requests() -> None:
    """Gradient accumulation can give a step several thousand spans."""
    endpoint = Collector("traces")
    exporter = exporter_to({"traces": endpoint})
    exporter.export(batch_of(identity(), [0], spans_a_step=8190))
    assert exporter.shutdown(10) == []
    assert len(endpoint.spans()) == 8192
    assert len(endpoint.taken) == 16


def test_span_without_a_name_is_named_after_its_kind() -> None:
    """A span that ended with an exception has the status ERROR."""
    endpoint = Collector("traces")
    sender = exporter_to({"traces": endpoint})
    full = batch_of(identity(), [0])
    inside = (
        span(0, 1, kind="wait"),
        span(2, 1, flags=int(Flag.EXCEPTION), kind="forward", name="forward GPT"),
    )
    trace = StepTrace(0, 0, 5, 0, inside)
    sender.export(ExportBatch(full.identity, full.anchor, full.steps, (trace,)))
    sender.shutdown(10)
    found = {each.name: each.status for each in endpoint.spans()}
    assert found == {"train step": "", "rank 0": "", "wait": "", "forward GPT": "STATUS_CODE_ERROR"}


def test_only_rank_0_sends_the_root_span() -> None:
    """The root span of an inference step has its own name."""
    for rank, expected in ((0, ["inference step", "rank 0"]), (1, ["rank 1"])):
        endpoint = Collector("traces")
        sender = exporter_to({"traces": endpoint})
        full = batch_of(identity(rank), [0])
        trace = StepTrace(0, 0, 5, int(Flag.INFERENCE), ())
        sender.export(ExportBatch(full.identity, full.anchor, full.steps, (trace,)))
        sender.shutdown(10)
        assert [each.name for each in endpoint.spans()] == expected


# -- metrics


class Metrics(NodeMetrics):
    """A node's metrics, and the points that would be sent."""

    def sent(self) -> dict[str, list[ReceivedPoint]]:
        """Return the points by metric name."""
        endpoint = Collector("metrics")
        data = self.collect(Resource({}))
        endpoint.taken += [] if data is None else [[data]]
        found: dict[str, list[ReceivedPoint]] = {}
        for point in endpoint.points():
            found.setdefault(point.metric, []).append(point)
        return found


def test_ranks_share_a_series_in_jobs_with_more_than_64_ranks() -> None:
    """Points have no rank, and the memory gauge has the value of the node's fullest rank."""
    sender = Metrics()
    many = MAX_RANK_SERIES + 1
    for rank, memory_bytes in ((0, 10), (1, 30), (2, 20)):
        full = batch_of(identity(rank, world_size=many), range(5))
        full.steps.memory_bytes[:] = memory_bytes
        sender.export(full, {})
    points = sender.sent()
    (duration,), (gauge,) = points[semantics.STEP_DURATION], points[semantics.MEMORY]
    assert (duration.count, dict(duration.attributes)) == (15, {})
    assert (gauge.value, dict(gauge.attributes)) == (30, {})


@pytest.mark.parametrize(("world_size", "attributes"), [(2, {semantics.RANK: 0}), (1000, {})])
def test_tokens_and_model_operations_are_counters_and_mfu_is_a_gauge_of_a_rank(
    world_size: int, attributes: dict[str, Any]
) -> None:
    """Ranks of a large job share the counters. A mean of their MFU would be that of no rank."""
    sender = Metrics()
    batch = batch_of(identity(world_size=world_size), range(5))
    batch.steps.workload[:] = 640
    flops = StepFlops(3e9, at_peak_s=0.003)
    sender.export(dataclasses.replace(batch, flops=flops, has_tokens=True), {})
    points = sender.sent()

    for name, value in ((semantics.TOKENS, 5 * 640), (semantics.MODEL_FLOPS, 15 * 10**9)):
        assert [(dict(each.attributes), each.value) for each in points[name]] == [
            (attributes, value)
        ]
    # A step takes 6 ms.
    mfu = [each.value for each in points.get(semantics.MFU, [])]
    assert mfu == ([pytest.approx(0.5)] if attributes else [])


def test_rates_that_are_not_measured_are_not_sent() -> None:
    sender = Metrics()
    sender.export(batch_of(identity(), range(5)), {})
    sender.export(
        dataclasses.replace(batch_of(identity(), range(5, 9)), flops=StepFlops(1e9, None)), {}
    )
    points = sender.sent()

    assert semantics.TOKENS not in points
    assert semantics.MFU not in points
    assert [each.value for each in points[semantics.MODEL_FLOPS]] == [4 * 10**9]


def test_phase_counts_are_the_same_however_steps_are_batched() -> None:
    """A phase's histogram counts the steps that had the phase."""
    table = step_table([{"forward": 1, "data": 2}, {"forward": 1}, {"forward": 1}])
    found = []
    for cuts in ([0, 3], [0, 1, 2, 3]):
        sender = Metrics()
        for first, end in itertools.pairwise(cuts):
            columns = {name: value[first:end] for name, value in vars(table).items()}
            sender.export(
                ExportBatch(identity(), HostClock().anchor(), type(table)(**columns), ()), {}
            )
        points = sender.sent()[semantics.PHASE_DURATION]
        found.append({p.attributes[semantics.PHASE]: (p.count, p.value) for p in points})
    assert found == [{"forward": (3, pytest.approx(0.003)), "data": (1, pytest.approx(0.002))}] * 2


def test_slow_rank_of_a_large_job_has_its_own_series() -> None:
    """The rank's steps are not in the shared series."""
    sender, slow = Metrics(), episode(1)
    many = MAX_RANK_SERIES + 1

    def export(first: int) -> None:
        for rank in (0, 1):
            full = batch_of(identity(rank, world_size=many), range(first, first + 5))
            full.steps.memory_bytes[:] = 100 * (rank + 1)
            sender.export(full, {})

    export(0)
    sender.on_assessment(assessment_of(findings(slow)))
    export(5)
    slow = dataclasses.replace(slow, until_step=9)
    sender.on_assessment(assessment_of(findings(slow)))
    export(10)
    points = sender.sent()
    for metric in (semantics.STEP_DURATION, semantics.STEP_OWN_TIME):
        found = {point.attributes.get(semantics.RANK): point.count for point in points[metric]}
        assert found == {None: 25, 1: 5}
    phases = {
        (p.attributes.get(semantics.RANK), p.attributes[semantics.PHASE])
        for p in points["torch.train.phase.duration"]
    }
    assert {(1, "forward"), (1, "communication"), (None, "forward")} <= phases
    assert {p.attributes.get(semantics.RANK): p.value for p in points[semantics.STEPS]} == {
        None: 25,
        1: 5,
    }
    assert {p.attributes.get(semantics.RANK): p.value for p in points[semantics.MEMORY]} == {
        None: 200,
        1: 200,
    }


def test_shared_memory_gauge_excludes_a_rank_with_its_own_series() -> None:
    """A rank has its own series while it is slow."""
    sender = Metrics()
    for rank, memory_bytes in ((1, 900), (0, 100)):
        sender.on_assessment(assessment_of(findings(episode(1)) if rank == 0 else NOTHING))
        full = batch_of(identity(rank, world_size=MAX_RANK_SERIES + 1), range(5))
        full.steps.memory_bytes[:] = memory_bytes
        sender.export(full, {})
    points = sender.sent()
    assert [(dict(point.attributes), point.value) for point in points[semantics.MEMORY]] == [
        ({}, 100)
    ]


# -- gauges of current problems


def gauges(sender: Metrics) -> dict[tuple[Any, ...], float]:
    """Return the current gauges of problems by name and attributes."""
    points = sender.sent()
    names = (
        semantics.STRAGGLER_COST,
        semantics.STRAGGLERS,
        semantics.DETECTABLE,
        semantics.HANG_DURATION,
    )
    return {
        (name, *(point.attributes[key] for key in sorted(point.attributes))): point.value
        for name in names
        for point in points.get(name, [])
        if name != semantics.STRAGGLERS or point.value
    }


def test_problem_gauges_are_zero_after_the_problems_end_and_then_missing() -> None:
    """The gauges have the cost by rank and phase, the stragglers by class and the detectable
    slowdown.
    """
    sender, slow = Metrics(), episode(3)
    sender.on_assessment(assessment_of(findings(slow, episode(5, phase="data", cost_ns=5e6))))
    now = gauges(sender)
    slow = dataclasses.replace(slow, until_step=180)
    sender.on_assessment(assessment_of(findings(slow, detectable_ns=4e6)))
    after = [gauges(sender) for _ in range(5)]

    assert now == {
        (semantics.STRAGGLER_COST, 3, "backward"): 0.015,
        (semantics.STRAGGLER_COST, 5, "data"): 0.005,
        (semantics.STRAGGLERS, "slow_compute"): 1,
        (semantics.STRAGGLERS, "slow_data"): 1,
        (semantics.DETECTABLE,): 0.003,
    }
    over = {
        (semantics.STRAGGLER_COST, 3, "backward"): 0.0,
        (semantics.STRAGGLER_COST, 5, "data"): 0.0,
    }
    assert (
        after
        == [{**over, (semantics.DETECTABLE,): 0.004}] * 3 + [{(semantics.DETECTABLE,): 0.004}] * 2
    )


@pytest.mark.parametrize(("cost_ns", "cost_s"), [(12e6, 0.012), (None, None)])
def test_each_rank_of_a_slow_node_has_the_joint_cost(
    cost_ns: float | None, cost_s: float | None
) -> None:
    """The joint cost is the time lost by all slow ranks of the node together.

    If the joint cost is unknown, no point is sent.
    """
    sender = Metrics()
    node = [episode(rank, cost_ns=0.0, shared=cost_ns and shared(cost_ns)) for rank in range(4)]
    sender.on_assessment(assessment_of(findings(*node, episode(6))))
    now = gauges(sender)
    costs = {key[1]: value for key, value in now.items() if key[0] == semantics.STRAGGLER_COST}
    assert costs == {6: 0.015, **(dict.fromkeys(range(4), cost_s) if cost_s is not None else {})}
    assert now[semantics.STRAGGLERS, "slow_compute"] == 5


def test_gauge_of_a_rank_that_is_slow_again_is_not_zero() -> None:
    sender = Metrics()
    for found in (findings(episode(3)), findings(), findings(episode(3, since=300, cost_ns=7e6))):
        sender.on_assessment(assessment_of(found))
    assert gauges(sender)[semantics.STRAGGLER_COST, 3, "backward"] == 0.007


def test_hang_gauge_grows_during_a_hang_and_is_zero_afterwards() -> None:
    """The gauge is missing some time after the hang."""
    now_s = [1000.0]
    sender, hung = Metrics(clock=lambda: now_s[0]), hang(since_s=12)
    found = []
    for second, each in ((0, hung), (60, hung), (61, hang(kind="dead", since_s=75)), (62, None)):
        now_s[0] = 1000.0 + second
        sender.on_assessment(assessment_of(hung=each))
        found.append(gauges(sender))

    name = semantics.HANG_DURATION
    assert found == [
        {(name, "missing"): 12.0},
        {(name, "missing"): 72.0},
        {(name, "dead"): 75.0, (name, "missing"): 0.0},
        {(name, "dead"): 0.0, (name, "missing"): 0.0},
    ]


def test_no_problem_gauge_is_sent_before_the_first_comparison() -> None:
    """After the first comparison all classes have a gauge, also if it is 0."""
    sender = Metrics()
    sender.on_assessment(assessment_of(NOTHING))
    assert sender.sent() == {}
    sender.on_assessment(assessment_of(findings(detectable_ns=None)))
    points = sender.sent()
    assert {p.attributes[semantics.STRAGGLER_CLASS]: p.value for p in points.pop(semantics.STRAGGLERS)} == {
        "slow_compute": 0, "slow_data": 0, "slow_host": 0, "more_work": 0,
    }  # fmt: skip
    assert points == {}


def test_only_the_node_that_assesses_the_job_sends_problem_gauges() -> None:
    sender = Metrics()
    sender.on_assessment(assessment_of(findings(episode()), hung=hang(), whole_job=False))
    assert gauges(sender) == {}


# -- alerts


def test_alert_is_an_event_with_sentence_severity_and_ids() -> None:
    """The event is a log record. The event at the end of a problem has the severity INFO."""
    endpoint, log, slow = Collector("logs"), FindingLog("run"), episode()
    exporter = exporter_to({"logs": endpoint})
    exporter.on_assessment(assessment_of(findings(slow), log))
    slow = dataclasses.replace(slow, until_step=180)
    exporter.on_assessment(assessment_of(findings(slow), log))
    exporter.on_assessment(assessment_of(hung=hang(), log=log))
    assert exporter.shutdown(10) == []
    started, ended, hung = events = endpoint.events()

    assert [(each.name, each.severity) for each in events] == [
        ("torch.train.straggler.started", "WARN SEVERITY_NUMBER_WARN"),
        ("torch.train.straggler.ended", "INFO SEVERITY_NUMBER_INFO"),
        ("torch.train.hang.started", "WARN SEVERITY_NUMBER_WARN"),
    ]
    assert started.body.startswith("Rank 3 (node-a) is slow in the backward pass")
    assert started.time_ns == 1_700_000_000_000_000_000
    about = started.attributes[semantics.ALERT_ABOUT]
    assert dict(started.attributes) == {
        "log.record.uid": started.attributes["log.record.uid"],
        "torch.train.alert.id": about,
        "torch.run.id": "run",
        "torch.elastic.restart_count": 0,
        "torch.distributed.rank": 3,
        "torch.distributed.ranks": "3",
        "torch.train.alert.host": "node-a",
        "torch.train.phase": "backward",
        "torch.train.since_step": 100,
        "torch.train.straggler.class": "slow_compute",
        "torch.train.straggler.scope": "rank",
        "torch.train.straggler.cost": 0.015,
        "torch.train.straggler.cost_share": 0.15,
    }
    assert (ended.attributes[semantics.ALERT_ABOUT], ended.attributes[semantics.UNTIL_STEP]) == (
        about,
        180,
    )
    assert hung.attributes[semantics.HANG_KIND] == "missing"
    assert hung.attributes[semantics.HANG_DURATION] == 12.0
    assert semantics.STRAGGLER_CLASS not in hung.attributes


@pytest.mark.parametrize(
    ("traced", "until", "expected"),
    [
        ((0, 1, 90, 104, 110), None, 104),
        ((0, 1, 90), None, None),
        ((0, 190), 180, None),
        ((104,), 180, 104),
    ],
)
def test_alert_links_to_the_slow_ranks_first_traced_step(
    traced: tuple[int, ...], until: int | None, expected: int | None
) -> None:
    """The alert has the context of the rank's span in the first traced step of the slowness."""
    endpoint = Collector("logs")
    exporter = exporter_to({"traces": Collector("traces"), "logs": endpoint})
    for step in traced:
        exporter.export(batch_of(identity(0), [step]))
    exporter.export(batch_of(identity(0, attempt=1), [102]))  # A step of another attempt.
    exporter.on_assessment(assessment_of(findings(episode(3, 100, until)), FindingLog("run")))
    assert exporter.shutdown(10) == []
    in_trace = step_trace_id("run", 0, expected) if expected is not None else 0
    context = (in_trace, span_id_of_path(in_trace, 3) if in_trace else 0)
    assert {(each.trace_id, each.span_id) for each in endpoint.events()[-1:]} == {context}


def test_alerts_link_only_to_a_limited_number_of_recent_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchlens_perf.exporters.otlp._MAX_LINKABLE_STEPS", 3)
    endpoint = Collector("logs")
    exporter = exporter_to({"traces": Collector("traces"), "logs": endpoint})
    exporter.export(batch_of(identity(0), [100, 101, 102, 103, 104]))
    exporter.on_assessment(assessment_of(findings(episode(3, 100)), FindingLog("run")))
    exporter.shutdown(10)
    assert endpoint.events()[0].trace_id == step_trace_id("run", 0, 102)


def test_alerts_are_accepted_at_once_while_the_endpoint_blocks() -> None:
    """Undelivered alerts are counted."""
    endpoint, log = Collector("logs", opened=False), FindingLog("run")
    exporter = exporter_to({"logs": endpoint})
    for rank in range(8):
        exporter.on_assessment(
            assessment_of(findings(*(episode(each) for each in range(rank + 1))), log)
        )
    notes = exporter.shutdown(0.2)
    assert endpoint.taken == []
    assert notes[0] == "OTLP: 8 of 8 alerts were not delivered"
    endpoint.opened.set()


def test_in_memory_exporter_keeps_alerts_and_the_newest_assessment() -> None:
    exporter, log = InMemoryExporter(), FindingLog("run")
    exporter.on_assessment(assessment_of(findings(episode()), log))
    exporter.on_assessment(assessment_of(findings(episode()), log, hang()))
    assert [(alert.kind, alert.change) for alert in exporter.alerts] == [
        ("straggler", "started"),
        ("hang", "started"),
    ]
    assert exporter.assessment is not None
    assert exporter.assessment.hang == hang()


# -- the page for users


def test_documented_names_and_limits_equal_those_of_the_code() -> None:
    """docs/reference/telemetry.md has every name and bound; docs/guides/opentelemetry.md has the
    limits.
    """
    page = (ROOT / "docs/reference/telemetry.md").read_text()
    names = {
        value
        for name, value in vars(semantics).items()
        if name.isupper() and isinstance(value, str)
    }
    names |= {each.name for each in semantics.METRICS}
    sources = {semantics.OPENTELEMETRY, semantics.NEMO_LENS, semantics.OURS, semantics.SCOPE}
    names -= {
        value
        for name, value in vars(semantics).items()
        if name.startswith("_") and isinstance(value, str)
    }
    assert [
        name for name in sorted(names - sources) if not re.search(rf"(`| |^){name}(`| |,)", page)
    ] == []
    bounds = re.search(r"in seconds:\s+([0-9., \n]+)\.", page)
    assert bounds
    assert tuple(float(bound) for bound in bounds[1].split(",")) == semantics.DURATION_BOUNDS_S
    for kind, changes in (
        ("straggler", ("started", "ended")),
        ("hang", ("started", "updated", "ended")),
    ):
        assert all(f"`{semantics.name_of_alert_event(kind, change)}`" in page for change in changes)
    assert all(name in page for name in count_stragglers_by_class(NOTHING))
    assert all(kind.name.lower() in page for kind in SPANS)
    guide = " ".join((ROOT / "docs/guides/opentelemetry.md").read_text().split())
    assert f"Beyond {MAX_RANK_SERIES} ranks" in guide
    assert f"steps 0 to {FIRST_TRACED_STEPS - 1}, and one step in {Config.trace_every} (" in guide
