"""Train with DDP under torchrun until the file `stop` exists, controlled by files in the working
directory.

- fail-RANK: if this file exists, the rank removes it and fails.
- hang-RANK: this rank sleeps in a step as long as the file exists.
- slow-RANK: the rank sleeps 15 ms in each step while this file exists.

The script does not use the package. At each start, rank 0 prints the world size.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
if rank == 0:
    print(f"rank 0 of {dist.get_world_size()} on {socket.gethostname()}", flush=True)
fail, hang, slow = (Path(f"{what}-{rank}") for what in ("fail", "hang", "slow"))
stop, step = torch.zeros(1), 0
while not stop:
    model(torch.randn(32, 64)).square().mean().backward()
    if slow.exists():
        time.sleep(0.015)
    while hang.exists():
        time.sleep(0.05)
    optimizer.step()
    optimizer.zero_grad()
    if fail.exists():
        with contextlib.suppress(FileNotFoundError):
            fail.unlink()
            sys.exit(3)
    step += 1
    # Check rarely, because each check reads the file system.
    stop[0] = float(step % 8 == 0 and Path("stop").exists())
    dist.all_reduce(stop)
# train.py explains the reason for this sleep.
time.sleep(0.2)
dist.destroy_process_group()
