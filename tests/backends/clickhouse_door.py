"""An HTTP server for ClickHouse's engine in chdb, which has no server of its own.

Usage, in chdb's environment: clickhouse_door.py PORT FOLDER

As with ClickHouse's server, `query` contains statements, and the body contains data to insert.

The server runs one statement at a time, because the engine has one session.
"""

import http.server
import sys
import threading
import urllib.parse
from pathlib import Path

from chdb import session

# Tables of the OpenTelemetry Collector's exporter for ClickHouse, with names and types of columns.
# Indices and codecs are left out, because they do not change the stored values.
_MAP = "Map(LowCardinality(String), String)"
_EXEMPLARS = f"""Exemplars Nested (
    FilteredAttributes {_MAP}, TimeUnix DateTime64(9), Value Float64, SpanId String, TraceId String)"""
_OF_POINT = f"""
    ResourceAttributes {_MAP}, ResourceSchemaUrl String,
    ScopeName String, ScopeVersion String, ScopeAttributes {_MAP}, ScopeDroppedAttrCount UInt32, ScopeSchemaUrl String,
    ServiceName LowCardinality(String), MetricName String, Metric String, MetricUnit String,
    Attributes {_MAP}, StartTimeUnix DateTime64(9), TimeUnix DateTime64(9), Flags UInt32"""
_TABLES = {
    "otel_traces": (
        f"""Timestamp DateTime64(9), TraceId String, SpanId String, ParentSpanId String, TraceState String,
    SpanName LowCardinality(String), SpanKind LowCardinality(String), ServiceName LowCardinality(String),
    ResourceAttributes {_MAP}, ScopeName String, ScopeVersion String, SpanAttributes {_MAP}, Duration Int64,
    StatusCode LowCardinality(String), StatusMessage String,
    Events Nested (Timestamp DateTime64(9), Name LowCardinality(String), Attributes {_MAP}),
    Links Nested (TraceId String, SpanId String, TraceState String, Attributes {_MAP})""",
        "ServiceName, SpanName, toUnixTimestamp(Timestamp), TraceId",
    ),
    "otel_logs": (
        f"""Timestamp DateTime64(9), TraceId String, SpanId String, TraceFlags UInt8,
    SeverityText LowCardinality(String), SeverityNumber UInt8, ServiceName LowCardinality(String), Body String,
    ResourceSchemaUrl String, ResourceAttributes {_MAP}, ScopeSchemaUrl String,
    ScopeName String, ScopeVersion String, ScopeAttributes {_MAP}, LogAttributes {_MAP}""",
        "ServiceName, Timestamp",
    ),
    "otel_metrics_gauge": (
        f"{_OF_POINT}, Value Float64, {_EXEMPLARS}",
        "ServiceName, MetricName, Attributes, TimeUnix",
    ),
    "otel_metrics_sum": (
        (
            f"{_OF_POINT}, Value Float64, AggregationTemporality Int32, IsMonotonic Boolean,"
            f" {_EXEMPLARS}"
        ),
        "ServiceName, MetricName, Attributes, TimeUnix",
    ),
    "otel_metrics_exponential_histogram": (
        f"""{_OF_POINT}, Count UInt64, Sum Float64, Scale Int32, ZeroCount UInt64, PositiveOffset Int32,
    PositiveBucketCounts Array(UInt64), NegativeOffset Int32, NegativeBucketCounts Array(UInt64),
    Min Float64, Max Float64, AggregationTemporality Int32, {_EXEMPLARS}""",
        "ServiceName, MetricName, Attributes, TimeUnix",
    ),
}


class Door(http.server.BaseHTTPRequestHandler):
    """Handles POST /?database=NAME&query=STATEMENT."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, b"Ok.\n")

    def do_POST(self) -> None:
        body = self._body()
        asked = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        statement = asked.get("query") or body.decode()
        head, inserts, form = statement.rpartition(" FORMAT ")
        with _ONE:
            try:
                if inserts and head.startswith("INSERT"):
                    _BODY.write_bytes(body)
                    _ENGINE.query(f"{head} FROM INFILE '{_BODY}' FORMAT {form}")
                    answer = b""
                else:
                    answer = _ENGINE.query(head or statement, form or "TSV").bytes()
            except RuntimeError as error:  # The ClickHouse engine raises this error.
                sys.stderr.write(f"{statement[:300]}: {error}\n")
                self._answer(400, str(error).encode())
                return
        self._answer(200, answer)

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", "0")))
        found = b""
        while size := int(self.rfile.readline().strip(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


_FOLDER = Path(sys.argv[2])
_BODY = _FOLDER / "body"
_ONE = threading.Lock()
_ENGINE = session.Session(str(_FOLDER / "data"))
_ENGINE.query("CREATE DATABASE otel")
for table, (columns, order) in _TABLES.items():
    _ENGINE.query(f"CREATE TABLE otel.{table} ({columns}) ENGINE = MergeTree ORDER BY ({order})")
_ENGINE.query("USE otel")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Door).serve_forever()
