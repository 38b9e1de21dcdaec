"""Train a pipeline of two stages with ScheduleGPipe and four microbatches.

The second stage is slow.
"""

import torch
import torch.distributed as dist
from job import CLASSES, RANK, STEPS, WIDTH, WORLD_SIZE, Losses, planted_fault
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

torch.manual_seed(0)
dist.init_process_group("gloo")
part = [
    nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
    nn.Sequential(nn.Linear(WIDTH, CLASSES)),
][RANK]
part[0].register_forward_pre_hook(lambda module, inputs: planted_fault())
stage = PipelineStage(part, RANK, WORLD_SIZE, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(1)
losses = Losses()
# -- paste
import torchlens_perf as perf

with perf.watch(part, optimizer) as w:
    for _ in range(STEPS):
        inputs, labels = (
            torch.randn(8, WIDTH, generator=generator),
            torch.randint(4, (8,), generator=generator),
        )
        if RANK == 0:
            schedule.step(inputs)
        else:
            of_microbatches = []
            schedule.step(target=labels, losses=of_microbatches)
        optimizer.step()
        optimizer.zero_grad()
        # -- end
        # Rank 0 prints, but the loss is on the last rank. A checksum of rank 0's weights is printed
        # instead, because these weights depend on the loss.
        losses.add(part[0].weight.sum().detach())
losses.print(steps=STEPS)
dist.destroy_process_group()
