"""Common code of the jobs in this folder: a small model, its data with a planted fault, and the
output.

The fault is a slow loader on rank 1 of two ranks, or on the only rank.

docs/guides/frameworks.md shows the code between "paste" and "end" of some jobs.

A run without recording imports tests/frameworks/without instead of the package.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
IS_SLOW = RANK == WORLD_SIZE - 1
WIDTH, CLASSES = 32, 4
STEPS = 50
# Seconds per example.
SLOW_S = 0.008


def planted_fault() -> None:
    """Delay each example on the slow rank."""
    if IS_SLOW:
        time.sleep(SLOW_S)


def classifier() -> nn.Module:
    """Return a model with two layers and a head."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    )


class Examples(Dataset):  # type: ignore[type-arg]
    """Random examples, the same in every run. Loading is slow on the rank with the fault."""

    def __init__(self, count: int, *, slow: bool = True) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tensors = (
            torch.randn(count, WIDTH, generator=generator),
            torch.randint(CLASSES, (count,), generator=generator),
        )
        self._slow = slow

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._slow:
            planted_fault()
        return self.tensors[0][index], self.tensors[1][index]


def batches(count: int, size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `count` batches without a DataLoader and without the fault."""
    examples = Examples(count * size, slow=False)
    for start in range(0, count * size, size):
        yield examples.tensors[0][start : start + size], examples.tensors[1][start : start + size]


class Tokens(Dataset):  # type: ignore[type-arg]
    """Random examples for language models: {"input_ids", "labels"}."""

    def __init__(
        self, count: int, *, vocabulary: int = 64, length: int = 16, slow: bool = True
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(vocabulary, (count, length), generator=generator)
        self._slow = slow

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self._slow:
            planted_fault()
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


class Losses:
    """Collects the exact losses of this rank."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.count = 0

    def add(self, loss: Tensor | float) -> None:
        """Append one loss."""
        self._digest.update(float(loss).hex().encode())
        self.count += 1

    def facts(self, steps: int, **facts: Any) -> dict[str, Any]:
        """Return the values that tests compare. `steps` is the number of steps by the framework."""
        return {"losses": self._digest.hexdigest(), "count": self.count, "steps": steps, **facts}

    def print(self, steps: int, **facts: Any) -> None:
        """Print the last line of rank 0."""
        if RANK == 0:
            print(json.dumps(self.facts(steps, **facts)))
