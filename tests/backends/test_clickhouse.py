"""Tests of a run that a collector written in Rust has stored in ClickHouse's engine.

The tables are those of the OpenTelemetry Collector's exporter.
"""

from __future__ import annotations

import json
import statistics
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.recorded import CALLER, SLOW_RANK, TRACES, Recorded, as_tuple, by_id, subset
from tests.backends.rotel import Rotel
from tests.backends.server import environment, is_up
from tests.support.otlp_receiver import ReceivedSpan
from tests.support.processes import ROOT
from tests.support.servers import Server, free_port, wait_for
from torchlens_perf.exporters import semantics

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(600)]

PAGE = (ROOT / "docs/guides/backends.md").read_text()
_DOOR = Path(__file__).with_name("clickhouse_door.py")
_NUMBERS = {
    semantics.STEP: int, semantics.RANK: int, semantics.MICRO_STEPS: int, semantics.OWN_SECONDS: float,
    semantics.BYTES: int, semantics.SEQUENCE: int,
}  # fmt: skip
_TWICE = 2


class ClickHouse:
    """The engine behind its HTTP server, and the collector that fills it."""

    def __init__(self, folder: Path, rotel_folder: Path) -> None:
        python = environment("chdb") / "bin" / "python"
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        self.server = Server(
            [str(python), str(_DOOR), str(port), str(folder)], folder, lambda: is_up(self.address)
        )
        exporter = {
            "ROTEL_EXPORTER": "clickhouse",
            "ROTEL_CLICKHOUSE_EXPORTER_ENDPOINT": self.address,
        }
        self.rotel = Rotel(
            rotel_folder, {**exporter, "ROTEL_CLICKHOUSE_EXPORTER_COMPRESSION": "none"}
        )

    def ask(self, query: str) -> list[dict[str, Any]]:
        """Return the rows of an SQL query."""
        asked = urllib.parse.urlencode({"database": "otel", "query": f"{query} FORMAT JSONEachRow"})
        with urllib.request.urlopen(f"{self.address}/?{asked}", data=b"", timeout=30) as answer:
            return [json.loads(line) for line in answer.read().splitlines()]

    def close(self) -> None:
        self.rotel.server.close()
        self.server.close()


@pytest.fixture(scope="module")
def clickhouse(
    tmp_path_factory: pytest.TempPathFactory, recorded: Recorded
) -> Iterator[ClickHouse]:
    """Return an engine that received the run twice."""
    started = ClickHouse(tmp_path_factory.mktemp("clickhouse"), tmp_path_factory.mktemp("rotel"))
    expected = {"otel_traces": len(recorded.spans()), "otel_logs": 1, "otel_metrics_sum": 2, "otel_metrics_gauge": 1,
                "otel_metrics_exponential_histogram": len(recorded.durations_s())}  # fmt: skip
    for times in (1, _TWICE):
        recorded.send(**started.rotel.exporter_variables("grpc"))
        for table, rows in expected.items():
            assert wait_for(
                lambda table=table, times=times, rows=rows: (
                    started.ask(f"SELECT count() AS n FROM otel.{table}")[0]["n"] >= times * rows
                ),
                30,
            ), (
                table,
                started.server.log.read_text()[-2000:],
                started.rotel.server.log.read_text()[-2000:],
            )
    yield started
    started.close()


@pytest.fixture(scope="module")
def found(clickhouse: ClickHouse) -> list[ReceivedSpan]:
    """Return all rows of the table of spans."""
    rows = clickhouse.ask(
        "SELECT *, toUnixTimestamp64Nano(Timestamp) AS start_ns FROM otel.otel_traces"
    )
    return [span_of(row) for row in rows]


