"""Tests of a live run that is sent through rotel, a collector written in Rust, to Datadog's test
agent.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.conftest import trained
from tests.backends.recorded import CALLER, SLOW_RANK, TRACES, Recorded, as_tuple, by_id, subset
from tests.backends.rotel import Rotel
from tests.support.otlp_receiver import MISSING, PROGRAM, ReceivedPoint, Receiver
from tests.support.servers import wait_for
from torchlens_perf.exporters import semantics

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(600)]

_HISTOGRAMS = (semantics.STEP_DURATION, semantics.STEP_OWN_TIME, semantics.PHASE_DURATION)
_MOST_NS = 1_000_000
"""Largest difference between a live span's start and the run directory, as clocks are
compared again later.
"""


class Hop:
    """A live run, and the data received behind the collector."""

    def __init__(self, recorded: Recorded, receiver: Receiver) -> None:
        self.recorded = recorded
        expected = len(recorded.spans())
        wait_for(
            lambda: len(receiver.spans()) >= expected and receiver.events() and receiver.points(),
            30,
        )
        self.spans, self.events, self.points = (
            receiver.spans(),
            receiver.events(),
            receiver.points(),
        )

    def last(self, metric: str) -> dict[tuple[int, str], ReceivedPoint]:
        """Return a metric's last points by rank and phase.

        Points are cumulative and cover the whole run.
        """
        found = [point for point in self.points if point.metric == metric]
        return {
            (each.attributes[semantics.RANK], each.attributes.get(semantics.PHASE, "")): each
            for each in found
        }


@pytest.fixture(scope="module", params=["http/protobuf", "grpc"])
def hop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hop]:
    """Run the job with the same protocol to and from the collector."""
    if not PROGRAM.exists():
        pytest.skip(MISSING)
    receiver = Receiver(tmp_path_factory.mktemp("receiver"))
    exporter = {
        "ROTEL_EXPORTER": "otlp",
        "ROTEL_OTLP_EXPORTER_ENDPOINT": receiver.endpoint(request.param),
        "ROTEL_OTLP_EXPORTER_PROTOCOL": request.param.partition("/")[0],
    }
    try:
        rotel = Rotel(tmp_path_factory.mktemp("rotel"), exporter)
        yield Hop(
            trained(tmp_path_factory.mktemp("run"), rotel.exporter_variables(request.param)),
            receiver,
        )
        rotel.server.close()
    finally:
        receiver.close()


def test_all_spans_arrive_once_with_their_parents(hop: Hop) -> None:
    """Compared are ids, parent, name, attributes, error, duration to the nanosecond, and start to
    the millisecond.
    """
    expected = by_id(as_tuple(span) for span in hop.recorded.spans())
    found = by_id(as_tuple(span) for span in hop.spans)
    assert len({in_trace for in_trace, _ in expected}) == TRACES
    assert set(found) == set(expected)
    for key, (*head, start_ns, end_ns, error, attributes) in expected.items():
        *head_found, start_found_ns, end_found_ns, error_found, attributes_found = found[key]
        assert (head_found, error_found, attributes_found) == (head, error, attributes)
        assert end_found_ns - start_found_ns == end_ns - start_ns
        assert abs(start_found_ns - start_ns) < _MOST_NS


def test_only_root_spans_link_to_the_callers_span(hop: Hop) -> None:
    assert [span.links for span in hop.spans if span.parent_id is None] == [(CALLER,)] * TRACES
    assert {span.links for span in hop.spans if span.parent_id is not None} == {()}


def test_spans_of_each_rank_have_their_own_resource(hop: Hop) -> None:
    resources = hop.recorded.resources()
    for span in hop.spans:
        assert subset(resources[span.attributes[semantics.RANK]], span.resource)


def test_histograms_counter_and_gauge_have_their_values_and_units(hop: Hop) -> None:
    """Histograms have the count and sum of all steps."""
    expected = hop.recorded.durations_s()
    for metric in _HISTOGRAMS:
        found = hop.last(metric)
        assert set(found) == {(rank, phase) for name, rank, phase in expected if name == metric}
        for (rank, phase), point in found.items():
            values = expected[metric, rank, phase]
            assert (point.unit, point.form, point.temporality) == (
                "s",
                "exponential_histogram",
                "cumulative",
            )
            assert (point.count, sum(point.buckets)) == (len(values), len(values))
            assert point.value == pytest.approx(sum(values), rel=1e-9)
    for rank, memory_bytes in hop.recorded.memory_bytes().items():
        steps, memory = hop.last(semantics.STEPS)[rank, ""], hop.last(semantics.MEMORY)[rank, ""]
        assert ("{step}", "sum", len(expected[semantics.STEP_DURATION, rank, ""])) == (
            steps.unit,
            steps.form,
            steps.value,
        )
        assert ("By", "gauge", memory_bytes) == (memory.unit, memory.form, memory.value)


def test_exemplars_have_the_ids_of_a_sampled_span(hop: Hop) -> None:
    """The histogram's exemplars point to the rank's span in a sampled step."""
    spans = {(span.trace_id, span.span_id): span.duration_ns / 1e9 for span in hop.spans}
    for point in hop.last(semantics.STEP_DURATION).values():
        assert point.exemplars
        for in_trace, of_span, value in point.exemplars:
            assert spans[in_trace, of_span] == value


def test_slow_rank_alert_arrives_once_with_its_sentence_and_ids(hop: Hop) -> None:
    """Name, severity and the node's resource are compared too.

    Other programs may make another rank slow for a while.
    """
    assert len({event.attributes[semantics.ALERT_UID] for event in hop.events}) == len(hop.events)
    alert, *_ = [event for event in hop.events if event.attributes[semantics.RANK] == SLOW_RANK]
    assert (alert.name, alert.severity) == (
        "torch.train.straggler.started",
        "WARN SEVERITY_NUMBER_WARN",
    )
    assert alert.body.startswith(f"Rank {SLOW_RANK} (")
    assert alert.attributes[semantics.PHASE] == "forward"
    assert alert.resource[semantics.RUN_ID] == hop.recorded.run.run_id
    of_slow = [span for span in hop.spans if span.name == f"{semantics.SPAN_RANK} {SLOW_RANK}"]
    assert (alert.trace_id, alert.span_id) in {(span.trace_id, span.span_id) for span in of_slow}
