"""Test of watches that begin and end while other threads issue collectives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.long import long
from tests.support.processes import ROOT
from torchlens_perf.recorder import native_tap

# When the end of a watch removed the tap, one of some ten thousand ends raised "fallthrough_kernel
# was executed" in an all_reduce.
PROGRAM = """
import os, sys, threading
from pathlib import Path
import torch, torch.distributed as dist
from torchlens_perf.hooks.collectives.hook import list_collective_operators
from torchlens_perf.recorder import native_tap, recorder
from torchlens_perf.recorder.torch_private import WAIT_TENSOR
from torchlens_perf.run.ring import RingFile

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tap, folder, watches = native_tap.load_tap(), Path(sys.argv[1]), int(sys.argv[2])
names = list_collective_operators()
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

# With the Python tap, a call that is inside the tap at the end of the watch must complete.
PYTHON_PROGRAM = """
import os, sys, threading, time
from contextlib import ExitStack
from pathlib import Path
import torch, torch.distributed as dist
from tests.support.ranks import Rank, run_without_traces
from torchlens_perf.hooks.collectives.hook import CollectiveHook
from torchlens_perf.recorder import native_tap
from torchlens_perf.recorder import native_tap

native_tap.tap_folders = lambda: ()
assert native_tap.load_tap() is None
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
folder, watches = Path(sys.argv[1]), int(sys.argv[2])
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
with run_without_traces(folder) as run:
    rank = Rank(run, 0, 1)
    for number in range(watches):
        with CollectiveHook().attach(rank.session):
            before = sum(done)
            while number % 100 == 0 and sum(done) < before + 10 and not errors:
                time.sleep(0.0005)
    attached = ExitStack()
    attached.enter_context(CollectiveHook().attach(rank.session))
    child = os.fork()
    if child == 0:
        attached.close()  # takes no lock that another thread may have held
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    attached.close()
    ended.set()
    [thread.join() for thread in threads]
    assert not errors, errors
    assert rank.session.recorder.written >= watches // 50
    rank.close()
dist.destroy_process_group()
print(*done)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("tap", "watches"),
    [("native", 3_000), *long(("python", 1_000), ("native", 100_000), ("python", 20_000))],
)
def test_operations_of_other_threads_succeed_while_watches_begin_and_end(
    tap: str, watches: int, tmp_path: Path
) -> None:
    """A child that is forked meanwhile ends its watch."""
    if tap == "native" and native_tap.load_tap() is None:
        pytest.skip("the native tap is not built")
    program = PROGRAM if tap == "native" else PYTHON_PROGRAM
    run = [
        sys.executable,
        "-X",
        "faulthandler",
        "-W",
        "ignore",
        "-c",
        program,
        str(tmp_path),
        str(watches),
    ]
    finished = subprocess.run(
        run, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500
    )

    assert finished.returncode == 0, finished.stderr
    assert all(int(count) > 0 for count in finished.stdout.split())


def test_process_that_loads_the_tap_under_two_paths_can_fork(tmp_path: Path) -> None:
    """The handlers that hold the tap's locks during a fork are registered once."""
    tap = native_tap.find_loaded_tap_file()
    if tap is None:
        pytest.skip("the native tap is not built")
    other = tmp_path / "other.so"
    other.hardlink_to(tap)
    program = (
        "import os, sys; import torch, torchlens_perf.recorder.recorder;"
        " from pathlib import Path; from torchlens_perf.recorder.native_tap import load_tap_file;"
        " [load_tap_file(Path(path)) for path in sys.argv[1:]]; child = os.fork();"
        " child or os._exit(0); print(os.waitpid(child, 0)[1])"
    )
    run = [sys.executable, "-c", program, str(tap), str(other)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    assert done.stdout == "0\n", done.stderr
