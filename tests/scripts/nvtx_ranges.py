"""Train a few steps under watch() for an NVTX tool.

usage: nvtx_ranges.py FOLDER
"""

import contextlib
import sys

import torch
from torch import nn

import torchlens_perf as perf


class Fails(nn.Module):
    def forward(self, x):
        raise ValueError("planted")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.fails = nn.Linear(4, 8), nn.Linear(8, 2), Fails()

    def forward(self, x):
        with contextlib.suppress(ValueError):
            self.fails(x)
        return self.second(torch.relu(self.first(x)))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(7, 4), batch_size=1)
with perf.watch(model, optimizer, dir=sys.argv[1], sidecar=False, report="off"):
    for x in loader:
        with perf.section("augment"):
            x = x * 2
        model(x).sum().backward()
        optimizer.step()
with perf.section("after the watch"):
    pass