def span_of(row: dict[str, Any]) -> ReceivedSpan:
    """Convert a row to a span. The tables store values of attributes as text."""
    attributes = {
        key: _NUMBERS.get(key, str)(value) for key, value in row["SpanAttributes"].items()
    }
    return ReceivedSpan(
        trace_id=int(row["TraceId"], 16),
        span_id=int(row["SpanId"], 16),
        parent_id=int(row["ParentSpanId"], 16) if row["ParentSpanId"] else None,
        name=row["SpanName"],
        start_ns=int(row["start_ns"]),
        end_ns=int(row["start_ns"]) + int(row["Duration"]),
        attributes=attributes,
        resource=row["ResourceAttributes"],
        scope=row["ScopeName"],
        status={"Unset": "", "Ok": "ok"}.get(row["StatusCode"], row["StatusCode"]),
        links=tuple(
            (int(trace, 16), int(span, 16))
            for trace, span in zip(row["Links.TraceId"], row["Links.SpanId"], strict=True)
        ),
    )


def test_all_spans_are_stored_with_their_parents(
    found: list[ReceivedSpan], recorded: Recorded
) -> None:
    """All fields are compared, and times to the nanosecond."""
    expected = by_id(as_tuple(span) for span in recorded.spans())
    assert len({in_trace for in_trace, _ in expected}) == TRACES
    assert by_id({as_tuple(span) for span in found}) == expected


def test_replay_doubles_rows_and_limit_1_by_ids_removes_duplicates(
    clickhouse: ClickHouse, found: list[ReceivedSpan], recorded: Recorded
) -> None:
    """MergeTree tables have no unique keys, so each row is stored twice after two replays.

    docs/guides/backends.md explains the query.
    """
    expected = len(recorded.spans())
    assert len(found) == _TWICE * expected
    once = "FROM (SELECT * FROM otel.otel_traces LIMIT 1 BY TraceId, SpanId)"
    assert once in PAGE
    one = clickhouse.ask(f"SELECT count() AS n {once}")
    assert int(one[0]["n"]) == expected


def test_only_root_spans_link_to_the_callers_span(found: list[ReceivedSpan]) -> None:
    assert {span.links for span in found if span.parent_id is None} == {(CALLER,)}
    assert {span.links for span in found if span.parent_id is not None} == {()}


def test_spans_of_each_rank_have_their_own_resource(
    found: list[ReceivedSpan], recorded: Recorded
) -> None:
    """The resource is stored as text."""
    resources = recorded.resources()
    for span in found:
        of_rank = resources[span.attributes[semantics.RANK]]
        assert subset({key: str(value) for key, value in of_rank.items()}, span.resource)


def test_documented_query_returns_the_own_time_of_each_rank(
    clickhouse: ClickHouse, recorded: Recorded
) -> None:
    """The query in docs/guides/backends.md computes the median from spans."""
    query = PAGE.partition("```sql\n")[2].partition("```")[0].strip().rstrip(";")
    rows = clickhouse.ask(query)
    assert [int(row["rank"]) for row in rows] == [SLOW_RANK, 1 - SLOW_RANK]
    for row in rows:
        own_s = [
            span.attributes[semantics.OWN_SECONDS]
            for span in recorded.spans()
            if span.attributes.get(semantics.SPAN_KIND) == semantics.STEP_KIND
            and span.attributes[semantics.RANK] == int(row["rank"])
        ]
        assert row["own_ms"] == pytest.approx(1e3 * statistics.median(own_s), rel=1e-9)


