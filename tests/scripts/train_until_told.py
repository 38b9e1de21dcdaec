"""Train about 300 steps a second until the file STOP exists.

usage: train_until_told.py FOLDER STOP [STEPS]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

import torchlens_perf as perf

torch.set_num_threads(1)
CONFIG = perf.Config(_exit_timeout_s=30, _total_steps=int(sys.argv[3]) if len(sys.argv) > 3 else 0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with perf.watch(model, optimizer, dir=sys.argv[1], config=CONFIG):
    while not Path(sys.argv[2]).exists():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.003)
