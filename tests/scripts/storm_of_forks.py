"""Fork children of a watched process one after the other while one of its threads records.

usage: storm_of_forks.py FOLDER FORKS

The script needs a separate interpreter, because libraries of the test's process may start threads
in each child.

Each child counts its threads, including native ones, trains a step, and counts them again.

The script prints a line of JSON: the number of children by exit code, the parent's steps, and its
run directory.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import threading
import time

import torch
from torch import nn

import torchlens_perf as perf
from torchlens_perf import watching

# A child that waits for a lost lock never ends.
ENDS_WITHIN_S = 60
STEPS = 10
RECORDED, HAD_THREADS, RAISED, GOT_THREADS, HUNG = (
    "recorded",
    "had threads",
    "raised",
    "got threads",
    "hung",
)
CODES = {0: "well", 1: RECORDED, 2: HAD_THREADS, 3: RAISED, 4: GOT_THREADS}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with perf.section("part"):
        model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def threads() -> int:
    """Return the kernel's count of this process's threads."""
    return len(os.listdir("/proc/self/task"))


def in_child(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Do the work of a forked child: count threads, and train one step. Return the exit code."""
    if watching._running is not None:
        return 1
    if threads() != 1:
        return 2
    step(model, optimizer)
    return 0 if threads() == 1 else 4


def ended(child: int) -> str:
    """Return the exit status of a child. Kill the child if it does not end."""
    deadline_s = time.monotonic() + ENDS_WITHIN_S
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline_s:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return HUNG
        time.sleep(0.0005)
    code = os.waitstatus_to_exitcode(found[1])
    return CODES.get(code, f"ended with {code}")


def main(folder: str, forks: int) -> None:
    torch.set_num_threads(1)
    model = nn.Linear(4, 2)
    optimizer, stop, ends = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        threading.Event(),
        collections.Counter(),
    )

    def mark() -> None:
        while not stop.is_set():
            with perf.section("busy"):
                time.sleep(0)

    with perf.watch(model, optimizer, dir=folder, sidecar=False, report="off") as watch:
        thread = threading.Thread(target=mark)
        thread.start()
        try:
            for _ in range(forks):
                child = os.fork()
                if child == 0:
                    code = 3
                    try:
                        code = in_child(model, optimizer)
                    finally:
                        os._exit(code)
                ends[ended(child)] += 1
                if ends[HUNG]:
                    break
        finally:
            stop.set()
            thread.join()
        for _ in range(STEPS):
            step(model, optimizer)
    print(json.dumps({"ends": ends, "steps": STEPS, "run_dir": str(watch.run_dir)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
