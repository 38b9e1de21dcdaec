"""Train with the script's own OpenTelemetry spans.

usage: train_traced.py [--watch] [STEPS]

The script uses torchlens_perf only with --watch. Rank 0 prints the exact losses. A launcher sets
the ranks.
"""

import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist
from opentelemetry import trace
from torch import nn


def main(steps: int, watch: bool) -> None:
    torch.set_num_threads(1)
    several = "RANK" in os.environ
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    if several:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tracer = trace.get_tracer("users")
    if watch:
        import torchlens_perf as perf

        recording = perf.watch(model, optimizer)
    else:
        recording = contextlib.nullcontext()
    with tracer.start_as_current_span("my training"), recording:
        for step in range(steps):
            with tracer.start_as_current_span("my step"):
                loss = model(torch.randn(16, 32)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if os.environ.get("RANK", "0") == "0":
                    print("loss", step, loss.item().hex())
    if several:
        # gloo's threads finish the last collective.
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[-1]) if sys.argv[-1].isdecimal() else 8, "--watch" in sys.argv)
