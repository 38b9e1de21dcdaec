"""Run forward passes only."""

import torch
from job import Losses, batches, classifier

import torchlens_perf as perf

torch.manual_seed(0)
model = classifier().eval()
losses = Losses()
with perf.watch(model), torch.inference_mode():
    for inputs, _ in batches(40):
        losses.add(model(inputs).sum())
losses.print(steps=40)
