"""Train with DDP over gloo with a slow rank 1, until all ranks have received the verdict, or for a
minute.

Each rank prints the verdicts that its callback has received, the delays of these verdicts, and the
verdicts of a summary.
"""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchlens_perf as perf


class Slow(nn.Module):
    """A module whose forward pass takes the given seconds and almost no processor time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.linear(x)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(Slow(0.04 if rank == 1 else 0.02))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
watch, heard, began_s = perf.watch(model, optimizer), [], time.monotonic()


@watch.on_verdict
def hear(alert) -> None:
    heard.append(
        (alert.change, alert.kind, alert.rank, alert.next, time.time() - alert.unix_ns / 1e9)
    )


with watch:
    missing = torch.ones(1)
    while missing.item() and time.monotonic() - began_s < 60:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        missing = torch.tensor([float(not heard)])
        dist.all_reduce(missing)
    summary = watch.summary()
    print(
        "heard", json.dumps([rank, heard[:1], summary.verdicts[0].rank, summary.ranks]), flush=True
    )
    dist.barrier()
dist.destroy_process_group()
