"""Tests that a run prints its report at the end even if other programs keep all processors busy."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.busy_machine import PROCESSORS, busy_machine
from tests.support.figures import note, share
from tests.support.processes import clean_environ, torchrun

PROGRAM = """
import signal, sys, time, torch
import torchlens_perf as perf

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
seconds, most = float(sys.argv[1]), int(sys.argv[2])
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with perf.watch(model, optimizer):
    print("training", flush=True)
    began_s, steps = time.monotonic(), 0
    while time.monotonic() - began_s < seconds and steps < most:
        if "sections" in sys.argv:
            with perf.section("tokenize"):
                time.sleep(0.02)
        loss = model(torch.randn(64, 256)).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        steps += 1
    ends_s = time.monotonic()
print(f"the end took {time.monotonic() - ends_s:.2f} s", flush=True)
"""
RANKS = """
import sys, time, torch, torch.distributed as dist
import torchlens_perf as perf

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with perf.watch(model, optimizer):
    began_s, goes_on = time.monotonic(), torch.ones(1)
    while goes_on:
        loss = model(torch.randn(64, 256)).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        goes_on.fill_(time.monotonic() - began_s < float(sys.argv[1]))
        dist.broadcast(goes_on, 0)
    ends_s = time.monotonic()
if dist.get_rank() == 0:
    print(f"the end took {time.monotonic() - ends_s:.2f} s", flush=True)
dist.destroy_process_group()
"""
KINDS = {
    "clean": ["5", "1000000"],
    "sections": ["7", "1000000", "sections"],
    "five steps": ["60", "5"],
    "empty": ["0", "0"],
    "Ctrl-C": ["60", "1000000"],
    "two ranks": ["10"],
}
CTRL_C_AFTER_S = 6.0
RUNS = 20


def run_until_end(kind: str, folder: Path, *, terminal: bool) -> str:
    """Run one program in an empty folder with default settings, and return its output."""
    program = folder / "train.py"
    program.write_text(RANKS if kind == "two ranks" else PROGRAM)
    command = [sys.executable, str(program)] if kind != "two ranks" else torchrun(str(program))
    environ = clean_environ()
    del environ["TORCHLENS_PERF_REPORT"]
    reader, writer = pty.openpty() if terminal else os.pipe()
    process = subprocess.Popen(
        [*command, *KINDS[kind]],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    printed = b""
    ctrl_c = threading.Timer(CTRL_C_AFTER_S, process.send_signal, [signal.SIGINT])
    try:
        while data := _read(reader):
            printed += data
            if kind == "Ctrl-C" and b"training" in printed and ctrl_c.ident is None:
                ctrl_c.start()
        process.wait()
    finally:
        ctrl_c.cancel()
        os.close(reader)
        process.kill()
    return printed.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    # Reading fails when the terminal's last process has ended.
    except OSError:
        return b""


def has_report(printed: str) -> bool:
    """Return True if the output contains the report instead of one line about a missing report."""
    missing = "the report is not ready", "there is no report", "no report:"
    return "torchlens-perf report " in printed and not any(words in printed for words in missing)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_report_is_printed_when_the_run_ends_on_a_busy_machine(tmp_path: Path) -> None:
    kinds = [list(KINDS)[number % len(KINDS)] for number in range(share(RUNS))]
    began_s, missing = time.monotonic(), []
    with busy_machine(2 * PROCESSORS):
        for number, kind in enumerate(kinds):
            folder = tmp_path / str(number)
            folder.mkdir()
            printed = run_until_end(kind, folder, terminal=number // len(KINDS) % 2 == 0)
            if not has_report(printed):
                missing.append(f"{kind}:\n{printed}")
    done = (
        f"{len(kinds) - len(missing)} ended with their report, {2 * PROCESSORS} programs on"
        f" {PROCESSORS} processors"
    )
    note(
        "reports on a busy machine (`jobs/test_report_on_a_busy_machine.py`)",
        len(kinds),
        RUNS,
        done,
        time.monotonic() - began_s,
    )

    assert not missing, "\n\n".join(missing)
