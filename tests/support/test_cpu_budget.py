"""The budget of CPU time is measured over all workers, and holds tests and their processes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support import cpu_budget
from tests.support.cpu_budget import (
    PROCESSES_S,
    SLACK,
    TEST_S,
    CpuTime,
    find_excess,
    measure_slowness,
)
from tests.support.processes import run

_CONFTEST = """
import tests.support.cpu_budget as cpu_budget

cpu_budget.SLACK, cpu_budget.SUITE_SLACK = 3.0, 1.0
cpu_budget.TEST_S, cpu_budget.PROCESSES_S, cpu_budget.SUITE_S = 0.1, 0.2, {suite_s}

def pytest_configure(config):
    config.pluginmanager.register(cpu_budget.CpuBudget())
"""
_SPIN = "import time\nwhile time.process_time() < {0}: pass"
_TESTS = f"""
import subprocess, sys, time
import pytest

def spin(seconds):
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass

def test_cheap():
    pass

def test_expensive():
    spin(1.5)

@pytest.mark.slow
def test_known_as_expensive():
    spin(1.5)

def test_of_processes():
    subprocess.run([sys.executable, "-c", {_SPIN.format(3.0)!r}], check=True)
"""


@pytest.mark.long
def test_expensive_tests_of_all_workers_fail_and_are_listed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(_CONFTEST.format(suite_s=60))
    (tmp_path / "test_planted.py").write_text(_TESTS)
    shown = run_pytest(tmp_path, "-p", "xdist", "-n", "2")

    assert "2 failed, 2 passed" in shown
    assert re.search(r"1\.[5-9] s of CPU time in this process, and the budget is 0\.1 s", shown)
    assert re.search(r"\d\.\d s of CPU time in started processes", shown)
    assert re.search(r"[34]\.\d s test_planted.py::test_of_processes\n", shown)
    (suite_s,) = re.findall(r"CPU time: (\d+) s", shown)
    assert 3 <= int(suite_s) < 60


def test_suite_above_its_budget_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(_CONFTEST.format(suite_s=0.01))
    (tmp_path / "test_planted.py").write_text("def test_cheap(): pass")

    assert "1 passed" in run_pytest(tmp_path)


def test_slack_is_for_machines_with_other_load() -> None:
    own_s, children_s = SLACK * TEST_S, SLACK * PROCESSES_S
    assert find_excess(CpuTime(own_s, children_s)) == ""
    assert "in this process" in find_excess(CpuTime(own_s + 0.1, 0.0))
    assert "in started processes" in find_excess(CpuTime(own_s, children_s + 0.1))
    assert find_excess(CpuTime(1.9 * own_s, 1.9 * children_s), slowness=2.0) == ""
    assert "in this process" in find_excess(CpuTime(2.1 * own_s, 0.0), slowness=2.0)


def test_slowness_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factor is never less than one."""
    monkeypatch.setattr(cpu_budget, "USUAL_PARSING_S", 1e-4)
    assert measure_slowness() > 50
    monkeypatch.setattr(cpu_budget, "USUAL_PARSING_S", 1e4)
    assert measure_slowness() == 1.0


def run_pytest(folder: Path, *options: str) -> str:
    """Run the planted tests, which must fail. Return the output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    root = str(Path(__file__).parents[2])
    done = run(command, folder, PYTHONPATH=root, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    return done.stdout
