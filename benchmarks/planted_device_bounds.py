"""Compare the reported bottleneck of one process on an asynchronous device with the planted one.

    python -m benchmarks.planted_device_bounds --runs 10

The table shows, for each kind of loop, the number of runs with the right bottleneck.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import torchlens_perf as perf
from benchmarks.measure import Table
from benchmarks.planted_training import wait_for_sidecar
from tests.device import device

STEPS, WIDTH, BLOCKS, BATCH = 100, 32, 4, 8
# By kind of loop: the right verdict.
RIGHT = {
    "device_bound": "compute_bound",
    "device_bound_item": "compute_bound",
    "launch_bound": "host_bound",
    "data_bound": "data_bound",
    "host_bound": "host_bound",
}


class Batches:
    """Batches of random numbers. Each batch takes the given time to load."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.randn(BATCH, WIDTH)


def verdict(kind: str, seed: int, folder: Path) -> str:
    """Train in a loop of this kind under perf.watch. Return the bottleneck in the run's report."""
    draw = random.Random(f"{kind}/{seed}")
    kernel_s = 1e-7 if kind == "launch_bound" else draw.uniform(2e-4, 4e-4)
    device.set_kernel_time(kernel_s)
    # Rough estimate: 100 operators per step.
    step_s = 100 * kernel_s
    wait_s = step_s * draw.uniform(1.6, 2.5)
    block: Callable[[], nn.Module] = lambda: nn.Sequential(  # noqa: E731
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    )
    model = nn.Sequential(*(block() for _ in range(BLOCKS))).to(device.NAME)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loader = torch.utils.data.DataLoader(
        Batches(wait_s if kind == "data_bound" else 0.0), batch_size=None
    )
    with perf.watch(model, optimizer, dir=str(folder), report="quiet") as watch:
        for x in loader:
            x = x.to(device.NAME)
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if kind.endswith("_item"):
                loss.item()
            if kind == "host_bound":
                time.sleep(wait_s)
    torch.accelerator.synchronize()
    assert watch.run_dir is not None
    wait_for_sidecar(watch.run_dir)
    command = [sys.executable, "-m", "torchlens_perf", "report", "--json", str(watch.run_dir)]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    kinds = [
        each["kind"]
        for each in report["verdicts"]
        if each["kind"].endswith(("_bound", "_of_cpu", "not_known"))
    ]
    return kinds[0] if kinds else "nothing"


def main() -> int:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", choices=RIGHT, default=list(RIGHT))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    device.load()
    table = Table("loop", "runs", "said rightly", "said otherwise")
    wrong = 0
    for kind in asked.kinds:
        with tempfile.TemporaryDirectory() as folder:
            said = [verdict(kind, seed, Path(folder)) for seed in range(asked.runs)]
        other = [each for each in said if each != RIGHT[kind]]
        wrong += len(other)
        table.row(kind, len(said), len(said) - len(other), ", ".join(sorted(other)) or "-")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
