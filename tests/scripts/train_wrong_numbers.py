"""Train with DDP over gloo under watch(check_numbers=8), with wrong numbers on one rank.

FAULT is "", "flip" (one bit of one parameter on RANK_WITH_FAULT before step AT_STEP), "loss" (a batch
with NaN), or "spike" (20 times the loss). STEPS is the number of steps, or 0 for a run until killed.
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
rank, steps = dist.get_rank(), int(os.environ.get("STEPS", "0"))
fault, at_step = os.environ.get("FAULT", ""), int(os.environ.get("AT_STEP", "80"))
has_fault = rank == int(os.environ.get("RANK_WITH_FAULT", "1"))
torch.manual_seed(int(os.environ.get("SEED", "0")) * 100 + rank)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with perf.watch(model, optimizer, check_numbers=8) as w:
    step = 0
    while not steps or step < steps:
        batch = torch.randn(32, 64)
        if has_fault and step == at_step and fault == "flip":
            weight = model.module[2].weight
            weight.detach().view(-1)[17:18].view(torch.int32).bitwise_xor_(1 << 12)
        if has_fault and step == at_step and fault == "loss":
            batch[0, 0] = float("nan")
        loss = model(batch).square().mean()
        if has_fault and step == at_step and fault == "spike":
            loss = 20 * loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.005)
        w.step(loss=loss)
        step += 1
dist.destroy_process_group()
