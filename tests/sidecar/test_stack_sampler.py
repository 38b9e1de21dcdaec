"""Samples of the stack of a rank with much host code name the line of code in its verdict."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import HOST, Rank, run
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.processes import process_start_ticks
from torchlens_perf.sidecar import stack_sampler
from torchlens_perf.sidecar.host.stacks import Stack, find_py_spy
from torchlens_perf.sidecar.node import Sidecar

__all__ = ["run"]
SECOND_NS = 1_000_000_000
PROGRAM = """
import time
def loss_fn():
    print("ready", flush=True)
    time.sleep(60)
loss_fn()
"""
needs_py_spy = pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")


class Job:
    """A rank with steps of 20 s, which end 1 s before now, and its sidecar, whose clock is fast."""

    def __init__(self, run: RunDirectory, pid: int, *, thread_id: int = 0, **parts: float) -> None:
        started = process_start_ticks(pid)
        self.run, self.parts = run, {"forward": 1000, **parts}
        self.rank = Rank(run, 0, 1, identity={"pid": pid, "process_started": started})
        self.rank.session.facts.thread_id = thread_id or pid
        self.rank.session.publish()
        self.now_s = time.monotonic()
        self.sidecar = Sidecar(run, HOST, None, lambda run, facts: None, clock=lambda: self.now_s)
        self.rank.clock.now_ns = time.monotonic_ns() - (19 * 20 + 1) * SECOND_NS
        self.rank.steps(19, **self.parts)
        self.read()

    def read(self, count: int = 1) -> None:
        for _ in range(count):
            self.now_s += 10
            self.sidecar.read_rings()
            self.sidecar.count_records()

    def report(self) -> dict[str, Any]:
        self.sidecar.close()
        return dict(build_report(self.run.run_id, [self.sidecar.state]))


@pytest.fixture
def child(tmp_path: Path) -> Iterator[int]:
    """Yield the pid of a process that sleeps in line 5 of a.py."""
    (tmp_path / "a.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "a.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


@needs_py_spy
def test_verdict_on_host_code_names_the_sampled_line(run: RunDirectory, child: int) -> None:
    """The samples count once the records of their step are read."""
    job = Job(run, child, host=19_000)
    job.read(6)
    assert job.sidecar.state.processes[job.rank.identity.key].statistics.counted_steps == 19
    job.rank.steps(1, host=19_000, forward=1000)
    job.read()
    (verdict,) = job.report()["verdicts"]

    assert verdict.kind == "host_bound"
    assert verdict.evidence.lines.lines == {"a.py:5 in loss_fn": verdict.evidence.lines.samples}
    assert "7 of 7 (100%) are at a.py:5 in loss_fn." in verdict.text
    assert verdict.action == "look at a.py:5 in loss_fn, where most of this time is spent."


@needs_py_spy
@pytest.mark.parametrize(
    ("host_ms", "own_thread", "samples"), [(19_000, True, 40), (19_000, False, 0), (50, True, 0)]
)
def test_number_of_samples_is_limited(
    run: RunDirectory,
    child: int,
    host_ms: int,
    own_thread: bool,
    samples: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank without much host code, or that trains on another than its main thread, has none."""
    reads = 0

    def read_main_stack(pid: int, timeout_s: float) -> Stack:
        nonlocal reads
        reads += 1
        return Stack(("f (a.py:1)",), "")

    monkeypatch.setattr(stack_sampler, "read_main_stack", read_main_stack)
    job = Job(run, child, thread_id=child + (not own_thread), host=host_ms)
    job.read(60)
    job.sidecar.close()

    assert reads == samples


def test_missing_py_spy_is_noted_once_after_some_tries(
    run: RunDirectory, child: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    job = Job(run, child, host=19_000)
    job.read(2)
    assert job.sidecar.state.notes == []
    job.read(10)
    job.rank.steps(1, host=19_000, forward=1000)
    job.read()
    report = job.report()

    (note,) = report["quality"]["notes"]
    assert note == "slow lines of code are not known: py-spy is not installed: pip install py-spy"
    assert "stack samples" not in report["verdicts"][0].text
