"""Train with DistributedDataParallel under a launcher, without using torchlens_perf.

usage: train.py [--workers fork|spawn] [--steps N] [--fail-at STEP] [--exit CODE]

Rank 0 prints the properties of its start that a script can observe, and a checksum of the trained
parameters.
"""

import argparse
import hashlib
import itertools
import os
import pickle
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

# Sleep before the exit. gloo's threads in torch 2.13 drop Python objects after the last backward
# pass. A process that exits at that moment aborts with "terminate called without an active
# exception" (8 of 25 unrecorded runs on a busy machine).
SETTLE_S = 0.2


class Numbers(Dataset):
    """A data set defined in __main__, so spawned workers must import this script again."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.full((16,), index / 4096), torch.tensor(index % 4)


class Pickled:
    pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", choices=["fork", "spawn"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--exit", type=int)
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 4))
    if world_size > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    workers = (
        {"num_workers": 2, "multiprocessing_context": options.workers} if options.workers else {}
    )
    loader = DataLoader(Numbers(), batch_size=16, **workers)
    for step, (x, y) in enumerate(batch for _ in itertools.count() for batch in loader):
        if step == options.steps:
            break
        if step == options.fail_at and rank == 1 and attempt == 0:
            raise RuntimeError("planted failure")
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert type(pickle.loads(pickle.dumps(Pickled()))) is Pickled
    if rank == 0:
        data = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        print("parameters", hashlib.sha256(data).hexdigest()[:16])
        print(
            "started as",
            __name__,
            os.path.basename(sys.argv[0]),
            sys.argv[1:],
            os.path.basename(sys.path[0]),
        )
    if world_size > 1:
        time.sleep(SETTLE_S)
        dist.destroy_process_group()
    if options.exit is not None:
        sys.exit(options.exit)


if __name__ == "__main__":
    main()
