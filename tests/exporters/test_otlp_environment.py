"""The OTEL_* variables: which signals they enable, what they change, and invalid values."""

from __future__ import annotations

import bisect
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from tests.support.endpoints import serving
from tests.support.long import long, long_except
from tests.support.otlp_receiver import Receiver
from tests.support.recorded_run import TRACEPARENT, Sidecar, train, wait_for_sidecar
from tests.support.servers import free_port, wait_for
from tests.support.tables import step_table
from torchlens_perf.exporters import ExportBatch, semantics
from torchlens_perf.exporters.otlp_environment import (
    create_exporter_from_environment,
    read_enabled_signals,
)
from torchlens_perf.exporters.otlp_spans import step_trace_id
from torchlens_perf.exporters.redaction import RedactionFilter
from torchlens_perf.run.clock import HostClock
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.records import StepTrace
from torchlens_perf.run.ring import kind_name
from torchlens_perf.store.segments import SPANS
from torchlens_perf.verdicts import node_state

pytestmark = pytest.mark.distributed

Run = Callable[..., Sidecar]
CANARY = "canary7f3a9e51"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
HTTP = "http/protobuf"
LIBRARIES = ("opentelemetry", "grpc", "requests")


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, {}),
        ({ENDPOINT: ""}, {}),
        ({ENDPOINT: "http://c:4318"}, {"traces": HTTP, "metrics": HTTP, "logs": HTTP}),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, {"traces": HTTP}),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318/v1/metrics"}, {"metrics": HTTP}),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://c:4318/v1/logs"}, {"logs": HTTP}),
        (
            {ENDPOINT: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            {"traces": "grpc", "metrics": "grpc", "logs": "grpc"},
        ),
        (
            {ENDPOINT: "http://c", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": " grpc "},
            {"traces": "grpc", "metrics": HTTP, "logs": HTTP},
        ),
        ({ENDPOINT: "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, {}),
        ({ENDPOINT: "http://c", "OTEL_TRACES_EXPORTER": "none"}, {"metrics": HTTP, "logs": HTTP}),
        ({ENDPOINT: "http://c", "OTEL_METRICS_EXPORTER": "none"}, {"traces": HTTP, "logs": HTTP}),
        ({ENDPOINT: "http://c", "OTEL_LOGS_EXPORTER": "none"}, {"traces": HTTP, "metrics": HTTP}),
        ({ENDPOINT: "http://c", "OTEL_TRACES_EXPORTER": "zipkin"}, {"metrics": HTTP, "logs": HTTP}),
        ({ENDPOINT: "http://c", "OTEL_SDK_DISABLED": "TRUE"}, {}),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, {"traces": HTTP}),
        ({"OTEL_LOGS_EXPORTER": "console"}, {"logs": "console"}),
        ({"OTEL_TRACES_EXPORTER": "console"}, {"traces": "console"}),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_RESOURCE_ATTRIBUTES": "a=b", HEADERS: "a=b"}, {}),
    ],
)
def test_endpoint_or_exporter_name_enables_a_signal(
    told: dict[str, str], expected: dict[str, str]
) -> None:
    """The exporter "none", OTEL_SDK_DISABLED and unknown names disable the signal."""
    assert expected == read_enabled_signals(told)


@pytest.mark.parametrize(
    "told",
    [
        {"OTEL_SERVICE_NAME": "x", HEADERS: "a=b"},
        {ENDPOINT: "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        *long(
            {},
            {f"OTEL_{name}_EXPORTER": "none" for name in ("TRACES", "METRICS", "LOGS")}
            | {ENDPOINT: "http://127.0.0.1:1"},
        ),
    ],
    ids=["no endpoint", "disabled", "nothing is set", "all signals none"],
)
def test_sdk_is_not_imported_without_an_endpoint(sidecar: Run, told: dict[str, str]) -> None:
    """The sidecar imports neither the OpenTelemetry SDK nor gRPC nor requests."""
    loaded = f"print([name for name in sys.modules if name.partition('.')[0] in {LIBRARIES}])"
    ended = sidecar(then=loaded, **told)
    assert (ended.returncode, ended.stdout) == (0, "[]\n")


def test_global_opentelemetry_providers_are_not_set(sidecar: Run, receiver: Receiver) -> None:
    asked = (
        "from opentelemetry import _logs, metrics, trace\nproviders = trace.get_tracer_provider(),"
        " metrics.get_meter_provider(), _logs.get_logger_provider()\nprint(*(type(each).__name__"
        " for each in providers))"
    )
    ended = sidecar(then=asked, **{ENDPOINT: receiver.endpoint("http/protobuf")})
    assert ended.stdout == "ProxyTracerProvider _ProxyMeterProvider ProxyLoggerProvider\n"
    assert receiver.spans()


def arrived(receiver: Receiver) -> tuple[bool, bool]:
    """Return whether spans and whether metrics have arrived."""
    return bool(receiver.spans()), bool(receiver.points())


def test_signals_may_have_different_endpoints_and_protocols(
    sidecar: Run, receiver: Receiver
) -> None:
    """Traces are sent to one endpoint over gRPC, and metrics to another over HTTP."""
    ended = sidecar(
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=receiver.endpoint("grpc"),
        OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="grpc",
        OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=f"{receiver.endpoint('http/protobuf')}/v1/metrics",
    )
    assert (ended.returncode, arrived(receiver)) == (0, (True, True))


@pytest.mark.parametrize("protocol", ["http/protobuf", *long("grpc")])
@pytest.mark.parametrize(
    ("signal", "expected"),
    [("TRACES", (False, True)), *long(("METRICS", (True, False)))],
    ids=["traces", "metrics"],
)
def test_exporter_none_disables_one_signal_and_keeps_the_other(
    sidecar: Run, receiver: Receiver, protocol: str, signal: str, expected: tuple[bool, bool]
) -> None:
    """The test also uses gzip."""
    ended = sidecar(
        **{
            ENDPOINT: receiver.endpoint(protocol),
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            f"OTEL_{signal}_EXPORTER": "none",
        }
    )
    assert (0, expected) == (ended.returncode, arrived(receiver))


def test_console_exporter_prints_without_an_endpoint(sidecar: Run) -> None:
    """OTEL_*_EXPORTER=console prints to the sidecar's output."""
    ended = sidecar(OTEL_TRACES_EXPORTER="console", OTEL_METRICS_EXPORTER="console")
    assert ended.returncode == 0
    assert f"{semantics.SPAN_RANK} {0}" in ended.stdout
    assert semantics.STEP_DURATION in ended.stdout


@pytest.mark.parametrize(
    ("insecure", "delivered"),
    [*long(("true", True)), (None, False), *long(("false", False))],
    ids=["insecure", "default", "tls"],
)
def test_grpc_endpoint_without_a_scheme_uses_tls(
    sidecar: Run, receiver: Receiver, insecure: str | None, delivered: bool
) -> None:
    """OTEL_EXPORTER_OTLP_INSECURE switches TLS off."""
    told = {} if insecure is None else {"OTEL_EXPORTER_OTLP_INSECURE": insecure}
    ended = sidecar(
        OTEL_EXPORTER_OTLP_ENDPOINT=f"127.0.0.1:{receiver.grpc_port}",
        OTEL_EXPORTER_OTLP_PROTOCOL="grpc",
        OTEL_EXPORTER_OTLP_TIMEOUT="1",
        **told,
    )
    assert (0, (delivered, delivered)) == (ended.returncode, arrived(receiver))
    assert ("spans were not delivered" in ended.report) is not delivered


OFF = "exporting traces over OTLP failed and was skipped"
# Variable, value, protocol, text in the log, and whether spans and metrics arrive nevertheless.
WRONG = [
    (
        "OTEL_EXPORTER_OTLP_PROTOCOL",
        "carrier-pigeon",
        "http",
        "OTLP protocol 'carrier-pigeon'",
        (False, False),
    ),
    ("OTEL_TRACES_EXPORTER", "zipkin", "http", "OTEL_TRACES_EXPORTER=zipkin", (False, True)),
    ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "http", "timeout value 'soon'", (True, True)),
    (
        "OTEL_EXPORTER_OTLP_COMPRESSION",
        "brotli",
        "grpc",
        OFF,
        (False, False),
    ),
    ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "grpc", OFF, (False, False)),
    ("OTEL_EXPORTER_OTLP_COMPRESSION", "brotli", "http", "Unsupported compression", (True, True)),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost", "http", "No scheme supplied", (False, False)),
    ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere.pem", "http", "", (True, True)),
    ("OTEL_BSP_SCHEDULE_DELAY", "-1", "http", "-1 is no positive whole number", (True, True)),
    ("OTEL_METRIC_EXPORT_INTERVAL", "-5", "http", "-5 is no positive whole number", (True, True)),
    (
        "OTEL_METRIC_EXPORT_INTERVAL",
        "often",
        "http",
        "often is no positive whole number",
        (True, True),
    ),
    ("OTEL_METRICS_EXEMPLAR_FILTER", "maybe", "http", "", (True, True)),
    ("OTEL_TRACES_SAMPLER", "perhaps", "http", "Couldn't recognize sampler perhaps", (True, True)),
    (
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
        "few",
        "http",
        OFF,
        (False, False),
    ),
    ("OTEL_RESOURCE_ATTRIBUTES", "nonsense", "http", "nonsense", (True, True)),
    (
        "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE",
        "sideways",
        "http",
        "SIDEWAYS",
        (True, True),
    ),
]


