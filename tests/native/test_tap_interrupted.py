"""Test of a KeyboardInterrupt while the native tap runs Python code.

The KeyboardInterrupt is raised in the user's loop, and no collective is affected.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from torchlens_perf.recorder import native_tap

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from tests.distributed.test_collective_devices import BACKENDS, OnDevice
from torchlens_perf.hooks.collectives.hook import list_collective_operators
from torchlens_perf.recorder import native_tap, recorder
from torchlens_perf.recorder.torch_private import WAIT_TENSOR
from torchlens_perf.run.ring import HEAD, RingReader, RingFile

place = sys.argv[2]
_setup_privateuseone_for_python_backend()
dist.init_process_group(BACKENDS, store=dist.HashStore(), rank=0, world_size=1)
ring = RingFile(Path(sys.argv[1]) / "ring", 64)
made = recorder.Recorder(ring.buffer, ring.intern)
made.start_collectives(ring.intern("wait"))
asked = []

def interrupted(*given):
    asked.append(given)
    if len(asked) == 1:
        signal.raise_signal(signal.SIGINT)
        for _ in range(3):
            pass
    return lambda: None

def described(*given):
    if place == "describe":
        interrupted()
    return 1, 0, 0, False, place == "describe"

tap = native_tap.load_tap()
tap.attach(recorder.collective_marks(), list_collective_operators(), [WAIT_TENSOR], described)
if place == "timing":
    tap.time_with(interrupted)
tensor, raised = OnDevice() if place == "timing" else torch.full((4,), 3.0), 0
for _ in range(3):
    try:
        dist.all_reduce(tensor)
        for _ in range(1000):
            pass
    except KeyboardInterrupt:
        raised += 1
value = tensor.tolist() if place == "describe" else []
tap.detach()
made.close()
reader = RingReader(ring.path)
records = reader.read_counter(HEAD)
print(json.dumps({"raised": raised, "asked": len(asked), "value": value, "records": records}), flush=True)
os._exit(0)  # gloo's threads may abort a process that ends while they work, see tests/scripts/train.py
"""


@pytest.mark.parametrize("place", ["describe", "timing"])
def test_interruption_inside_the_tap_is_raised_once_in_the_users_loop(
    place: str, tmp_path: Path
) -> None:
    """The next collective repeats the interrupted query, and recording continues."""
    if native_tap.load_tap() is None:
        pytest.skip("the native tap is not built")
    run = [
        sys.executable,
        "-X",
        "faulthandler",
        "-W",
        "ignore",
        "-c",
        PROGRAM,
        str(tmp_path),
        place,
    ]
    finished = subprocess.run(
        run, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)

    assert found["raised"] == 1
    assert found["asked"] == (2 if place == "describe" else 3)
    assert found["records"] == (2 if place == "describe" else 3)
    assert found["value"] == ([3.0] * 4 if place == "describe" else [])
