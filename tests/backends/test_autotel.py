"""Tests of a run's traces, alert and metrics in autotel-devtools, whose OTLP decoder is written in
JavaScript.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends import shots
from tests.backends.recorded import CALLER, SLOW_RANK, TRACES, Recorded, as_tuple, by_id, subset
from tests.backends.server import environment, get, is_up, status_of
from tests.support.otlp_receiver import ReceivedSpan
from tests.support.servers import Server, free_port
from torchlens_perf.exporters import semantics

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(600)]

_PROGRAM = "npm/node_modules/autotel-devtools/dist/cli.js"
_OF_RESOURCE = ("telemetry.", "service.", "host.", "process.", "torch.elastic.")


class Autotel:
    """A running server."""

    def __init__(self, folder: Path) -> None:
        installed = environment("autotel")
        port, grpc_port = free_port(), free_port()
        self.address, self.grpc = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{grpc_port}"
        self.store = folder / "autotel.db"
        command = [
            str(installed / "node"), str(installed / _PROGRAM), "--host", "127.0.0.1", "--port", str(port),
            "--grpc-port", str(grpc_port), "--db", str(self.store),
        ]  # fmt: skip
        self.server = Server(command, folder, lambda: is_up(f"{self.address}/healthz"))

    def exporter_variables(self, protocol: str) -> dict[str, str]:
        """Return the variables that docs/guides/backends.md documents."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.grpc if protocol == "grpc" else self.address,
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        }

    def ask(self) -> list[dict[str, Any]]:
        """Return all stored spans."""
        return [
            span for trace in get(f"{self.address}/v1/traces")["traces"] for span in trace["spans"]
        ]

    def select(self, what: str) -> list[dict[str, Any]]:
        """Query the SQLite store, which the page reads too.

        autotel-devtools has no interface for reading metrics and logs.
        """
        with contextlib.closing(sqlite3.connect(f"file:{self.store}?mode=ro", uri=True)) as store:
            store.row_factory = sqlite3.Row
            return [dict(row) for row in store.execute(what)]


def span_of(found: dict[str, Any]) -> ReceivedSpan:
    """Convert a span of GET /v1/traces, which merges the resource's attributes into the span's."""
    own = {
        key: value for key, value in found["attributes"].items() if not key.startswith(_OF_RESOURCE)
    }
    own = {
        key: value
        for key, value in own.items()
        if key not in (semantics.WORLD_SIZE, semantics.LOCAL_RANK)
    }
    parent = found.get("parentSpanId")
    return ReceivedSpan(
        trace_id=int(found["traceId"], 16),
        span_id=int(found["spanId"], 16),
        parent_id=int(parent, 16) if parent else None,
        name=found["name"],
        start_ns=found["startTime"],
        end_ns=found["endTime"],
        attributes=own,
        resource=found["attributes"],
        scope="",
        status={"UNSET": "", "OK": "ok"}.get(found["status"]["code"], found["status"]["code"]),
        links=tuple((int(link["traceId"], 16), int(link["spanId"], 16)) for link in found["links"]),
    )


@pytest.fixture(scope="module")
def autotel(tmp_path_factory: pytest.TempPathFactory, recorded: Recorded) -> Iterator[Autotel]:
    """Return a server that received the run over HTTP and again over gRPC."""
    started = Autotel(tmp_path_factory.mktemp("autotel"))
    for protocol in ("http/protobuf", "grpc"):
        recorded.send(**started.exporter_variables(protocol))
    yield started
    started.server.close()


@pytest.fixture(scope="module")
def found(autotel: Autotel) -> list[dict[str, Any]]:
    return autotel.ask()


def assert_same(found: list[dict[str, Any]], recorded: Recorded) -> None:
    """Check that each span of both ranks occurs once, with ids, parent, name, attributes, error and
    times.

    JavaScript stores times as milliseconds in a double, which is precise to 0.25 us at today's
    dates.
    """
    expected = by_id(as_tuple(span) for span in recorded.spans())
    got = by_id(as_tuple(span_of(each)) for each in found)
    assert len({in_trace for in_trace, _ in expected}) == TRACES
    assert {key: (*span[:4], *span[6:]) for key, span in got.items()} == {
        key: (*span[:4], *span[6:]) for key, span in expected.items()
    }
    for key, span in expected.items():
        for mine, theirs in zip(span[4:6], got[key][4:6], strict=True):
            assert abs(mine / 1e6 - theirs) <= 0.00025


def test_all_spans_are_stored_once_with_their_parents(
    found: list[dict[str, Any]], recorded: Recorded
) -> None:
    """The run was sent twice."""
    assert_same(found, recorded)


def test_posted_lines_of_an_otlp_json_file_give_the_same_spans(
    tmp_path: Path, recorded: Recorded
) -> None:
    """The lines are posted one by one."""
    recorded.send(OTEL_TRACES_EXPORTER="otlp_json_file")
    later = Autotel(tmp_path)
    try:
        for line in (recorded.run.path / "otlp" / "replay-traces.jsonl").read_bytes().splitlines():
            assert (
                status_of(
                    f"{later.address}/v1/traces", line, **{"Content-Type": "application/json"}
                )
                == 200
            )
        assert_same(later.ask(), recorded)
    finally:
        later.server.close()