@pytest.mark.parametrize(
    ("variable", "value", "protocol", "logged", "expected"),
    [*WRONG[:1], *long(*WRONG[1:])],
    ids=[
        f"{name.removeprefix('OTEL_')}={value}-{protocol}" for name, value, protocol, _, _ in WRONG
    ],
)
def test_invalid_value_is_logged_and_disables_at_most_its_signal(
    sidecar: Run,
    receiver: Receiver,
    variable: str,
    value: str,
    protocol: str,
    logged: str,
    expected: tuple[bool, bool],
) -> None:
    """The run's report is complete."""
    told = {
        ENDPOINT: receiver.endpoint("grpc" if protocol == "grpc" else "http/protobuf"),
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc" if protocol == "grpc" else "http/protobuf",
        variable: value,
    }
    ended = sidecar(**told)
    assert (0, expected) == (ended.returncode, arrived(receiver))
    assert logged in ended.log
    assert "\n  directory   " in ended.report


def everything_written(run: RunDirectory) -> str:
    """Return all contents of the run directory as text.

    For a Parquet file, the text has its rows and its footer.
    """
    texts = []
    for path in run.path.rglob("*"):
        if path.suffix == ".parquet":
            texts += [str(pq.read_table(path).to_pylist()), str(pq.read_schema(path).metadata)]
        elif path.is_file():
            texts.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(texts)


