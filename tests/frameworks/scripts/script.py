"""Common code of the scripts in this folder: a small model, its data, and the watch of a run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WIDTH, CLASSES = 64, 4


def classifier() -> nn.Module:
    """Return a model with three layers and a head."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def examples(count: int) -> TensorDataset:
    """Return random examples, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, WIDTH, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (count,), generator=generator))


def watched(*arguments: Any) -> AbstractContextManager[Any]:
    """Return perf.watch() as in the README if the test requests it.

    Otherwise the script does not use the package.
    """
    if os.environ.get("SCRIPT_WATCHES") != "1":
        return contextlib.nullcontext()
    import torchlens_perf as perf

    return perf.watch(*arguments)


class Losses:
    """Collects the exact losses of a run."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._count = 0

    def add(self, loss: Tensor | float) -> None:
        """Append one loss."""
        value = float(loss)
        self._digest.update(value.hex().encode())
        self._count += 1

    def print(self, **facts: Any) -> None:
        """Print the script's last line: the losses and its own count of steps."""
        print(json.dumps({"losses": self._digest.hexdigest(), "count": self._count, **facts}))


def batches(count: int, size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `count` batches without a DataLoader."""
    inputs, labels = examples(count * size).tensors
    for start in range(0, count * size, size):
        yield inputs[start : start + size], labels[start : start + size]
