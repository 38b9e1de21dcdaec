"""Fork training processes one after another.

Each process writes its number of finished steps until the test kills the process.

    usage: train_until_killed.py FOLDER COUNT SEED [alone]

"alone" runs without sidecars, which take more time than the rest. The script prints the number of
each process and the process's finished steps.
"""

import mmap
import os
import random
import signal
import struct
import sys
import time

import torch
from torch import nn

import torchlens_perf as perf


def train(folder, finished, alone):
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(8, 16)
    with perf.watch(model, optimizer, dir=folder, report="off", sidecar=not alone):
        step = 0
        while True:
            with perf.section("part"):
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            struct.pack_into("<Q", finished, 0, step)


def main():
    folder, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    alone = "alone" in sys.argv[4:]
    draw = random.Random(seed)
    for number in range(count):
        finished = mmap.mmap(-1, 8)
        child = os.fork()
        if child == 0:
            train(f"{folder}/{number}", finished, alone)
        while struct.unpack_from("<Q", finished)[0] < 5:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.05 if alone else 0.4))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print(number, struct.unpack_from("<Q", finished)[0], flush=True)


main()
