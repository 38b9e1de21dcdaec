"""Train with DDP under watch() on the asynchronous device until killed.

From step SLOW_FROM on, a kernel of rank SLOW_RANK takes 15 ms longer in each forward pass.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchlens_perf as perf
from tests.device import device

torch.set_num_threads(1)
device.load()
device.set_kernel_time(3e-4)
dist.init_process_group(device.NAME)
slow = dist.get_rank() == int(os.environ["SLOW_RANK"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.more_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device.spin(5e-3 + self.more_s)
        return self.linear(x).relu()


model = nn.Sequential(*(Block() for _ in range(4))).to(device.NAME)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
with perf.watch(parallel, optimizer):
    step = 0
    while True:
        if slow and step == int(os.environ["SLOW_FROM"]):
            model[2].more_s = 15e-3
        parallel(torch.ones(8, 32, device=device.NAME)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
