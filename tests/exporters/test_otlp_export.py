"""Export of a live run of two ranks to a real receiver, and a replay."""

from __future__ import annotations

import dataclasses
import itertools
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.support.long import long
from tests.support.otlp_receiver import ReceivedPoint, ReceivedSpan, Receiver
from tests.support.recorded_run import Sidecar, train, wait_for_sidecar
from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.exporters import semantics, steps_traced_by_number
from torchlens_perf.exporters.otlp_spans import step_trace_id
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.place.node import node_name
from torchlens_perf.verdicts import node_state

pytestmark = pytest.mark.distributed

TRACE_EVERY = 5
RANKS = {0, 1}
Row = dict[str, object]


@dataclasses.dataclass
class Exported:
    """The files that a live run wrote, and the data that the receiver got."""

    run: RunDirectory
    told: dict[str, str]
    spans: list[ReceivedSpan]
    points: list[ReceivedPoint]

    def rows(self, folder: str) -> list[Row]:
        """Return the records or steps in the run directory."""
        rows: list[Row] = pq.read_table(self.run.path / folder).to_pylist()
        return [
            row for row in rows if row.get("kind") != "thread_time"
        ]  # The excluded rows are counters, not spans.

    def traces(self) -> dict[int, list[ReceivedSpan]]:
        """Return the spans by trace id."""
        traces: dict[int, list[ReceivedSpan]] = defaultdict(list)
        for span in self.spans:
            traces[span.trace_id].append(span)
        return traces

    def of_metric(self, name: str) -> list[ReceivedPoint]:
        """Return the last points of a metric, which are cumulative and cover the whole run."""
        last = {tuple(sorted(p.attributes.items())): p for p in self.points if p.metric == name}
        return list(last.values())


@pytest.fixture(scope="module", params=["http/protobuf", *long("grpc")])
def exported(
    request: pytest.FixtureRequest,
    _one_receiver: Receiver,
    tmp_path_factory: pytest.TempPathFactory,
) -> Exported:
    _one_receiver.clear()
    told = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": _one_receiver.endpoint(request.param),
        "OTEL_EXPORTER_OTLP_PROTOCOL": request.param,
        "TORCHLENS_PERF_TRACE_EVERY": str(TRACE_EVERY),
    }
    run = train(tmp_path_factory.mktemp("live"), told)
    wait_for_sidecar(run, 30)
    return Exported(run, told, _one_receiver.spans(), _one_receiver.points())


def sampled(exported: Exported) -> set[int]:
    """Return the steps that are exported as traces."""
    return steps_traced_by_number(
        [int(str(row["step"])) for row in exported.rows("steps")], TRACE_EVERY
    )


def test_each_sampled_step_is_one_trace_of_both_ranks(exported: Exported) -> None:
    """The trace id is derived from run, attempt and step."""
    steps = sampled(exported)
    expected = {step_trace_id(exported.run.run_id, 0, step): (step, RANKS) for step in steps}
    found = {
        in_trace: (
            {span.attributes[semantics.STEP] for span in spans}.pop(),
            {span.attributes[semantics.RANK] for span in spans},
        )
        for in_trace, spans in exported.traces().items()
    }
    assert len(steps) > 2
    assert expected == found


