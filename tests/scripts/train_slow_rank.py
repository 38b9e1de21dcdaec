"""Train with DDP over gloo, a data loader, sections and a slow rank.

usage: train_slow_rank.py STEPS

Rank 1 sleeps in its forward pass, so it is slow on busy and idle machines.

In step 2, a section of rank 0 ends with an exception. The name of another section has non-ASCII
letters.
"""

import contextlib
import sys
import time
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchlens_perf as perf


class Block(nn.Module):
    """Two layers after a sleep."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x + self.down(self.up(x).relu())


def main(steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    slow = 0.01 if rank == 1 else 0.0
    model = DistributedDataParallel(
        nn.Sequential(OrderedDict(encoder=Block(0.005), decoder=Block(0.005 + slow)))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(torch.randn(16 * steps, 32)), batch_size=16)
    with perf.watch(model, optimizer):
        for step, (batch,) in enumerate(data):
            with perf.section("tokenize/größe"):
                batch = batch * 2
            with contextlib.suppress(ValueError), perf.section("check"):
                if step == 2 and rank == 0:
                    raise ValueError("this text stays in the job")
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        # gloo's threads finish the last collective. Without the sleep torch aborts in some runs.
        time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
