"""Train with DDP over gloo under watch() and torch.profiler, which writes rank-RANK.json.

torch.profiler traces ACTIVE steps after 6 steps. If there are several ranks, training continues for
30 steps once the file `go` exists, so that steps can be captured.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, TensorDataset

import torchlens_perf as perf

ACTIVE = 12

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
parallel = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(30 * 256, 512)), batch_size=256)


def train(profiler: profile | None) -> None:
    for (batch,) in loader:
        optimizer.zero_grad()
        parallel(batch).square().mean().backward()
        optimizer.step()
        if profiler is not None:
            profiler.step()


with perf.watch(parallel, optimizer, modules="all"):
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=5, warmup=1, active=ACTIVE, repeat=1),
        on_trace_ready=lambda of: of.export_chrome_trace(f"rank-{rank}.json"),
        record_shapes=True,
        profile_memory=True,
        with_modules=True,
        with_stack=True,
    ) as profiler:
        train(profiler)
    if dist.get_world_size() > 1:
        while not Path("go").exists():
            time.sleep(0.01)
        dist.barrier()
        train(None)
# train_two_ranks.py explains the reason for this sleep.
time.sleep(0.3)
dist.destroy_process_group()
