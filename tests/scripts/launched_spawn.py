"""Run the training of launched.py in two ranks that torch.multiprocessing starts.

usage: launched_spawn.py FIRST_RANK WORLD_SIZE
"""

from __future__ import annotations

import os
import sys

import torch.multiprocessing as mp

from tests.scripts.launched import train

HERE = 2


def worker(local_rank: int, first: int, world_size: int) -> None:
    train(first + local_rank, world_size)


if __name__ == "__main__":
    mp.start_processes(
        worker,
        (int(sys.argv[1]), int(sys.argv[2])),
        HERE,
        start_method=os.environ.get("START_METHOD", "spawn"),
    )
