"""Without a GPU, no device module is loaded, and the GPU check reports the missing GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.long import long
from tests.support.processes import ROOT, run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
# This script prints the imported device modules.
PROGRAM = """
import sys, torch, torchlens_perf as perf
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with perf.watch(model, optimizer, sidecar=False, report="off", device_times="on", memory="history"):
    for _ in range(20):
        with perf.device_section("step"):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
device = ("cupy", "torchlens_perf.cuda", "torchlens_perf.run.oom_table", "torchlens_perf.run.sketch")
print([name for name in sys.modules if name.startswith(device)])
"""


def test_no_device_module_is_imported_without_a_gpu(tmp_path: Path) -> None:
    """CuPy is not imported either, even if the script uses device times and device sections."""
    done = run([sys.executable, "-c", PROGRAM], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((), "no NVIDIA GPU"),
        *long((("kernels",), "no NVIDIA GPU"), (("kernel",), "unknown part kernel")),
    ],
)
def test_gpu_check_exits_with_2_without_a_gpu(parts: tuple[str, ...], said: str) -> None:
    """The same exit code is used for wrong arguments, and no table of results is printed."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", *parts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


SCRIPT = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained")
"""


@pytest.mark.long
def test_unsupported_device_setting_in_the_environment_is_noted_and_ignored(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torchlens_perf", "run", "train.py"]
    done = run(command, tmp_path, TORCHLENS_PERF_AGGREGATE="device")
    assert (done.returncode, done.stdout.strip()) == (0, "trained"), done.stderr
    assert "torchlens_perf is off: aggregate='device': needs an NVIDIA GPU" in done.stderr
