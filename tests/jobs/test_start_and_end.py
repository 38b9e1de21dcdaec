"""Tests of a real process's report on its start, its compilations, and an end inside the watch."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm_python
from tests.support.long import long
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts import node_state

_SCRIPT = """
import os, signal, sys, time, torch, torchlens_perf as perf
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
how = sys.argv[1]
if "compile" in how:
    model = torch.compile(model, backend="aot_eager")
def train(steps=12):
    for _ in range(steps):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
time.sleep(2)
if "twice" in how:
    with perf.watch(model, optimizer, report="off"):
        train()
    time.sleep(2)
if "fork" in how and os.fork():
    os.wait()
    os._exit(0)
with perf.watch(model, optimizer, report="off"):
    train()
    if "SIGKILL" in how or "SIGTERM" in how or "SIGABRT" in how:
        os.kill(os.getpid(), getattr(signal, how.split()[0]))
    if "_exit" in how:
        os._exit(3)
"""


def report_of(folder: Path, how: str) -> tuple[dict[str, Any], float, int]:
    """Return the report on the run, the process's duration in seconds, and its exit code."""
    script = folder / "train.py"
    script.write_text(_SCRIPT)
    environment = {**os.environ, "TORCHLENS_PERF_DIR": str(folder / "runs"), "OMP_NUM_THREADS": "1"}
    began_s = time.monotonic()
    code = warm_python.run([sys.executable, str(script), how], 300, env=environment).returncode
    took_s = time.monotonic() - began_s
    deadline_s = time.monotonic() + 180
    while time.monotonic() < deadline_s:
        # Wait for the last watch, because the report may only have read the first one.
        run = RunDirectory(max((folder / "runs").iterdir()))
        if any(run.nodes.glob("*.json")):
            report: Any = build_report(run.run_id, node_state.load_all(run))
            if not report["run"]["live"] and report["steps"]["count"] >= 12:
                return report, took_s, code
        time.sleep(0.5)
    raise AssertionError("no sidecar has read the run")


@pytest.mark.parametrize("how", ["SIGKILL", *long("SIGTERM", "SIGABRT"), "_exit"])
def test_process_that_ends_inside_the_watch_is_reported_as_died(how: str, tmp_path: Path) -> None:
    report, _, code = report_of(tmp_path, how)

    assert code == (3 if how == "_exit" else -getattr(signal, how))
    assert (report["run"]["state"], report["run"]["died"]) == ("died", [0])
    assert report["verdicts"][0].kind == "died"


@pytest.mark.parametrize("how", ["", "compile", *long("compile SIGKILL"), "fork"])
def test_start_time_of_a_rank_is_measured_from_the_process_start(how: str, tmp_path: Path) -> None:
    """A forked rank starts at the fork.

    The report includes compile time even for a killed process.
    """
    report, took_s, _ = report_of(tmp_path, how)
    start = report["run"]["startup"]

    least_s = 0.0 if how == "fork" else 2.0
    assert least_s < start["before_first_step_s"] < took_s
    assert (start["compile_s"] > 0) is ("compile" in how)
    assert start["interactive"] is False


def test_second_watch_of_a_process_has_no_startup_time(tmp_path: Path) -> None:
    """Training in the first watch does not count as the start of the second one."""
    report, _, _ = report_of(tmp_path, "twice")
    assert report["run"]["startup"] is None
