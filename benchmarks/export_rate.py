"""Rate of spans from a run directory to an OTLP endpoint, compared with the SDK's tracer.

    python -m benchmarks.export_rate [--endpoint http://127.0.0.1:4318] [--repeats 5]

Without --endpoint, this benchmark starts an endpoint that reads and answers each request. The SDK
is used as in its documentation: a tracer, spans with explicit times, a batch processor and the same
exporter. One thread's processor time limits our sender and the SDK, so the table also shows this
time.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.measure import Table
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Kind, record_dtype
from torchlens_perf.store.segments import RecordChunk, RecordOrigin, SegmentWriter

RANKS, STEPS, LAYERS = 8, 250, 24
# 25 times the maximum rate of a whole job.
BAR_SPANS_A_SECOND = 5_000
MS = 1_000_000


def main() -> int:
    """Print the table. Return the number of missed bars."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--endpoint",
        default="",
        help="of an OTLP/HTTP receiver; default: one in another process here",
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as leaving:
        spans = record(RunDirectory(Path(folder) / "run"))
        endpoint = options.endpoint or leaving.enter_context(sink())
        rates: dict[str, list[tuple[float, float]]] = {
            "torchlens_perf": [],
            "OpenTelemetry SDK": [],
        }
        # Alternate between our sender and the SDK, because the machine's speed changes over time.
        for _ in range(options.repeats):
            rates["torchlens_perf"].append(run("ours", Path(folder) / "run", endpoint))
            rates["OpenTelemetry SDK"].append(run("sdk", Path(folder) / "run", endpoint))
    table = Table(
        f"{spans} spans, run directory to {options.endpoint or 'a process that reads and answers'}",
        "value",
        "bar",
        "",
    )
    for name, found in rates.items():
        values = sorted(spans / seconds for seconds, _ in found)
        median = statistics.median(values)
        of = f" ({values[0]:,.0f} to {values[-1]:,.0f})"
        bar = f">= {BAR_SPANS_A_SECOND:,}" if name == "torchlens_perf" else ""
        met = table.bar(median >= BAR_SPANS_A_SECOND) if bar else ""
        table.row(f"{name}, spans a second", f"{median:,.0f}{of}", bar, met)
        processor_us = statistics.median(seconds for _, seconds in found) / spans * 1e6
        table.row(f"{name}, processor time a span", f"{processor_us:.1f} us", "", "")
    return table.missed


def record(run: RunDirectory) -> int:
    """Write the segment files of a finished run.

    Return the run's number of spans, including the spans of steps.
    """
    run.create()
    names = ["", "forward GPT", "optimizer AdamW", "all_reduce dp float32"]
    names += [f"blocks.{layer}{part}" for layer in range(LAYERS) for part in ("", ".mlp")]
    spans = 0
    chunks = []
    for rank in range(RANKS):
        rows: list[tuple[int, ...]] = []
        for step in range(STEPS):
            at = step * 100 * MS
            rows += [(Kind.DATA, 1, 0, step, at, MS), (Kind.FORWARD, 1, 1, step, at + MS, 30 * MS)]
            for layer in range(LAYERS):
                begin = at + MS * (1 + layer)
                rows += [
                    (Kind.MODULE, 3, 5 + 2 * layer, step, begin, MS // 2),
                    (Kind.MODULE, 2, 4 + 2 * layer, step, begin, MS),
                    (Kind.COLLECTIVE, 2, 3, step, at + MS * (33 + layer), MS),
                ]
            rows += [
                (Kind.BACKWARD, 1, 0, step, at + 32 * MS, 50 * MS),
                (Kind.OPTIMIZER, 1, 2, step, at + 83 * MS, MS),
            ]
            rows.append((Kind.STEP, 0, 0, step, at, 100 * MS))
        records = np.zeros(len(rows), record_dtype())
        for field, column in zip(
            ("kind", "depth", "name_id", "step", "start_ns", "duration_ns"),
            np.array(rows).T,
            strict=True,
        ):
            records[field] = column
        records["value1"] = 1
        spans += len(rows) + (STEPS if rank == 0 else 0)
        origin = RecordOrigin(
            f"rank{rank:05d}-attempt0-1", rank, 0, "node", Anchor(0, 1_700_000_000 * 10**9, 0)
        )
        chunks.append(
            RecordChunk(origin, records, np.arange(len(rows)), names, assemble_steps(records))
        )
    writer = SegmentWriter(run, "node", 1 << 30)
    writer.add_chunks(chunks)
    writer.write_added()
    return spans


def run(what: str, path: Path, endpoint: str) -> tuple[float, float]:
    """Return the wall and processor seconds of sending the run to the endpoint, without Python's
    start.
    """
    environment = {
        **os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4096",
    }  # fmt: skip
    code = f"from benchmarks.export_rate import send_{what}; send_{what}({str(path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    wall_s, processor_s = json.loads(done.stdout.splitlines()[-1])
    return wall_s, processor_s


@contextlib.contextmanager
def _timed() -> Iterator[None]:
    wall_s, processor_s = time.monotonic(), time.process_time()
    yield
    print(json.dumps([time.monotonic() - wall_s, time.process_time() - processor_s]))


def send_ours(path: str) -> None:
    """Send the run's spans as `torchlens-perf sidecar RUN_DIR` does."""
    from torchlens_perf.exporters.otlp_environment import create_exporter_from_environment
    from torchlens_perf.sidecar.replay import replay

    exporter = create_exporter_from_environment()
    with _timed():
        done = replay(RunDirectory(Path(path)), exporter, trace_every=1)
    assert done.notes == [], done.notes


def send_sdk(path: str) -> None:
    """Send the same spans through the SDK."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import set_span_in_context

    from torchlens_perf.analysis.statistics.steps import build_step_traces
    from torchlens_perf.exporters.otlp_spans import find_parents
    from torchlens_perf.store import segments
    from torchlens_perf.store.file_names import list_nodes

    provider = TracerProvider(shutdown_on_exit=False)
    processor = BatchSpanProcessor(
        OTLPSpanExporter(), max_queue_size=1 << 20, max_export_batch_size=4096
    )
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("sdk")
    directory = RunDirectory(Path(path))
    with _timed():
        for host in list_nodes(directory.spans):
            for origin, records, names, _ in segments.read_chunks(directory, host):
                for trace in build_step_traces(records, names, set(range(STEPS))):
                    common = {
                        "torch.run.id": "run",
                        "torch.train.step": trace.step,
                        "torch.distributed.rank": origin.rank,
                    }
                    step = tracer.start_span(
                        f"rank {origin.rank}", attributes=common, start_time=trace.start_ns
                    )
                    contexts = []
                    for span, parent in find_parents(trace.spans):
                        within = set_span_in_context(step) if parent is None else contexts[parent]
                        made = tracer.start_span(
                            span.name or span.kind, within, attributes={**common, "torchlens_perf.kind": span.kind},
                            start_time=span.start_ns,
                        )  # fmt: skip
                        contexts.append(set_span_in_context(made))
                        made.end(span.start_ns + span.duration_ns)
                    step.end(trace.start_ns + trace.duration_ns)
        processor.force_flush(600_000)
        provider.shutdown()


@contextlib.contextmanager
def sink() -> Iterator[str]:
    """Start a server process that reads and answers each request. Yield its address."""
    code = "from benchmarks.export_rate import serve_sink; serve_sink()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(10)


def serve_sink() -> None:
    class Endpoint(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
