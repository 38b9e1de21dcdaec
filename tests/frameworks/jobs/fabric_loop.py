"""Train with Fabric on two DDP ranks, using setup() and Fabric's own backward()."""

import logging

import torch
from job import STEPS, WORLD_SIZE, Examples, Losses, classifier
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
fabric = Fabric(accelerator="cpu", devices=WORLD_SIZE, strategy="ddp" if WORLD_SIZE > 1 else "auto")
fabric.launch()
fabric.seed_everything(0, verbose=False)
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Examples(4 * STEPS * WORLD_SIZE), batch_size=4)
losses = Losses()
# -- paste
import torchlens_perf as perf

model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
with perf.watch(model, optimizer) as w:
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        # -- end
        losses.add(loss)
losses.print(steps=STEPS)
