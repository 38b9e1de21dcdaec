"""Train under watch() on the CPU until a fake CUDA allocator runs out of memory."""

from __future__ import annotations

import os
import time

import pytest
import torch

import torchlens_perf as perf
from tests.support.device.fake_allocator import GB, block, frames, installed, segment, snapshot

with pytest.MonkeyPatch.context() as patch:
    allocator = installed(patch)
    allocator.uses(70 * GB, 78 * GB)
    allocator.held = snapshot([segment([block(60 * GB, stack=frames()), block(10 * GB)])])
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with perf.watch(model, optimizer):
        ends_s = time.monotonic() + float(os.environ["SECONDS_UNTIL"])
        while True:
            model(torch.randn(64, 64)).sum().backward()
            optimizer.step()
            time.sleep(0.01)
            if time.monotonic() > ends_s:
                allocator.runs_out(12 * GB, 2 * GB)
                raise torch.OutOfMemoryError("CUDA out of memory")
