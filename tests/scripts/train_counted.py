"""Train a small decoder on token ids under a watch, on one rank or several.

usage: train_counted.py [BACKEND of torch.compile]

Rank 0 prints the FLOPs of a step by torch's own counter, without fused attention.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import torchlens_perf as perf

torch.manual_seed(0)
torch.set_num_threads(1)
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
if RANKS > 1:
    dist.init_process_group("gloo")
model = nn.Sequential(
    nn.Embedding(64, 128), nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128), nn.Linear(128, 64)
)
tokens = torch.randint(0, 64, (960, 32))
with FlopCounterMode(display=False) as counter:
    model(tokens[:8]).sum().backward()
model.zero_grad()
trained = nn.parallel.DistributedDataParallel(model) if RANKS > 1 else model
trained = torch.compile(trained, backend=sys.argv[1]) if sys.argv[1:] else trained
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with perf.watch(model, optimizer, report="page"):
    for (batch,) in DataLoader(TensorDataset(tokens), batch_size=8):
        trained(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if os.environ.get("RANK", "0") == "0":
    print("flops", counter.get_total_flops())
if RANKS > 1:
    dist.destroy_process_group()
