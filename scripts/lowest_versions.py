"""Test a run, its report and its export with the lowest version of each dependency in
pyproject.toml.

`python scripts/lowest_versions.py FOLDER` creates an environment in FOLDER with the running Python.
This must be Python 3.11, because the oldest supported numpy has no wheels for later versions. torch
is the version that the tests use. The exit code is 1 if there are problems. Each problem is printed
on a line.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
import venv
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parent.parent
TRAINING = """
import torch, torchlens_perf as perf
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
with perf.watch(model, optimizer, dir="runs"):
    for _ in range(60):
        optimizer.zero_grad()
        model(torch.randn(256, 64)).mean().backward()
        optimizer.step()
"""


def lowest(requirement: str) -> str:
    """Return the requirement with its lower bound pinned: "numpy>=1.24; MARKER" becomes
    "numpy==1.24".
    """
    found = re.fullmatch(r"([A-Za-z0-9_.\-]+)>=([0-9.]+)(,[^;]*)?(;.*)?", requirement)
    if found is None:
        raise SystemExit(f"{requirement} has no lower bound")
    return f"{found[1]}=={found[2]}"


class Endpoint:
    """An OTLP endpoint that accepts every request and counts requests by signal."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(handler) -> None:
                handler.rfile.read(int(handler.headers["Content-Length"]))
                signal = handler.path.rpartition("/")[2]
                self.requests[signal] = self.requests.get(signal, 0) + 1
                handler.send_response(200)
                handler.send_header("Content-Length", "0")
                handler.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                return

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def ended_report(command: list[str], folder: Path) -> dict[str, Any]:
    """Return the report after the sidecar has written the run's end."""
    deadline_s = time.monotonic() + 120
    while True:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode == 0 and not (report := json.loads(done.stdout))["run"]["live"]:
            return dict(report)
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the run has no end: {done.stderr}")
        time.sleep(1)


def main(folder: Path) -> int:
    python = folder / "venv" / "bin" / "python"
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    pins = [lowest(each) for each in project["dependencies"]]
    if not python.exists():
        venv.create(folder / "venv", with_pip=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--no-compile"]
    tested = (ROOT / "tests/requirements.txt").read_text().splitlines()
    torch = next(each for each in tested if each.startswith("torch=="))
    subprocess.run([*pip, torch, *pins], check=True)
    subprocess.run([*pip, "--no-deps", str(ROOT)], check=True)
    print("\n".join(pins))

    endpoint = Endpoint()
    address = f"http://127.0.0.1:{endpoint.server.server_port}"
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OTEL_", "TORCHLENS_"))
    }
    environ = {**inherited, "OTEL_EXPORTER_OTLP_ENDPOINT": address}
    subprocess.run([str(python), "-c", TRAINING], cwd=folder, env=environ, check=True)
    run = max((folder / "runs").iterdir(), key=lambda each: each.stat().st_mtime)
    perf = [str(python), "-m", "torchlens_perf"]
    report = ended_report([*perf, "report", str(run), "--json"], folder)
    page = folder / "page.html"
    subprocess.run(
        [*perf, "report", str(run), "--html", str(page), "--quiet"], cwd=folder, check=True
    )
    log = "".join(path.read_text() for path in run.glob("nodes/*.log"))
    problems = []
    if report["steps"]["count"] != 60:
        problems.append(f"{report['steps']['count']} of 60 steps are in the report")
    # A run without alerts sends no logs.
    problems += [
        f"no {signal} arrived"
        for signal in ("traces", "metrics")
        if signal not in endpoint.requests
    ]
    if not page.stat().st_size:
        problems.append("the page is empty")
    problems += [line for line in log.splitlines() if "Error" in line or "failed" in line]
    print(
        f"{report['steps']['count']} steps, page of {page.stat().st_size} bytes, OTLP requests:"
        f" {endpoint.requests}"
    )
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
