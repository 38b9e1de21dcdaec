"""Train with Lightning Fabric, whose own launcher starts the other rank of each of two nodes."""

from __future__ import annotations

import os
import time

import lightning
import torch
from torch import nn

torch.set_num_threads(1)
fabric = lightning.Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy="ddp")
fabric.launch()
torch.manual_seed(7)
model = nn.Sequential(*(nn.Linear(192, 192) for _ in range(4)))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
torch.manual_seed(100 + fabric.global_rank)
slow = int(os.environ.get("SLOW_RANK", "-1")) == fabric.global_rank
for step in range(int(os.environ["STEPS"])):
    if slow and step >= 40:
        time.sleep(0.015)
    loss = model(torch.randn(64, 192)).square().mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
if fabric.global_rank == 0:
    print("loss", loss.item().hex(), flush=True)