def test_gzip_over_http_is_rejected(autotel: Autotel) -> None:
    """The same request without gzip is accepted."""
    assert status_of(f"{autotel.address}/v1/traces") == 200
    assert (
        status_of(
            f"{autotel.address}/v1/traces", gzip.compress(b""), **{"Content-Encoding": "gzip"}
        )
        == 400
    )


def test_only_root_spans_link_to_the_callers_span(found: list[dict[str, Any]]) -> None:
    spans = [span_of(each) for each in found]
    assert [span.links for span in spans if span.parent_id is None] == [(CALLER,)] * TRACES
    assert {span.links for span in spans if span.parent_id is not None} == {()}


def test_spans_of_each_rank_have_their_own_resource(
    found: list[dict[str, Any]], recorded: Recorded
) -> None:
    """A trace of two ranks therefore has two resources."""
    resources = recorded.resources()
    for each in found:
        assert subset(resources[each["attributes"][semantics.RANK]], each["attributes"])


def test_each_alert_is_one_log_record(autotel: Autotel, recorded: Recorded) -> None:
    """The run was sent twice.

    The slow rank's record has the report's sentence, the rank and its span's ids.
    """
    alerts = [
        (alert, json.loads(alert["attributes"])) for alert in autotel.select("SELECT * FROM logs")
    ]
    assert len({attributes[semantics.ALERT_UID] for _, attributes in alerts}) == len(alerts)
    (alert, attributes), *_ = [each for each in alerts if each[1][semantics.RANK] == SLOW_RANK]
    assert alert["severity_text"] == "WARN"
    assert alert["body_text"].startswith(f"Rank {SLOW_RANK} (")
    assert alert["body_text"].partition(" Next: ")[0] in " ".join(
        recorded.run.report.read_text().split()
    )
    assert (attributes[semantics.RANK], attributes[semantics.PHASE]) == (SLOW_RANK, "forward")
    of_slow = [
        span
        for span in recorded.spans()
        if span.attributes.get(semantics.SPAN_KIND) == semantics.STEP_KIND
    ]
    ids = {
        (f"{s.trace_id:032x}", f"{s.span_id:016x}")
        for s in of_slow
        if s.attributes[semantics.RANK] == SLOW_RANK
    }
    assert (alert["trace_id"], alert["span_id"]) in ids


def points(autotel: Autotel, metric: str) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Return a metric's points by rank and phase, in order of time."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    rows = autotel.select(
        "SELECT * FROM metric_points JOIN metric_series USING (series_id) "
        f"WHERE name = '{metric}' ORDER BY metric_points.timestamp"
    )
    for row in rows:
        attributes = json.loads(row["attributes"])
        found.setdefault(
            (attributes[semantics.RANK], attributes.get(semantics.PHASE, "")), []
        ).append(row)
    return found


def test_histograms_have_the_values_of_all_steps(autotel: Autotel, recorded: Recorded) -> None:
    """Count, sum, minimum and maximum are compared in seconds.

    The second export of the run adds a second point to the same series.

    The count of an exponential histogram is not stored, but its buckets are.
    """
    expected = recorded.durations_s()
    for metric in (semantics.STEP_DURATION, semantics.STEP_OWN_TIME, semantics.PHASE_DURATION):
        found = points(autotel, metric)
        assert set(found) == {(rank, phase) for name, rank, phase in expected if name == metric}
        for (rank, phase), of_series in found.items():
            values = expected[metric, rank, phase]
            assert len(of_series) == 2
            for point in of_series:
                assert (point["unit"], point["kind"], point["count"]) == (
                    "s",
                    "exponentialHistogram",
                    None,
                )
                assert sum(json.loads(point["positive_buckets"])["bucketCounts"]) == len(values)
                assert point["sum"] == pytest.approx(sum(values), rel=1e-9)
                assert (point["min"], point["max"]) == (min(values), max(values))


def test_exemplars_have_the_ids_of_a_sampled_span(autotel: Autotel, recorded: Recorded) -> None:
    """The histogram's exemplars point to the rank's span in a sampled step."""
    spans = {
        (f"{s.trace_id:032x}", f"{s.span_id:016x}"): s.duration_ns / 1e9 for s in recorded.spans()
    }
    for of_series in points(autotel, semantics.STEP_DURATION).values():
        exemplars = json.loads(of_series[-1]["exemplars"])
        assert exemplars
        for each in exemplars:
            assert spans[each["traceId"], each["spanId"]] == each["value"]


@shots.shots
def test_screenshot_of_a_trace_is_taken(autotel: Autotel, recorded: Recorded) -> None:
    with shots.page(height=1520) as shown:
        shown.goto(autotel.address)
        shown.get_by_text(semantics.SPAN_STEP, exact=True).first.click()
        shots.save(shown, "autotel")
