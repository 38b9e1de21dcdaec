"""Train with DDP over gloo under watch(). Rank SLOW_RANK computes more from step SLOW_FROM on.

STEPS is the number of steps, or 0 for a run until killed. HANG_RANK sleeps for HANG_S after
HANG_AFTER steps. BARRIER_RANK calls a barrier after HANG_AFTER steps, which other ranks do not.
After HANG_AFTER steps, EVALUATING_RANK does not come to the end of an evaluation, nor SAVING_RANK
to that of a checkpoint.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchlens_perf as perf

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, steps = dist.get_rank(), int(os.environ.get("STEPS", "60"))
slow_rank, slow_from = int(os.environ.get("SLOW_RANK", "-1")), int(os.environ.get("SLOW_FROM", "0"))
hang_rank, hang_after = (
    int(os.environ.get("HANG_RANK", "-1")),
    int(os.environ.get("HANG_AFTER", "20")),
)


class HungFile:
    """A file on a storage that does not answer."""

    def write(self, data: bytes) -> int:
        time.sleep(3600)
        return len(data)

    def flush(self) -> None:
        pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.times = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.linear(x).relu()
        return x


model = nn.Sequential(*(Block() for _ in range(4)))
parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
with perf.watch(parallel, optimizer):
    step = 0
    while not steps or step < steps:
        if rank == slow_rank and step == slow_from:
            model[2].times = 6
        with perf.section("batch"):
            batch = torch.randn(512, 256)
        parallel(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == hang_rank and step == hang_after:
            with perf.section("stuck here"):
                time.sleep(float(os.environ.get("HANG_S", "3600")))
        if rank == int(os.environ.get("BARRIER_RANK", "-1")) and step == hang_after:
            dist.barrier()
        if rank == int(os.environ.get("EVALUATING_RANK", "-1")) and step == hang_after:
            with torch.no_grad():
                for _ in range(20):
                    parallel(batch)
                time.sleep(3600)
        if rank == int(os.environ.get("SAVING_RANK", "-1")) and step == hang_after:
            torch.save(model.state_dict(), HungFile())
dist.destroy_process_group()