def test_histograms_have_the_values_of_all_steps(
    clickhouse: ClickHouse, recorded: Recorded
) -> None:
    """Count, sum, minimum and maximum are compared in seconds.

    Each replay is a point.
    """
    rows = clickhouse.ask("SELECT * FROM otel.otel_metrics_exponential_histogram")
    expected = recorded.durations_s()
    points = [
        (
            (
                row["MetricName"],
                int(row["Attributes"][semantics.RANK]),
                row["Attributes"].get(semantics.PHASE, ""),
            ),
            row,
        )
        for row in rows
    ]
    assert {key for key, _ in points} == set(expected)
    assert len(points) == _TWICE * len(expected)
    for key, row in points:
        values = expected[key]
        assert (row["MetricUnit"], int(row["Count"])) == ("s", len(values))
        assert sum(int(count) for count in row["PositiveBucketCounts"]) == len(values)
        assert row["Sum"] == pytest.approx(sum(values), rel=1e-9)
        assert (row["Min"], row["Max"]) == (min(values), max(values))
    newest = "ORDER BY TimeUnix DESC LIMIT 1 BY MetricName, Attributes"
    assert newest in PAGE
    assert len(
        clickhouse.ask(f"SELECT 1 FROM otel.otel_metrics_exponential_histogram {newest}")
    ) == len(expected)


def test_counter_and_gauge_have_their_values_and_units(
    clickhouse: ClickHouse, recorded: Recorded
) -> None:
    """The counter has each rank's number of steps, and the gauge its memory after the last step."""
    for rank, memory_bytes in recorded.memory_bytes().items():
        of_rank = f"Attributes['{semantics.RANK}'] = '{rank}'"
        steps, *_ = clickhouse.ask(f"SELECT * FROM otel.otel_metrics_sum WHERE {of_rank}")
        memory = f"MetricName = '{semantics.MEMORY}' AND {of_rank}"
        usage, *_ = clickhouse.ask(f"SELECT * FROM otel.otel_metrics_gauge WHERE {memory}")
        expected = len(recorded.durations_s()[semantics.STEP_DURATION, rank, ""])
        assert (steps["MetricName"], steps["MetricUnit"], steps["Value"]) == (
            semantics.STEPS,
            "{step}",
            expected,
        )
        assert (usage["MetricUnit"], usage["Value"]) == ("By", memory_bytes)


def test_exemplars_have_the_ids_of_a_sampled_span(
    clickhouse: ClickHouse, recorded: Recorded
) -> None:
    """The histogram's exemplars point to the rank's span in a sampled step."""
    spans = {
        (f"{s.trace_id:032x}", f"{s.span_id:016x}"): s.duration_ns / 1e9 for s in recorded.spans()
    }
    rows = clickhouse.ask(
        "SELECT * FROM otel.otel_metrics_exponential_histogram WHERE MetricName ="
        f" '{semantics.STEP_DURATION}'"
    )
    for row in rows:
        columns = (row[f"Exemplars.{name}"] for name in ("TraceId", "SpanId", "Value"))
        exemplars = list(zip(*columns, strict=True))
        assert exemplars
        for in_trace, of_span, value in exemplars:
            assert spans[in_trace, of_span] == value


def test_alert_is_stored_with_its_sentence_severity_and_ids(clickhouse: ClickHouse) -> None:
    """The alert is about the slow rank.

    The table has no column for the event name. A row that a replay sends again has the
    log.record.uid of the first delivery.
    """
    rows = clickhouse.ask("SELECT * FROM otel.otel_logs")
    assert len(rows) == _TWICE * len({row["LogAttributes"][semantics.ALERT_UID] for row in rows})
    of_slow = [row for row in rows if row["LogAttributes"][semantics.RANK] == str(SLOW_RANK)]
    assert of_slow
    for row in of_slow:
        assert row["SeverityText"] == "WARN"
        assert row["Body"].startswith(f"Rank {SLOW_RANK} (")
        attributes = row["LogAttributes"]
        assert (int(attributes[semantics.RANK]), attributes[semantics.PHASE]) == (
            SLOW_RANK,
            "forward",
        )
        of_span = f"TraceId = '{row['TraceId']}' AND SpanId = '{row['SpanId']}'"
        span, *_ = clickhouse.ask(f"SELECT * FROM otel.otel_traces WHERE {of_span}")
        assert span["SpanName"] == f"{semantics.SPAN_RANK} {SLOW_RANK}"
