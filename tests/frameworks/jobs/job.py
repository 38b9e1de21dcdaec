"""What the jobs of this folder share: a small model, its data with a planted fault, and what they print.

The fault: examples are slow to come, on rank 1 of two ranks, or where there is one rank alone. What lies between
"paste" and "end" is what docs/guides/frameworks.md shows. Without us, a job runs with tests/frameworks/without in our
place.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
IS_SLOW = RANK == WORLD_SIZE - 1
WIDTH, CLASSES = 32, 4
STEPS = 50
SLOW_S = 0.008  # an example


def planted_fault() -> None:
    """What makes one rank slow: it comes with each example."""
    if IS_SLOW:
        time.sleep(SLOW_S)


def classifier() -> nn.Module:
    """Two layers and a head."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )


class Examples(Dataset):  # type: ignore[type-arg]
    """Random ones, the same in every run; slow to come where the fault is planted."""

    def __init__(self, count: int, *, slow: bool = True) -> None:
        generator = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(count, WIDTH, generator=generator)
        self._labels = torch.randint(CLASSES, (count,), generator=generator)
        self._slow = slow

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._slow:
            planted_fault()
        return self._inputs[index], self._labels[index]


class Tokens(Dataset):  # type: ignore[type-arg]
    """The same for language models: {"input_ids", "labels"}."""

    def __init__(self, count: int, *, vocabulary: int = 64, length: int = 16, slow: bool = True) -> None:
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
    """The losses of this rank, bit by bit."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.count = 0

    def add(self, loss: Tensor | float) -> None:
        """One more."""
        self._digest.update(float(loss).hex().encode())
        self.count += 1

    def facts(self, steps: int, **facts: Any) -> dict[str, Any]:
        """What is compared. steps: as the framework has counted them."""
        return {"losses": self._digest.hexdigest(), "count": self.count, "steps": steps, **facts}

    def print(self, steps: int, **facts: Any) -> None:
        """The last line of rank 0."""
        if RANK == 0:
            print(json.dumps(self.facts(steps, **facts)))