SECRETS = {
    "colon": {HEADERS: f"Authorization: Bearer {CANARY}"},
    "no separator": {HEADERS: f"{CANARY}"},
    "good": {HEADERS: f"authorization=Bearer%20{CANARY},x-team=blue"},
    "line break": {HEADERS: f"authorization=Bearer%0A{CANARY}"},
    "of one signal": {"OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"authorization=Bearer%0A{CANARY}"},
    "not ASCII": {HEADERS: f"authorization=%C3%A9{CANARY}"},
}
ADDRESSES = {
    "user in the address": f"http://me:{CANARY}@127.0.0.1:1",
    "key in the address": f"http://127.0.0.1:1/v1/traces?api-key={CANARY}",
}


@pytest.mark.parametrize("protocol", ["http/protobuf", *long("grpc")])
@pytest.mark.parametrize("name", long_except({"of one signal"}, SECRETS))
def test_header_values_are_in_no_log_report_state_or_record(
    sidecar: Run, receiver: Receiver, name: str, protocol: str
) -> None:
    """The headers may be valid or invalid."""
    ended = sidecar(
        **{
            ENDPOINT: receiver.endpoint(protocol),
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
            **SECRETS[name],
        }
    )
    assert ended.returncode == 0
    assert CANARY not in ended.log + ended.stdout + everything_written(ended.run)


@pytest.mark.parametrize("protocol", ["http/protobuf", *long("grpc")])
@pytest.mark.parametrize("address", ADDRESSES.values(), ids=ADDRESSES)
def test_only_host_and_path_of_an_address_are_shown(
    sidecar: Run, address: str, protocol: str
) -> None:
    """Logs, reports, states and records are checked."""
    ended = sidecar(
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=address,
        OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        OTEL_EXPORTER_OTLP_TIMEOUT="1",
    )
    assert ended.returncode == 0
    assert "spans were not delivered" in ended.report
    assert CANARY not in ended.log + ended.stdout + everything_written(ended.run)


def test_endpoint_receives_a_valid_header_decoded(sidecar: Run) -> None:
    seen: list[str | None] = []

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            seen.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with serving(Endpoint) as address:
        sidecar(**{ENDPOINT: address, HEADERS: f"Authorization=Bearer%20{CANARY}"})
    assert {f"Bearer {CANARY}"} == set(seen)


@pytest.mark.long
def test_training_finishes_with_invalid_variables(tmp_path: Path) -> None:
    """No output contains the secret in a variable."""
    told = {
        ENDPOINT: f"http://127.0.0.1:{free_port()}",
        HEADERS: f"Authorization: Bearer {CANARY}",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_BSP_MAX_QUEUE_SIZE": "many",
        "OTEL_METRIC_EXPORT_INTERVAL": "often",
        "OTEL_TRACES_SAMPLER": "perhaps",
        "OTEL_RESOURCE_ATTRIBUTES": "nonsense",
        "TRACEPARENT": "yesterday",
    }
    run = train(tmp_path, told)
    wait_for_sidecar(run, 30)
    (node,) = node_state.load_all(run)
    written = everything_written(run)
    assert sorted(process.identity.rank for process in node.processes.values()) == [0, 1]
    assert "Header format invalid" in written
    assert "Authorization: ***" in written
    assert CANARY not in written


@pytest.mark.parametrize(
    ("sampler", "rate"),
    [
        ("traceidratio", 0.5),
        *long(("parentbased_traceidratio", 0.0), ("traceidratio", 0.0), ("traceidratio", 1.0)),
        *long(("parentbased_traceidratio", 0.5), ("parentbased_traceidratio", 1.0)),
    ],
)
def test_ratio_sampler_selects_the_same_steps_on_all_ranks(
    sidecar: Run, receiver: Receiver, sampler: str, rate: float
) -> None:
    """OTEL_TRACES_SAMPLER selects traces by id."""
    ended = sidecar(
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint("http/protobuf"),
        OTEL_TRACES_SAMPLER=sampler,
        OTEL_TRACES_SAMPLER_ARG=str(rate),
    )
    rows = pq.read_table(ended.run.path / "spans").to_pylist()
    spans = {kind_name(kind) for kind in SPANS}  # The other kinds are counters.
    rows = [row for row in rows if row["kind"] in spans]
    decide = TraceIdRatioBased(rate)
    expected: dict[tuple[int, int], int] = defaultdict(int)
    for row in rows:
        in_trace = step_trace_id(ended.run.run_id, 0, row["step"])
        if decide.should_sample(Context(), in_trace, "").decision is Decision.RECORD_AND_SAMPLE:
            expected[row["step"], row["rank"]] += 1
    for step, rank in list(expected):
        expected[step, rank] += rank == 0  # Rank 0 also sends the root span.
    found: dict[tuple[int, int], int] = defaultdict(int)
    for span in (span for span in receiver.spans() if span.name != semantics.SPAN_RUN):
        found[span.attributes[semantics.STEP], span.attributes[semantics.RANK]] += 1
    assert {step for step, rank in expected if rank == 0} == {
        step for step, rank in expected if rank == 1
    }
    whole_steps = {row["step"] for row in rows if row["kind"] == "step"}
    assert {key: count for key, count in expected.items() if key[0] in whole_steps} == found
    assert receiver.points()


def test_batch_size_of_the_environment_limits_the_spans_of_a_request(
    sidecar: Run, receiver: Receiver
) -> None:
    """The variable is OTEL_BSP_MAX_EXPORT_BATCH_SIZE."""
    sidecar(
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint("http/protobuf"),
        OTEL_BSP_MAX_EXPORT_BATCH_SIZE="7",
    )
    assert max(receiver.batches()) == 7


def one_step() -> ExportBatch:
    """Return a step of one rank with its trace."""
    identity = Identity("run", 0, 0, 1, 1, 0, "host", 1, 1, 1, False, "train.py", "", {})
    return ExportBatch(
        identity,
        HostClock().anchor(),
        step_table([{"forward": 1}]),
        (StepTrace(0, 1_000_000, 1_000_000, 0, ()),),
    )


def test_export_intervals_of_the_environment_apply(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables are OTEL_BSP_SCHEDULE_DELAY and OTEL_METRIC_EXPORT_INTERVAL."""
    told = {
        ENDPOINT: receiver.endpoint("http/protobuf"),
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "OTEL_METRIC_EXPORT_INTERVAL": "50",
    }
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    exporter = create_exporter_from_environment()
    assert exporter is not None
    started_s = time.monotonic()
    exporter.export(one_step())
    wait_for(lambda: arrived(receiver) == (True, True), 4)
    took_s = time.monotonic() - started_s
    assert exporter.shutdown(10) == []
    assert took_s < 4  # The defaults are 5 s for spans and 60 s for metrics.


def test_delta_points_of_metrics_add_up_to_the_totals(sidecar: Run, receiver: Receiver) -> None:
    """The test has histograms and counters with delta temporality."""
    sidecar(
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint("http/protobuf"),
        OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE="delta",
    )
    assert {"delta"} == {p.temporality for p in receiver.points() if p.form in ("histogram", "sum")}


def test_each_value_is_in_its_explicit_bucket(sidecar: Run, receiver: Receiver) -> None:
    ended = sidecar(
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint("http/protobuf"),
        OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION="explicit_bucket_histogram",
    )
    rows = pq.read_table(ended.run.path / "steps").to_pylist()
    points = [point for point in receiver.points() if point.metric == semantics.STEP_DURATION]
    assert {("histogram", semantics.DURATION_BOUNDS_S)} == {
        (point.form, point.bounds) for point in points
    }
    for point in points:
        values = [
            row["duration_ns"] / 1e9
            for row in rows
            if row["rank"] == point.attributes[semantics.RANK]
        ]
        places = Counter(bisect.bisect_left(semantics.DURATION_BOUNDS_S, value) for value in values)
        assert list(point.buckets) == [
            places[place] for place in range(len(semantics.DURATION_BOUNDS_S) + 1)
        ]


def test_service_name_of_the_user_overrides_detected_attributes(
    sidecar: Run, receiver: Receiver
) -> None:
    """The variables are OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES."""
    sidecar(
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint("http/protobuf"),
        OTEL_SERVICE_NAME="my-job",
        OTEL_RESOURCE_ATTRIBUTES=(
            "service.name=loses,host.name=my-host,deployment.environment.name=test"
        ),
    )
    expected = {
        "service.name": "my-job",
        "host.name": "my-host",
        "deployment.environment.name": "test",
    }
    for sent in (*receiver.spans(), *receiver.points()):
        assert expected.items() <= sent.resource.items()


def test_only_root_spans_link_to_the_traceparent(sidecar: Run, receiver: Receiver) -> None:
    """The linked trace is the one in which the job was started."""
    sidecar(OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint("http/protobuf"))
    _, in_trace, of_span, _ = TRACEPARENT.split("-")
    spans = [span for span in receiver.spans() if span.name != semantics.SPAN_RUN]
    roots = [span for span in spans if span.parent_id is None]
    others = [span for span in spans if span.parent_id is not None]
    assert {((int(in_trace, 16), int(of_span, 16)),)} == {span.links for span in roots}
    assert {()} == {span.links for span in others}


def test_secrets_are_removed_from_logged_tracebacks() -> None:
    record = logging.LogRecord("x", logging.ERROR, "", 0, "failed: %s", ("Bearer " + CANARY,), None)
    try:
        raise ValueError(f"invalid metadata {CANARY!r}")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    assert RedactionFilter({HEADERS: f"authorization=Bearer {CANARY}"}).filter(record)
    text = logging.Formatter().format(record)
    assert CANARY not in text
    assert "invalid metadata '***'" in text


def test_short_header_values_are_not_redacted_in_the_log() -> None:
    """A short header value is no secret, and replacing it could make the log unreadable."""
    record = logging.LogRecord("x", logging.ERROR, "", 0, "%d spans in 10 s", (2020,), None)
    RedactionFilter({HEADERS: "x-experiment-id=0"}).filter(record)
    assert record.getMessage() == "2020 spans in 10 s"
