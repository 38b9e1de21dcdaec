"""Train the same DDP model twice under one watch, the second time once the file `go` exists.

The file RANK.json contains the parameters' digest of both times, the processor seconds of each
step, and the process's threads and sockets.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchlens_perf as perf

STEPS = 60


def train() -> dict[str, Any]:
    torch.manual_seed(0)
    parallel = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)), nn.Dropout(0.1))
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    seconds = []
    for _ in range(STEPS):
        # Use processor time, because other programs may delay the rank.
        begin = time.thread_time()
        parallel(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.thread_time() - begin)
    state = b"".join(each.detach().numpy().tobytes() for each in parallel.parameters())
    return {
        "parameters": hashlib.sha256(state + bytes(torch.get_rng_state().tolist())).hexdigest(),
        "seconds": seconds,
        "threads": sorted(each.name for each in threading.enumerate()),
        "sockets": sum(
            os.readlink(each).startswith("socket:")
            for each in Path("/proc/self/fd").glob("*")
            if each.exists()
        ),
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with perf.watch():
        told = [train()]
        while not Path("go").exists():
            time.sleep(0.01)
        dist.barrier()
        told.append(train())
    partial = Path(f"{dist.get_rank()}.partial")
    partial.write_text(json.dumps(told))
    partial.rename(f"{dist.get_rank()}.json")
    # train_two_ranks.py explains the reason for this sleep.
    time.sleep(0.3)
    dist.destroy_process_group()


main()