def test_trace_is_a_tree_with_one_child_of_the_root_per_rank(exported: Exported) -> None:
    """Each span other than the root lies within its parent."""
    for spans in exported.traces().values():
        by_id = {span.span_id: span for span in spans}
        roots = [span for span in spans if span.parent_id is None]
        assert [root.name for root in roots] == [semantics.SPAN_STEP]
        children = [span for span in spans if span.parent_id == roots[0].span_id]
        assert {f"{semantics.SPAN_RANK} {rank}" for rank in RANKS} == {
            child.name for child in children
        }
        assert len(children) == len(RANKS)
        assert {semantics.STEP_KIND} == {
            child.attributes[semantics.SPAN_KIND] for child in children
        }
        assert {child.attributes[semantics.RANK] for child in children} == RANKS
        assert len(spans) == len(by_id)
        below = [span for span in spans if span not in roots and span not in children]
        for span in below:
            assert span.parent_id in by_id
            parent = by_id[span.parent_id]
            assert span.attributes[semantics.RANK] == parent.attributes[semantics.RANK]
            assert parent.start_ns <= span.start_ns <= parent.end_ns
            # The parent of a collective is the span that issued it. The collective may end later
            # than this span.
            assert (
                span.end_ns <= parent.end_ns or span.attributes[semantics.SPAN_KIND] == "collective"
            )
            assert parent.attributes.get(semantics.SPAN_KIND) != "collective"


def test_modules_and_collectives_are_children_of_their_phase(exported: Exported) -> None:
    """Phases are children of the rank's step, modules of the forward phase, and DDP's all-reduce
    and its wait of the backward phase.

    The model is found after the first steps.
    """
    for spans in exported.traces().values():
        if min(int(str(each.attributes[semantics.STEP])) for each in spans) < WARM_UP_STEPS:
            continue
        children: dict[object, set[object]] = defaultdict(set)
        by_id = {span.span_id: span for span in spans}
        for span in spans:
            parent = by_id.get(span.parent_id or 0)
            if semantics.SPAN_KIND in span.attributes and parent is not None:
                above = parent.attributes.get(semantics.SPAN_KIND, parent.name)
                children[above].add(span.attributes[semantics.SPAN_KIND])
        assert {"forward", "backward", "optimizer"} == children[semantics.STEP_KIND]
        assert "module" in children["forward"]
        assert {"collective", "wait"} <= children["backward"]


def test_every_span_has_rank_step_and_run_as_attributes(exported: Exported) -> None:
    """Some backends drop the attributes of the resource."""
    for span in exported.spans:
        assert span.attributes[semantics.RANK] in RANKS
        assert (
            span.attributes[semantics.RANK] == span.resource[semantics.RANK]
            or span.parent_id is None
        )
        assert span.trace_id == step_trace_id(
            exported.run.run_id, 0, span.attributes[semantics.STEP]
        )
        assert exported.run.run_id == span.attributes[semantics.RUN_ID]


def test_span_durations_equal_the_run_directory(exported: Exported) -> None:
    """Each row of the run directory has a span with the same duration to the nanosecond."""
    steps = sampled(exported)
    expected = Counter(
        (row["rank"], row["step"], row["kind"], row["duration_ns"])
        for row in exported.rows("spans")
        if row["step"] in steps
    )
    found = Counter(
        (
            span.attributes[semantics.RANK],
            span.attributes[semantics.STEP],
            span.attributes[semantics.SPAN_KIND],
            span.duration_ns,
        )
        for span in exported.spans
        if span.parent_id is not None
    )
    assert expected == found


def starts(spans: Iterable[ReceivedSpan]) -> list[int]:
    """Return the start times of the spans below the roots, in order."""
    return sorted(span.start_ns for span in spans if span.parent_id is not None)


def starts_on_disk(exported: Exported) -> list[int]:
    """Return the start times in the run directory."""
    table = pq.read_table(exported.run.path / "spans", columns=["step", "kind", "time"])
    table = table.filter(
        pc.not_equal(table.column("kind").cast("string"), "thread_time")
    )  # The excluded rows are counters, not spans.
    steps = sampled(exported)
    times = table.column("time").cast("int64").to_pylist()
    return sorted(
        time
        for time, step in zip(times, table.column("step").to_pylist(), strict=True)
        if step in steps
    )


def test_span_starts_equal_the_run_directory(exported: Exported) -> None:
    """Each span begins within a millisecond of the wall-clock time in the run directory."""
    found, expected = starts(exported.spans), starts_on_disk(exported)
    assert len(expected) == len(found)
    assert max(abs(one - other) for one, other in zip(expected, found, strict=True)) < 1_000_000


