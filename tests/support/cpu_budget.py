"""Limits on the CPU time of each test and of all tests of `make test`.

The CPU time includes the processes that the test has waited for, so no sidecar that outlives its
job. The limits have slack, because work takes more CPU time while other programs use the caches.
"""

from __future__ import annotations

import ast
import resource
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TEST_S = 0.5
"""Budget of a test in the process of the tests."""
PROCESSES_S = 10.0
"""Budget of the processes that one test starts."""
SUITE_S = 900.0
"""Budget of all tests, including the collection of each worker."""
SLACK, SUITE_SLACK = 6.0, 1.5
"""Factors by which a test, and all tests, may exceed their budgets: on a slow or busy machine, tests
that wait for a process poll for longer."""
USUAL_PARSING_S = 0.013
"""CPU time of measure_slowness()'s work on a machine without other load."""
MARKS_WITHOUT_BUDGET = ("slow", "examples")


class CpuTime(NamedTuple):
    """CPU seconds of this process, and of processes that it has waited for."""

    own_s: float
    children_s: float

    @classmethod
    def now(cls) -> CpuTime:
        who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        return cls(*(used.ru_utime + used.ru_stime for used in map(resource.getrusage, who)))


def measure_slowness() -> float:
    """Return by which factor work takes more CPU time now than on a machine without other load.

    Other machines share the processor: the same test took more than twice its CPU time on one of them.
    """
    text, began_s = Path(__file__).read_text(), time.thread_time()
    for _ in range(20):
        ast.parse(text)
    return max(1.0, (time.thread_time() - began_s) / USUAL_PARSING_S)


def find_excess(used: CpuTime, slowness: float = 1.0) -> str:
    """Return the reason why a test is too expensive, or an empty string."""
    message = "{:.1f} s of CPU time in {}, and the budget is {} s"
    if used.own_s > slowness * SLACK * TEST_S:
        return message.format(used.own_s, "this process", TEST_S)
    if used.children_s > slowness * SLACK * PROCESSES_S:
        return message.format(used.children_s, "started processes", PROCESSES_S)
    return ""


class CpuBudget:
    """A plugin of pytest that fails expensive tests and prints the most expensive ones."""

    def __init__(self) -> None:
        self._last = CpuTime.now()
        self._tests_s: Counter[str] = Counter()
        self._workers_s = 0.0

    def pytest_runtest_logstart(self) -> None:
        self._last = CpuTime.now()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Measure one phase. Only the test itself can fail: fixtures may serve several tests."""
        report = yield
        now = CpuTime.now()
        used, self._last = CpuTime(*(b - a for a, b in zip(self._last, now, strict=True))), now
        report.user_properties.append(("cpu_s", sum(used)))
        is_limited = call.when == "call" and not any(
            map(item.get_closest_marker, MARKS_WITHOUT_BUDGET)
        )
        if is_limited and report.passed and find_excess(used):
            excess = find_excess(used, measure_slowness())
            report.outcome, report.longrepr = ("failed", excess) if excess else ("passed", None)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase. The controller of pytest-xdist gets the reports of its workers."""
        self._tests_s[report.nodeid] += dict(report.user_properties).get("cpu_s", 0.0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._workers_s += getattr(node, "workeroutput", {}).get("cpu_s", 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_s"] = sum(CpuTime.now())
        elif (
            session.exitstatus == pytest.ExitCode.OK
            and self._suite_s() > SUITE_SLACK * SUITE_S * measure_slowness()
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._tests_s:
            return
        show = terminalreporter.write_line
        show(f"CPU time: {self._suite_s():.0f} s, and the budget of all tests is {SUITE_S:.0f} s")
        for name, seconds in self._tests_s.most_common(10):
            show(f"  {seconds:5.1f} s {name}")

    def _suite_s(self) -> float:
        now = CpuTime.now()
        return now.own_s + (self._workers_s or now.children_s)
