"""Train in a loop with Lightning Fabric, whose setup() wraps the model and the optimizer."""

import torch
from lightning.fabric import Fabric
from script import Losses, classifier, examples, watched
from torch.utils.data import DataLoader

torch.manual_seed(0)
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
model = classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(examples(240), batch_size=8))
losses = Losses()
with watched(model, optimizer):
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.add(loss)
losses.print(steps=30)
