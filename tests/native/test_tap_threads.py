"""Watches begin and end while other threads issue collectives: no operation of the job is ever touched by that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.long import long
from tests.support.processes import ROOT
from torchlens_perf.recorder import native_tap

# Without the stay of the tap, one of some ten thousand ends raised "fallthrough_kernel was executed" in an all_reduce.
PROGRAM = """
import os, sys, threading
from pathlib import Path
import torch, torch.distributed as dist
from torchlens_perf.hooks.collective import operators
from torchlens_perf.recorder import native_tap, recorder
from torchlens_perf.recorder.torch_private import WAIT_TENSOR
from torchlens_perf.run.ring import RingFile

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tap, folder, watches = native_tap.load(), Path(sys.argv[1]), int(sys.argv[2])
names = operators()
errors, done, ended = [], [0, 0], threading.Event()

def train(number):
    tensor = torch.ones(4)
    try:
        while not ended.is_set():
            dist.all_reduce(tensor)
            done[number] += 1
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
[thread.start() for thread in threads]
for number in range(watches):
    if number % 100 == 0:
        ring = RingFile(folder / str(number), 64)
        made = recorder.Recorder(ring.buffer, ring.intern)
        made.start_collectives(ring.intern("wait"))
    tap.attach(recorder.collective_marks(), names, [WAIT_TENSOR], lambda *asked: (1, 0, 0, True, True))
    tap.detach()
    if number % 100 == 99:
        made.close()
        ring.close()
child = os.fork()
if child == 0:
    tap.detach()  # takes no lock that another thread may have held
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
ended.set()
[thread.join() for thread in threads]
assert not errors, errors
dist.destroy_process_group()
print(*done)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("watches", [3_000, *long(100_000)])
def test_other_threads_issue_meanwhile(watches: int, tmp_path: Path) -> None:
    if native_tap.load() is None:
        pytest.skip("the native tap is not built")
    run = [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", PROGRAM, str(tmp_path), str(watches)]
    finished = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)

    assert finished.returncode == 0, finished.stderr
    assert all(int(count) > 0 for count in finished.stdout.split())
