"""Train with DDP under watch(), save checkpoints, evaluate, fail once, and continue.

Each rank appends to times-RANK.jsonl how long its own clock measured each planted kind of time, by
attempt. Arguments:

- --steps N: number of the model's steps. --fail N: rank 1 of the first attempt fails after N steps.
- --optimizer NAME: a class of torch.optim. SGD has no step counter.
- --hang S: the failing rank first sleeps in the next step.
- --data S, --save S, --evaluate S, --after S: seconds of waiting for each batch, in each checkpoint,
  in each evaluation, and at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchlens_perf as perf

SAVE_EVERY, EVALUATE_EVERY, FORWARD_S = 20, 30, 0.02
spent_s: Counter[str] = Counter()


@contextlib.contextmanager
def spending(what: str) -> Iterator[None]:
    began_s = time.monotonic()
    try:
        yield
    finally:
        spent_s[what] += time.monotonic() - began_s


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S if self.training else 0)
        return self.linear(x)


class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            with spending("data"):
                time.sleep(self.wait_s)
            yield torch.randn(64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--fail", type=int, default=0)
    parser.add_argument("--optimizer", default="AdamW")
    for name in ("hang", "data", "save", "evaluate", "after"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
        for name, of in (("RANK", "PROCID"), ("WORLD_SIZE", "NTASKS")):
            os.environ[name] = os.environ[f"SLURM_{of}"]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    saved, times = Path("checkpoint.pt"), Path(f"times-{rank}.jsonl")
    model = DistributedDataParallel(Block())
    optimizer = getattr(torch.optim, options.optimizer)(model.parameters(), lr=1e-3)
    first = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    with perf.watch(model, optimizer, report="off") as w:
        batches = iter(torch.utils.data.DataLoader(Batches(options.data), batch_size=8))
        for step in range(first + 1, options.steps + 1):
            if step % EVALUATE_EVERY == 0 and options.evaluate:
                with spending("evaluate"), torch.no_grad():
                    model.eval()
                    model.module(torch.randn(8, 64))
                    time.sleep(options.evaluate)
                    model.train()
            model(next(batches)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            w.step(tokens=8)
            if options.fail == step and rank == 1 and not first:
                # The checkpoint after this step is not written, as if the node had failed.
                time.sleep(options.hang)
                write_times(times, first, step)
                os.kill(os.getpid(), signal.SIGKILL)
            if step % SAVE_EVERY == 0 and options.save:
                with spending("save"):
                    time.sleep(options.save)
                    if rank == 0:
                        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                        torch.save({**state, "step": step}, "checkpoint.new")
                        os.replace("checkpoint.new", saved)
                    else:
                        w.tag("checkpoint")
        time.sleep(options.after)
        write_times(times, first, options.steps)
    dist.destroy_process_group()


def write_times(path: Path, first: int, last: int) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"first": first, "last": last, **spent_s}) + "\n")


if __name__ == "__main__":
    main()
