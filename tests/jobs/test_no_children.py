"""The program does not notice the processes that a watch starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.long import long
from tests.support.processes import run

PROGRAM = """
import os, signal, sys, time
import torch
import torchlens_perf as perf

calls, ended = [], []
signal.signal(signal.SIGCHLD, lambda number, frame: calls.append(number))

def reap():
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            ended.append(status)
    except ChildProcessError:
        pass

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with perf.watch(model, optimizer, dir=sys.argv[1], sidecar=sys.argv[2] == "sidecar"):
    for _ in range(30):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        reap()
    # What a watch has started at its start has ended by now, except for the sidecar.
    time.sleep(0.5)
reap()
print(len(calls), len(ended))
"""


@pytest.mark.parametrize("reader", ["sidecar", *long("none")])
def test_handler_of_sigchld_is_not_called_and_wait_finds_no_child(
    tmp_path: Path, reader: str
) -> None:
    """Without a sidecar, another process copies the ring at the end."""
    for _ in range(2):
        done = run([sys.executable, "-c", PROGRAM, str(tmp_path / "runs"), reader], tmp_path)
        assert done.stdout == "0 0\n", done.stderr


@pytest.mark.long
def test_wait_for_any_child_returns_the_programs_own_one(tmp_path: Path) -> None:
    """A process that a wait() in the same moment could take would change the program."""
    program = PROGRAM.replace(
        "        reap()\n",
        "        child = os.fork()\n"
        "        if not child: os._exit(7)\n"
        "        assert os.wait() == (child, 7 << 8)\n",
    )
    done = run([sys.executable, "-c", program, str(tmp_path / "runs"), "sidecar"], tmp_path)
    assert done.stdout == "30 0\n", done.stderr
