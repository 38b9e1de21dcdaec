"""Measure how long the end of a watch delays the process's exit if the OTLP endpoint cannot be reached."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile

from benchmarks.measure import Table

PROGRAM = """
import sys, time, torch, torchlens_perf as perf
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with perf.watch(model, optimizer, dir=sys.argv[1]):
    for _ in range(300):
        model(torch.ones(2, 4)).sum().backward(); optimizer.step()
    print(time.monotonic(), flush=True)
"""
RUNS = 10


def delays(endpoint: str | None, folder: str) -> list[float]:
    """Return the seconds from the end of the body to the end of the process for each of RUNS
    runs.
    """
    import time

    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OTEL_", "TORCHLENS"))
    }
    if endpoint:
        environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
    measured = []
    for _ in range(RUNS):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, folder],
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        )
        measured.append(time.monotonic() - float(done.stdout))
    return measured


def main() -> int:
    """Print the table. Return the number of missed bars."""
    # An endpoint that accepts connections and never answers.
    silent = socket.create_server(("127.0.0.1", 0))
    refused = socket.create_server(("127.0.0.1", 0))
    refusing_port = refused.getsockname()[1]
    refused.close()
    endpoints = {
        "no endpoint": None,
        "refused": f"http://127.0.0.1:{refusing_port}",
        "accepts and never answers": f"http://127.0.0.1:{silent.getsockname()[1]}",
    }
    table = Table("endpoint", "exit, median", "slowest", "bar (slowest)", "")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name, endpoint in endpoints.items():
            measured = delays(endpoint, folder)
            slowest = max(measured)
            table.row(
                name,
                f"{statistics.median(measured):.2f} s",
                f"{slowest:.2f} s",
                "at most 1.5 s",
                table.bar(slowest <= 1.5),
            )
    silent.close()
    return table.missed
