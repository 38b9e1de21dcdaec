"""Train a small model with one habit that an action should name: train_with_habit.py KIND STEPS FOLDER."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import torchlens_perf as perf

WIDTH, LAYERS, BATCH, COLLATE_S = 256, 6, 64, 0.02


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self._recomputes = kind == "checkpointing"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self._recomputes:
                x = checkpoint(self.apply_layer, layer, x, use_reentrant=False)
            else:
                x = self.apply_layer(layer, x)
        return x

    @staticmethod
    def apply_layer(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.tanh(layer(x))
        return y


def collate(rows: list[Any]) -> torch.Tensor:
    end_s = time.thread_time() + COLLATE_S
    while time.thread_time() < end_s:
        sum(range(1000))
    return torch.stack([row for (row,) in rows])


def train(kind: str, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    model: Any = Model(kind)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, find_unused_parameters=kind == "unused")
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if kind == "foreach":
        optimizer = torch.optim.AdamW(
            [*model.parameters(), *(nn.Parameter(torch.randn(64)) for _ in range(400))],
            foreach=False,
        )
    loader = DataLoader(
        TensorDataset(torch.randn(BATCH * steps, WIDTH)),
        batch_size=BATCH,
        collate_fn=collate if kind == "collation" else None,
    )
    with perf.watch(model, optimizer, dir=folder):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch if kind == "collation" else batch[0]).square().mean()
            loss.backward()
            for group in optimizer.param_groups:
                for each in group["params"]:
                    each.grad = torch.zeros_like(each) if each.grad is None else each.grad
            optimizer.step()
            if kind == "item":
                loss.item()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), sys.argv[3])
