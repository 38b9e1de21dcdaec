"""Train a small DistributedDataParallel model on gloo without torchlens_perf.

usage: train_two_ranks.py STEPS
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # torch itself aborts in one of four such short runs ("terminate called without an active
    # exception"), also without torchlens_perf. These aborts happen because the group ends while
    # gloo's threads finish the last collective.
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
