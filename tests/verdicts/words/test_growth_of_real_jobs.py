"""A real loop whose steps sleep longer and longer is reported as growing, also on busy CPUs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.busy_machine import busy_machine
from tests.support.recorded_run import environment
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory

LOOP = """
import sys, time, torch
import torchlens_perf as perf
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with perf.watch(model):
    for step in range(160):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        time.sleep(0.002 + float(sys.argv[1]) * step)
"""

pytestmark = pytest.mark.slow


def kinds_of(folder: Path, growth_s: float) -> list[str]:
    command = [sys.executable, "-c", LOOP, str(growth_s)]
    subprocess.run(command, env=environment(folder, {}), check=True, timeout=100)
    (path,) = {each.parent for each in folder.glob("*/nodes")}
    return [each.kind for each in load_report(RunDirectory(path))["verdicts"]]


@pytest.mark.parametrize("busy", [False, pytest.param(True, marks=pytest.mark.long)])
def test_sleep_that_grows_by_the_same_time_each_step_is_growth(tmp_path: Path, busy: bool) -> None:
    with busy_machine() if busy else contextlib.nullcontext():
        assert "growing_steps" in kinds_of(tmp_path, 0.0004)


@pytest.mark.long
def test_sleep_that_stays_the_same_is_no_growth(tmp_path: Path) -> None:
    with busy_machine():
        assert "growing_steps" not in kinds_of(tmp_path, 0.0)
