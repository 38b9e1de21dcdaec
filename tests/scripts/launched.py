"""Train with DDP over gloo without using the package.

Any launcher may set the rank, as for users' scripts.

STEPS is the number of steps. SLOW_RANK sleeps 15 ms in each step from step 40 on.

FAIL_RANK fails after FAIL_AFTER steps of its first attempt and creates the file FAILED.

Rank 0 prints the last loss.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
SLOW_FROM = 40


def first(names: tuple[str, ...]) -> int:
    return next(int(os.environ[name]) for name in names if name in os.environ)


def train(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    loss = train_with(rank)
    if rank == 0:
        print("loss", loss, flush=True)
    # train.py explains the reason for this sleep.
    time.sleep(0.2)
    dist.destroy_process_group()


def train_with(rank: int) -> str:
    """Train in the existing process group. Return the last loss."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Linear(192, 192) for _ in range(4)))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    slow, failed = int(os.environ.get("SLOW_RANK", "-1")), Path("FAILED")
    fails = int(os.environ.get("FAIL_RANK", "-1")) == rank and not failed.exists()
    for step in range(int(os.environ.get("STEPS", "60"))):
        batch = torch.randn(64, 192)
        if rank == slow and step >= SLOW_FROM:
            time.sleep(0.015)
        loss = parallel(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if fails and step == int(os.environ["FAIL_AFTER"]):
            failed.touch()
            sys.exit(3)
    return loss.item().hex()


if __name__ == "__main__":
    train(first(RANKS), first(SIZES))
