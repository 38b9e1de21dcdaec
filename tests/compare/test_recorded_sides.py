"""`compare --run A --run B` records both commands in turn and measures what the change gains."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import clean_environ

JOB = """
import time, torch, sys
from torch import nn
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(8)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Slow(), batch_size=4, num_workers=int(sys.argv[1])):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.long
def test_workers_for_a_slow_dataset_are_measured_as_a_gain(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    job = shlex.join([sys.executable, "-m", "torchlens_perf", "run", "job.py"])
    done = subprocess.run(
        [sys.executable, "-m", "torchlens_perf", "compare", "--json", "--times", "3",
         "--run", f"{job} 0", "--run", f"{job} 4"],
        cwd=tmp_path, env=clean_environ(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "torchlens-perf").glob("compare-*")
    names = {f"{side}-{number}" for side in ("before", "after") for number in (1, 2, 3)}
    assert names == {path.name for path in folder.iterdir()}
    found = json.loads(done.stdout)
    (step,) = [each for each in found["changes"] if each["name"] == "typical step"]
    assert step["outcome"] == "changed"
    # Four items of 10 ms are read by one process before, by four processes after.
    assert step["after"] < 0.8 * step["before"]
    assert step["high"] < 0
