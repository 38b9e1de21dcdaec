"""A rank with longer sequences is not blamed for its time, whatever type its batches have."""

from __future__ import annotations

import time
from collections import UserDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import torchlens_perf as perf
from tests.support.gloo import run_ranks
from tests.support.recorded_run import wait_for_sidecar
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory

pytestmark = [pytest.mark.distributed, pytest.mark.long]
STEPS, SECONDS_PER_TOKEN = 150, 2e-4
KINDS: dict[str, Callable[..., Any]] = {
    "UserDict": UserDict,
    "named tuple": namedtuple("Tokens", "input_ids"),
    "namespace": SimpleNamespace,
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS_PER_TOKEN * tokens.numel())
        return self.embedding(tokens).sum()


def train(folder: Path) -> None:
    """Train with 64 tokens on rank 0, and with 128 on rank 1."""
    tokens = torch.ones(1, 64 * (1 + dist.get_rank()), dtype=torch.int64)
    for name, kind in KINDS.items():
        model = DistributedDataParallel(Model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = DataLoader(
            [tokens] * STEPS, None, collate_fn=lambda x, make=kind: make(input_ids=x)
        )
        with perf.watch(model, optimizer, dir=str(folder / name), report="off"):
            for _ in batches:
                model(tokens).backward()
                optimizer.step()
        dist.barrier()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batches")
    run_ranks(train, folder)
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_time_of_longer_sequences_is_explained_by_the_workload(name: str, folder: Path) -> None:
    (nodes,) = (folder / name).glob("*/nodes")
    run = RunDirectory(nodes.parent)
    wait_for_sidecar(run, 120)
    stragglers = [row for row in load_report(run)["verdicts"] if row.kind == "straggler"]

    assert [row.evidence.more_workload for row in stragglers] in ([], [1.0])
