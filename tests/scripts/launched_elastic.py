"""Trains with DDP under torchrun until the file `stop` is there, and does what files in the working directory say.

fail-RANK: that rank takes the file away and fails. hang-RANK: that rank sleeps in a step as long as the file is there.
slow-RANK: it sleeps 15 ms in each step. It knows nothing of us. On rank 0, each start prints the world's size.
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
    stop[0] = float(step % 8 == 0 and Path("stop").exists())  # rarely: each look is one at a file
    dist.all_reduce(stop)
time.sleep(0.2)  # see train.py
dist.destroy_process_group()
