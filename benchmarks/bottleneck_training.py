"""One rank of a job with one planted bottleneck: a small transformer under DistributedDataParallel.

The loop is written as a user's. `--kind` adds one bottleneck; the kind "none" has no bottleneck, and
is also what is left after each of them is removed. bottlenecks.py starts the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import torchlens_perf as perf

VOCABULARY, LENGTH, WIDTH, BLOCKS, BATCH = 256, 32, 96, 4, 16
WARM_UP = 5


def spend_s(seconds: float) -> None:
    """Keep the CPU busy."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        sum(range(1000))


class Tokens(Dataset[Any]):
    def __init__(self, kind: str, size_s: float, steps: int) -> None:
        self._kind, self._size_s, self._steps = kind, size_s, steps

    def __len__(self) -> int:
        return BATCH * self._steps

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % BATCH == 0:
            if self._kind == "storage":
                time.sleep(self._size_s)
            if self._kind == "workers":
                time.sleep(self._size_s + 0.03)
        return torch.arange(index, index + LENGTH + 1) % VOCABULARY


def collate(rows: list[torch.Tensor], kind: str, size_s: float) -> torch.Tensor:
    if kind == "collation":
        spend_s(size_s)
    return torch.stack(rows)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Wide(nn.Module):
    """A module that repeats its work. With half as many repetitions, it takes half the time."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


class Model(nn.Module):
    def __init__(self, kind: str, repeats: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.wide = Wide(repeats)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self._checkpointing = kind == "recompute"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._checkpointing else block(x)
        return self.head(self.wide(x))


@contextlib.contextmanager
def _busy_neighbours(count: int) -> Iterator[None]:
    """Run processes that keep CPUs busy."""
    import subprocess
    import sys

    started = [
        subprocess.Popen([sys.executable, "-c", "while True: sum(range(10000))"])
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def main() -> None:
    """Train with the bottleneck of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", help="folder of the run; default: TORCHLENS_PERF_DIR")
    options = parser.parse_args()
    kind, draw = options.kind, random.Random(options.seed)
    size_s = draw.uniform(0.02, 0.04)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    dist.init_process_group("gloo")
    rank, slow = dist.get_rank(), draw.randrange(dist.get_world_size())
    repeats = {"module": 120, "module_half": 60}.get(kind, 4)
    core = Model(kind, repeats)
    model = DistributedDataParallel(core)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=kind != "optimizer")
    # Parameters of another model that this loop trains as well.
    spread = nn.ParameterList(nn.Parameter(torch.randn(16)) for _ in range(900))
    if kind == "optimizer":
        optimizer.add_param_group({"params": list(spread)})
    loader = DataLoader(
        Tokens(kind, size_s, options.steps),
        batch_size=BATCH,
        num_workers=1 if kind == "workers" else 0,
        collate_fn=lambda rows: collate(rows, kind, size_s),
    )
    payload, cyclic = torch.ones(1 << 22), [[[i] for i in range(40)] for _ in range(20000)]
    neighbours = _busy_neighbours(4 if kind == "contention" and rank == 0 else 0)
    folder = {"dir": options.out} if options.out else {}
    with neighbours, perf.watch(model, optimizer, **folder):
        for step, ids in enumerate(loader):
            optimizer.zero_grad()
            if kind == "rollouts":
                with torch.no_grad():
                    for _ in range(6):
                        core(ids[:, :-1])
            loss = F.cross_entropy(core_or(model, ids), ids[:, 1:].flatten())
            loss.backward()
            if kind == "optimizer":
                for each in spread:
                    each.grad = torch.ones_like(each)
            if kind == "communication":
                dist.all_reduce(payload)
            optimizer.step()
            hold_up(kind, size_s, step, rank, slow, core, ids, cyclic)
    dist.destroy_process_group()


def core_or(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return flat logits of a batch."""
    flat: torch.Tensor = model(ids[:, :-1]).flatten(0, 1)
    return flat


def hold_up(
    kind: str,
    size_s: float,
    step: int,
    rank: int,
    slow: int,
    core: nn.Module,
    ids: torch.Tensor,
    cyclic: list[Any],
) -> None:
    """Do what the bottleneck adds between two steps."""
    if kind == "host":
        spend_s(size_s)
    elif kind == "section":
        with perf.section("tokenize"):
            spend_s(size_s)
    elif kind == "slow_rank" and rank == slow:
        spend_s(size_s)
    elif kind == "imbalance" and step % 2 == rank:
        for _ in range(4):
            core(ids[:, :-1]).sum().backward()
    elif kind == "saving" and step % 20 == 10:
        torch.save({"model": core.state_dict(), "more": torch.ones(1 << 25)}, io.BytesIO())
    elif kind == "gc" and step % 4 == 1:
        gc.collect()
    elif kind == "evaluation" and step % 30 == 20:
        core.eval()
        with torch.no_grad():
            for _ in range(40):
                core(ids[:, :-1])
        core.train()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
