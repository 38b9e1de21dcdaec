"""Measure how long the training thread sleeps in a watch: watch_waits.py FOLDER [FAULT...]

Faults:
- anonymous: no file system has room for the ring
- alone: no sidecar
- no-answer: a child that should create folders or become the sidecar does nothing
- late-answer: a child that copies the ring reports the copy late and does not end
- stopped, killed: the sidecar is stopped or killed after the last step
- flag=FILE: create the file after the last step

Prints a line of JSON: seconds asleep at the watch's start, in steps and at its end, and the number
of steps with any sleep. A sleeping thread waits for an event. A thread that computes or lacks a
processor does not sleep.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import types
from pathlib import Path

import torch
from torch import nn

import torchlens_perf as perf
from torchlens_perf.run import directory
from torchlens_perf.run.directory import find_sidecar_lock
from torchlens_perf.run.rings import memory
from torchlens_perf.run.sidecar_status import read_status

STEPS = 100
folder, faults = Path(sys.argv[1]), dict(each.partition("=")[::2] for each in sys.argv[2:])


def asleep_s() -> float:
    """Return the seconds in which this thread neither ran nor waited for a processor."""
    waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return (time.monotonic_ns() - time.thread_time_ns() - waited_ns) / 1e9


def program(name: str, text: str) -> str:
    """Return a fake interpreter that runs the given code and belongs to this Python."""
    path = folder / name / "bin" / "python"
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.exec_prefix = str(folder / name)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def sidecar_pid(run: Path) -> int:
    """Return the pid of this run's sidecar, or 0 before its start."""
    deadline_s, pid = time.monotonic() + 60, 0
    while not pid and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            pid = read_status(str(find_sidecar_lock(run.name)))[0]
        time.sleep(0.01)
    return pid


torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step() -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


if "anonymous" in faults:
    directory.shutil.disk_usage = lambda path: types.SimpleNamespace(free=0)
    # The ring cannot be in the run directory either.
    memory.WITHOUT_SIGBUS = frozenset()
if "no-answer" in faults:
    sys.executable = program("no-answer", "exec sleep 600")
watch = perf.watch(
    model, optimizer, dir=str(folder / "disk" / "runs"), sidecar="alone" not in faults
)
step()
began_s = asleep_s()
watch.__enter__()
start_s, slept, before_s = asleep_s() - began_s, 0, 0.0
step()
steps_began_s = asleep_s()
for _ in range(STEPS):
    before_s = asleep_s()
    step()
    slept += asleep_s() - before_s > 0.001
steps_s = asleep_s() - steps_began_s
if "late-answer" in faults:
    sys.executable = program("late-answer", "sleep 0.9; echo no; exec sleep 600")
if watch.run_dir is not None and {"stopped", "killed"} & faults.keys():
    os.kill(sidecar_pid(watch.run_dir), signal.SIGSTOP if "stopped" in faults else signal.SIGKILL)
if "flag" in faults:
    Path(faults["flag"]).touch()
began_s = asleep_s()
watch.__exit__(None, None, None)
end_s = asleep_s() - began_s
print(
    json.dumps(
        {
            "start_s": start_s,
            "steps_s": steps_s,
            "slept": slept,
            "end_s": end_s,
            "run": str(watch.run_dir),
        }
    )
)
