"""Train in two threads at once.

Arguments are the way to compute gradients, the way to watch, and the number of steps of a trial.
"""

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

LIKE, WATCHED, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)


def watch(*arguments):
    import torchlens_perf as perf

    return perf.watch(*arguments, report="off")


def compute_gradients(loss, parameters):
    if LIKE == "grad":
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            parameter.grad = gradient
    elif LIKE == "inputs":
        loss.backward(inputs=parameters)
    else:
        loss.backward()


def train(model, optimizer, batches):
    parameters = list(model.parameters())
    for batch in batches:
        optimizer.zero_grad()
        for part in batch.chunk(2) if LIKE == "accumulates" else [batch]:
            compute_gradients(model(part).square().mean(), parameters)
        optimizer.step()
    return model(batches[0]).square().mean().item()


def trial(seed):
    """Train a separate model with its own optimizer and data, as in hyperparameter searches."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, [torch.randn(16, 32, generator=generator) for _ in range(STEPS)]


def run(number):
    model, optimizer, batches = trials[number]
    with watch(model, optimizer) if WATCHED == "each" else contextlib.nullcontext():
        return train(model, optimizer, batches)


trials = [trial(seed) for seed in range(4 if LIKE != "federated" else 2)]
models, optimizers, _ = zip(*trials, strict=True)
with watch(list(models), list(optimizers)) if WATCHED == "all" else contextlib.nullcontext():
    if LIKE == "federated":
        # New threads train the same models in every round. In the first round the main thread
        # trains too.
        losses = [run(number) for number in range(2)]
        for _ in range(4):
            with ThreadPoolExecutor(2) as pool:
                losses = list(pool.map(run, (1, 0)))
    else:
        with ThreadPoolExecutor(2) as pool:
            losses = list(pool.map(run, range(4)))
print(losses)
