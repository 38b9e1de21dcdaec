"""Train in a watch, and write what it adds to the process and when its body ends.

usage: watched_exit.py FILE
"""

import contextlib
import json
import os
import sys
import time

import torch
from torch import nn

import torchlens_perf as perf

STEPS = 50


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def sockets() -> int:
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        # listdir() also lists its own descriptor, which is closed by now.
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return found


def main(result: str) -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    # The first step starts torch's own threads.
    step()
    before = threads(), sockets()
    with perf.watch(model, optimizer):
        for _ in range(STEPS):
            step()
            # Give the sidecar time to start and to send.
            time.sleep(0.02)
        inside = threads(), sockets()
        body_ended_s = time.monotonic()
    after = threads(), sockets()
    libraries = sorted({"opentelemetry", "grpc", "requests", "pyarrow"} & sys.modules.keys())
    with open(result, "w") as file:
        json.dump([body_ended_s, before, inside, after, libraries], file)


if __name__ == "__main__":
    main(sys.argv[1])
