"""Train without an optimizer, in a loop that updates the parameters by hand."""

import torch
from job import Losses, batches, classifier

import torchlens_perf as perf

torch.manual_seed(0)
model = classifier()
losses = Losses()
with perf.watch(model):
    for inputs, labels in batches(40):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        losses.add(loss)
losses.print(steps=40)
