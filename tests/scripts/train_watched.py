"""Train under a watch, and create the file FLAG after the last step but inside the watch.

usage: train_watched.py FOLDER STEPS [FLAG]

The script prints its parameters, its process id, and its run directory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

import torchlens_perf as perf

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with perf.watch(model, optimizer, dir=sys.argv[1]) as watch:
    for _ in range(int(sys.argv[2])):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    if len(sys.argv) > 3:
        Path(sys.argv[3]).touch()
print("trained", [parameter.tolist() for parameter in model.parameters()])
print("process", os.getpid())
print("recorded", watch.run_dir)
