"""Run forward passes only."""

import torch
from script import Losses, batches, classifier, watched

torch.manual_seed(0)
model = classifier().eval()
losses = Losses()
with watched(model), torch.inference_mode():
    for inputs, _ in batches(40):
        losses.add(model(inputs).sum())
losses.print(steps=40)
