"""Train with DDP under watch() on the asynchronous device.

A kernel of rank HANG_RANK never ends in step HANG_AT.

ITEM is the rank that reads its loss in each step, as scripts that print it do, or all.

The ranks without the endless kernel continue for some steps and then wait.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchlens_perf as perf
from tests.device import device

AHEAD, STEP_S = 8, 0.05

torch.set_num_threads(1)
device.load()
dist.init_process_group(device.NAME)
hangs_at = int(os.environ["HANG_AT"])
waits = os.environ.get("ITEM", "") in ("all", str(dist.get_rank()))
is_stuck = dist.get_rank() == int(os.environ["HANG_RANK"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.never = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.never:
            device.start_endless_kernel()
        device.spin(2e-3)
        return self.linear(x).relu()


def print_loss(loss: torch.Tensor) -> float:
    return loss.item()


model = nn.Sequential(*(Block() for _ in range(4))).to(device.NAME)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
with perf.watch(parallel, optimizer):
    step = 0
    while True:
        model[2].never = is_stuck and step == hangs_at
        loss = parallel(torch.ones(8, 32, device=device.NAME)).sum()
        loss.backward()
        if waits:
            print_loss(loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(STEP_S)
        if step == hangs_at + AHEAD:
            torch.accelerator.synchronize()
        step += 1