def test_step_spans_have_own_time_and_micro_steps(exported: Exported) -> None:
    """Own time and micro-steps equal those in the run directory."""
    steps = sampled(exported)
    expected = {
        (row["rank"], row["step"]): (int(str(row["own_ns"])) / 1e9, row["micro_steps"])
        for row in exported.rows("steps")
        if row["step"] in steps
    }
    found = {
        (span.attributes[semantics.RANK], span.attributes[semantics.STEP]): (
            span.attributes[semantics.OWN_SECONDS],
            span.attributes[semantics.MICRO_STEPS],
        )
        for span in exported.spans
        if span.attributes.get(semantics.SPAN_KIND) == semantics.STEP_KIND
    }
    assert expected == found


def test_collective_spans_have_size_and_sequence_number(exported: Exported) -> None:
    """The bytes and the sequence number equal those in the run directory."""
    steps = sampled(exported)
    expected = Counter(
        (row["rank"], row["name"], row["value0"], int(str(row["value1"])) & 0xFFFFFFFF)
        for row in exported.rows("spans")
        if row["step"] in steps and row["kind"] == "collective"
    )
    found = Counter(
        (
            span.attributes[semantics.RANK],
            span.name,
            span.attributes[semantics.BYTES],
            span.attributes[semantics.SEQUENCE],
        )
        for span in exported.spans
        if span.attributes.get(semantics.SPAN_KIND) == "collective"
    )
    assert expected
    assert expected == found


def test_resource_of_spans_identifies_process_rank_host_and_job(exported: Exported) -> None:
    (node,) = node_state.load_all(exported.run)
    for process in node.processes.values():
        who = process.identity
        (resource,) = {
            tuple(sorted(span.resource.items()))
            for span in exported.spans
            if span.attributes[semantics.RANK] == who.rank
        }
        expected = {
            "service.name": "train_two_ranks",
            "service.instance.id": f"{socket.gethostname()}/{who.key}",
            "host.name": socket.gethostname(),
            "process.pid": who.pid,
            semantics.RANK: who.rank,
            semantics.LOCAL_RANK: who.rank,
            semantics.WORLD_SIZE: len(RANKS),
            semantics.RESTART_COUNT: 0,
            semantics.RUN_ID: exported.run.run_id,
            "torch.elastic.max_restarts": "0",
        }
        assert expected.items() <= dict(resource).items()
        assert who.attributes["torch.elastic.run_id"] == dict(resource)["torch.elastic.run_id"]


def test_duration_histograms_count_each_step_of_each_rank_in_seconds(exported: Exported) -> None:
    """Each duration is in the right exponential bucket."""
    for metric, column in (
        (semantics.STEP_DURATION, "duration_ns"),
        (semantics.STEP_OWN_TIME, "own_ns"),
    ):
        points = exported.of_metric(metric)
        assert {("s", "exponential_histogram", "cumulative")} == {
            (point.unit, point.form, point.temporality) for point in points
        }
        for rank in RANKS:
            values = [
                int(str(row[column])) / 1e9 for row in exported.rows("steps") if row["rank"] == rank
            ]
            (point,) = [point for point in points if point.attributes == {semantics.RANK: rank}]
            assert len(values) == point.count
            assert sum(values) == pytest.approx(point.value, rel=1e-9)
            assert _histogram(values, point) == point.buckets


def _histogram(values: list[float], point: ReceivedPoint) -> tuple[int, ...]:
    base = 2.0**2.0**-point.scale
    edges = [base ** (point.offset + bucket) for bucket in range(len(point.buckets) + 1)]
    return tuple(
        sum(low < value <= high for value in values) for low, high in itertools.pairwise(edges)
    )


