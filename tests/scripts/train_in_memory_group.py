"""Train in a memory control group whose limit leaves `room_mb` for everything that is not the job.

Usage: train_in_memory_group.py GROUP ROOM_MB RUNS
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import torch

import torchlens_perf as perf

SECONDS = 7.0


def main(group: Path, room_mb: int, runs: str) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 32)).pow(2).sum().backward()
        optimizer.step()

    step()
    used = re.search(r"^(?:rss|anon) (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    assert used is not None
    limit = next(
        group / name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists()
    )
    limit.write_text(str(int(used[1]) + (room_mb << 20)))
    steps = 0
    with perf.watch(model, optimizer, dir=runs) as watch:
        end_s = time.monotonic() + SECONDS
        while time.monotonic() < end_s:
            step()
            time.sleep(0.002)
            steps += 1
    print(watch.run_dir, steps)


main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
