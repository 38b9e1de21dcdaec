"""Train with LBFGS, which evaluates the model several times in each step by calling a closure."""

import torch
from job import Losses, batches, classifier

import torchlens_perf as perf

torch.manual_seed(0)
model = classifier()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
losses = Losses()
with perf.watch(model, optimizer):
    for inputs, labels in batches(30):

        def closure(inputs=inputs, labels=labels):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        losses.add(optimizer.step(closure))
losses.print(steps=30)
