"""Stops of processes: what is observed as a stop, and what the report says about it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sidecar.host.test_stacks import VFORKS
from tests.support.processes import only_report, run, run_warm, torchrun
from torchlens_perf.run.processes import process_state_and_start
from torchlens_perf.sidecar.stops import SHORTEST_NS, SleepObserver, StopObserver, is_stopped

PTRACE_ATTACH, PTRACE_DETACH = 16, 17
SLEEPS = "print('ready', flush=True); import time; time.sleep(60)"
READS = "print('ready', flush=True); input()"
JOINS = """
import threading, time
print("ready", flush=True)
thread = threading.Thread(target=time.sleep, args=(60,))
thread.start()
thread.join()
"""
GREEDY = """
import ctypes, threading, time

def takes_the_gil():
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(60)  # PyDLL: with the GIL held

threading.Thread(target=takes_the_gil, name="greedy", daemon=True).start()
while True:
    time.sleep(0.001)
"""


@contextlib.contextmanager
def running(program: str) -> Iterator[int]:
    """Run a Python program until the context ends. Yield its pid once the program is ready."""
    command = [sys.executable, "-c", program]
    # SIGTSTP does not stop a process of an orphaned group, which that of the tests may be.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=os.setpgrp
    ) as process:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        try:
            yield process.pid
        finally:
            if len(ready) > 1:
                os.kill(int(ready[1]), signal.SIGKILL)
            process.kill()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@contextlib.contextmanager
def stopped_by(number: signal.Signals, pid: int) -> Iterator[None]:
    os.kill(pid, number)
    yield
    os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def traced(pid: int) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_ATTACH, pid, None, None):
        pytest.skip(f"ptrace is not permitted: {os.strerror(ctypes.get_errno())}")
    os.waitpid(pid, 0)
    yield
    libc.ptrace(PTRACE_DETACH, pid, None, None)


@contextlib.contextmanager
def frozen(pid: int, parent: str, switch: str, on: str, off: str) -> Iterator[None]:
    """Freeze a process in a control group of its own."""
    group = Path(parent) / f"torchlens-perf-test-{os.getpid()}"
    before = Path(parent) / "cgroup.procs"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
        (group / switch).write_text(on)
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"control groups of {parent} cannot be written: {error}")
    try:
        yield
    finally:
        (group / switch).write_text(off)
        before.write_text(str(pid))
        group.rmdir()


def frozen_by_version_1(pid: int) -> contextlib.AbstractContextManager[None]:
    return frozen(pid, "/sys/fs/cgroup/freezer", "freezer.state", "FROZEN", "THAWED")


def frozen_by_version_2(pid: int) -> contextlib.AbstractContextManager[None]:
    mixed = "/sys/fs/cgroup/unified"
    parent = mixed if Path(mixed).is_dir() else "/sys/fs/cgroup"
    return frozen(pid, parent, "cgroup.freeze", "1", "0")


STOPS = {
    "SIGSTOP": lambda pid: stopped_by(signal.SIGSTOP, pid),
    "SIGTSTP": lambda pid: stopped_by(signal.SIGTSTP, pid),
    "SIGTTIN": lambda pid: stopped_by(signal.SIGTTIN, pid),
    "debugger": traced,
    "freezer of version 1": frozen_by_version_1,
    "freezer of version 2": frozen_by_version_2,
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_stopped_process_is_observed_until_it_runs_again(stop: Any) -> None:
    with running(SLEEPS) as pid:
        observer = StopObserver(pid)
        assert observer.poll(moves=False) == float("inf")
        with stop(pid):
            wait_until(lambda: is_stopped(pid))
            assert observer.poll(moves=False) < 1
            observer.poll(moves=False)
        wait_until(lambda: not is_stopped(pid))
        assert observer.poll(moves=False) == float("inf")
        ((begin_ns, end_ns),) = observer.stops
        assert begin_ns < end_ns


@pytest.mark.parametrize("program", [SLEEPS, READS, JOINS, GREEDY, VFORKS, "while 1: pass"])
def test_process_that_waits_or_computes_is_not_stopped(program: str) -> None:
    """The programs sleep, read a pipe, wait for a thread, hold the GIL, wait in state D, compute."""
    program = program if "ready" in program else f"print('ready', flush=True)\n{program}"
    with running(program) as pid:
        if program is VFORKS:
            wait_until(lambda: process_state_and_start(pid)[0] == "D")
        observer = StopObserver(pid)
        for _ in range(20):
            assert observer.poll(moves=False) == float("inf")
        assert observer.stops == []


def test_process_that_writes_records_is_not_looked_at() -> None:
    with running(SLEEPS) as pid, stopped_by(signal.SIGSTOP, pid):
        wait_until(lambda: is_stopped(pid))
        observer = StopObserver(pid)
        observer.poll(moves=True)
        assert observer.stops == []


# -- this process itself

SLEEPER = f"""
import time
from torchlens_perf.sidecar.stops import SleepObserver
observer = SleepObserver()
observer.begin()
print("ready", flush=True)
time.sleep(0.3)
observer.end(0.3)
print(int(any(end - begin >= {SHORTEST_NS} for begin, end in observer.stops)), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("stop", [STOPS["SIGSTOP"], frozen_by_version_2], ids=["SIGSTOP", "frozen"])
def test_process_finds_that_it_was_stopped_during_a_sleep(stop: Any) -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with stop(process.pid):
            time.sleep(2)
        assert process.stdout.readline() == b"1\n"
        process.kill()


def test_late_wake_up_on_a_busy_thread_is_no_stop() -> None:
    """The sleep ends late because this process's other thread uses the CPU meanwhile."""
    observer, ends = SleepObserver(), threading.Event()

    def compute() -> None:
        while not ends.is_set():
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    observer.begin()
    time.sleep(1)
    observer.end(0.0)
    ends.set()
    thread.join()
    assert observer.stops == []


# -- the report

LOOP = """
import ctypes, os, subprocess, sys, time
import torch, torch.nn as nn
import torchlens_perf as perf

torch.set_num_threads(1)
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    torch.distributed.init_process_group("gloo")
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
net = nn.parallel.DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.SGD(model.parameters(), 0.01)
slow = [0.0]
model[0].weight.register_hook(lambda gradient: time.sleep(slow[0]))
stop = f"kill -STOP {os.getpid()}; sleep 4; kill -CONT {os.getpid()}"
child = None
# More steps than usual until the sidecar, which starts late on a busy machine, has seen this process.
with perf.watch(model, optimizer, report="quiet", exchange="off") as watch:
    saved = watch.run_dir / "nodes"
    step, last = 0, 160 if world == 1 else 2500
    while step < last:
        if child is None and rank == 0 and step >= 40 and any(saved.glob("*.json")):
            child = subprocess.Popen(["sh", "-c", stop])
            last = step + 120 if world == 1 else last
            print(step)
        last += child is None and world == 1 and step < 10_000
        slow[0] = 1.5 if step == last - 80 and world == 1 else 0.0
        net(torch.randn(64, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.004)
        if step == last - 40 and world == 1:
            ctypes.PyDLL(None).usleep(1_500_000)
        step += 1
if world > 1:
    torch.distributed.destroy_process_group()
"""


def long_steps(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the classes of steps that take at least a second longer."""
    return [each for each in report["steps"]["long"] if each["more_s"] >= 1]


def write_loop(folder: Path) -> str:
    (folder / "loop.py").write_text(textwrap.dedent(LOOP))
    return str(folder / "loop.py")


def test_report_names_a_stopped_process_and_not_its_backward_pass(tmp_path: Path) -> None:
    """A hook that sleeps, and a call that holds the GIL, take as long and are no stops."""
    done = run_warm([sys.executable, write_loop(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr
    report = only_report(tmp_path)
    stopped = [each for each in long_steps(report) if each["kinds"]]
    assert [each["kinds"] for each in stopped] == [["stopped process"]]
    assert stopped[0]["count"] == 1
    assert abs(stopped[0]["steps"][0] - int(done.stdout)) < 20
    others = [each for each in long_steps(report) if not each["kinds"]]
    assert sum(each["count"] for each in others) == 2
    texts = [each.text for each in report["verdicts"] if each.kind == "long_steps"]
    assert any("(stopped by SIGSTOP" in text for text in texts)
    idle_s = report["goodput"].classes["idle"].seconds
    assert idle_s >= 0.9 * stopped[0]["total_s"]


@pytest.mark.long
@pytest.mark.distributed
def test_report_names_the_stopped_rank_and_not_the_one_that_waits(tmp_path: Path) -> None:
    done = run(torchrun(write_loop(tmp_path)), tmp_path)
    assert done.returncode == 0, done.stderr
    report = only_report(tmp_path)
    (stopped,) = [each for each in long_steps(report) if each["kinds"] == ["stopped process"]]
    assert (stopped["count"], stopped["waited_for"]) == (1, 0)
    assert stopped["more_s"] > 3
    texts = [each.text for each in report["verdicts"] if each.kind == "long_steps"]
    assert any("on rank 0; the other rank waits" in text for text in texts)
