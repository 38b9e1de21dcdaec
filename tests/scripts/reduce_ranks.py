"""Train a small model, and reduce MEGABYTES between the ranks in each step, under watch()."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

import torchlens_perf as perf

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
payload = torch.ones(int(float(os.environ["MEGABYTES"]) * 250_000))
with perf.watch(model, optimizer):
    for _ in range(40):
        model(torch.randn(512, 256)).sum().backward()
        dist.all_reduce(payload)
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
