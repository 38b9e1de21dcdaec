"""Loaders that are too slow on all ranks are no slow rank; one loader that is too slow is one.

With equally slow loaders, only one rank waits for data: the others wait for it in the all-reduce
meanwhile, and their next batches become ready.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import torchlens_perf as perf
from tests.support.gloo import run_ranks
from tests.support.recorded_run import wait_for_sidecar
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory

pytestmark = pytest.mark.distributed
STEPS, COMPUTE_S, SLOW_S, FAST_S = 80, 0.02, 0.1, 0.005


class Rows(Dataset[Any]):
    def __init__(self, batch_s: float, quick: int) -> None:
        """quick: number of batches at the start that take no time."""
        self._batch_s, self._quick = batch_s, quick

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._batch_s if index >= self._quick else 0)
        return torch.ones(4)


def train(folder: Path) -> None:
    rank = dist.get_rank()
    for name, slow_ranks in (("all", (0, 1)), ("one", (1,))):
        model = DistributedDataParallel(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # The loader of rank 1 is always ahead.
        rows = Rows(SLOW_S - 0.002 * rank if rank in slow_ranks else FAST_S, quick=4 * rank)
        with perf.watch(model, optimizer, dir=str(folder / name), report="off"):
            for batch in DataLoader(rows, num_workers=1):
                loss = model(batch).sum()
                time.sleep(COMPUTE_S)
                loss.backward()
                optimizer.step()
        dist.barrier()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loaders")
    run_ranks(train, folder)
    return folder


def report_on(folder: Path) -> Any:
    (path,) = (path.parent for path in folder.glob("*/nodes"))
    run = RunDirectory(path)
    wait_for_sidecar(run, 120)
    return load_report(run)


@pytest.mark.long
def test_no_rank_is_slow_if_all_loaders_are_too_slow(folder: Path) -> None:
    report = report_on(folder / "all")
    changes = {each.change: each.gain_s for each in report["lost_time"].changes}
    assert changes["data=0"] > 0.04
    assert changes.get("rank=all@median", 0.0) < 0.5 * changes["data=0"]
    # On a busy machine, a rank may be slower by some milliseconds.
    costs_s = [row.cost_s_per_step for row in report["verdicts"] if row.kind == "straggler"]
    assert sum(costs_s) < 0.25 * changes["data=0"]
    first = next(row for row in report["verdicts"] if row.kind == "data_bound")
    assert "is spent in communication with a rank that waits for data" in first.sentence


@pytest.mark.long
def test_rank_with_a_slow_loader_is_named(folder: Path) -> None:
    report = report_on(folder / "one")
    (slow,) = [row for row in report["verdicts"] if row.kind == "straggler"]
    assert (slow.rank, slow.phase) == (1, "data")