def test_phase_histogram_counts_the_steps_that_had_the_phase(exported: Exported) -> None:
    """The sum of the histogram equals the column in the run directory."""
    points = {
        (point.attributes[semantics.RANK], point.attributes[semantics.PHASE]): point
        for point in exported.of_metric(semantics.PHASE_DURATION)
    }
    expected: dict[tuple[object, str], list[int]] = defaultdict(list)
    for row in exported.rows("steps"):
        for column, value in row.items():
            part = column.removesuffix("_ns")
            if (
                part not in ("start", "duration", "own", "work", "cpu", "ready")
                and not part.endswith("_ready")
                and part != column
                and value
            ):
                expected[row["rank"], part].append(int(str(value)))
    assert {key: len(values) for key, values in expected.items()} == {
        key: p.count for key, p in points.items()
    }
    for key, values in expected.items():
        assert sum(values) / 1e9 == pytest.approx(points[key].value, rel=1e-9)


def test_exemplars_have_ids_and_duration_of_the_step_span(exported: Exported) -> None:
    """Exemplars belong to the histograms of durations."""
    spans = {
        (span.trace_id, span.span_id): span.duration_ns / 1e9
        for span in exported.spans
        if span.attributes.get(semantics.SPAN_KIND) == semantics.STEP_KIND
    }
    for point in exported.of_metric(semantics.STEP_DURATION):
        assert point.exemplars
        for in_trace, of_span, value in point.exemplars:
            assert spans[in_trace, of_span] == value


def test_counter_has_the_steps_and_gauge_the_memory_of_each_rank(exported: Exported) -> None:
    """The gauge is the memory at the last step in bytes."""
    for rank in RANKS:
        rows = [row for row in exported.rows("steps") if row["rank"] == rank]
        of_rank = {semantics.RANK: rank}
        (steps,) = [p for p in exported.of_metric(semantics.STEPS) if p.attributes == of_rank]
        (memory,) = [p for p in exported.of_metric(semantics.MEMORY) if p.attributes == of_rank]
        assert ("{step}", "sum", len(rows)) == (steps.unit, steps.form, steps.value)
        assert ("By", "gauge", rows[-1]["memory_bytes"]) == (memory.unit, memory.form, memory.value)


def test_replay_sends_the_same_spans_as_the_live_run(
    exported: Exported, receiver: Receiver, tmp_path: Path
) -> None:
    """The replay sends the ids, parents and durations that the live run sent."""
    replayed = Sidecar(exported.run, tmp_path, exported.told)
    assert replayed.returncode == 0

    def place(span: ReceivedSpan) -> tuple[object, ...]:
        attributes = tuple(sorted(span.attributes.items()))
        return span.trace_id, span.span_id, span.parent_id, span.name, span.duration_ns, attributes

    assert {place(span) for span in exported.spans} == {place(span) for span in receiver.spans()}
    assert len(exported.spans) == len(receiver.spans())
    assert starts_on_disk(exported) == starts(receiver.spans())


def test_replay_without_the_nodes_state_file_sends_the_same_ids(
    sidecar: Callable[..., Sidecar], receiver: Receiver
) -> None:
    """The spans have no invented attributes."""
    endpoint = receiver.endpoint("http/protobuf")
    run = sidecar(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint).run
    # Only the node's state has the caller's trace.
    whole = {
        (span.trace_id, span.span_id)
        for span in receiver.spans()
        if span.name != semantics.SPAN_RUN
    }
    receiver.clear()
    run.node_state_path(node_name()).unlink()
    sidecar(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    assert whole == {(span.trace_id, span.span_id) for span in receiver.spans()}
    assert {len(RANKS)} == {span.resource[semantics.WORLD_SIZE] for span in receiver.spans()}
    assert [span for span in receiver.spans() if "process.pid" in span.resource] == []


def test_report_and_log_do_not_mention_otlp_if_everything_was_delivered(exported: Exported) -> None:
    assert "OTLP" not in exported.run.report.read_text()
    log = exported.run.node_log_path(node_name()).read_text()
    assert [line for line in log.splitlines() if "WARNING" in line or "ERROR" in line] == []
