"""Tests of forks while a watch records.

Every child ends with one thread, and the parent loses no records.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchlens_perf as perf
from tests.sidecar.test_node import finish
from tests.support.figures import note, share
from tests.support.long import long
from tests.support.processes import ROOT, SCRIPTS, report, run_warm
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.place.node import node_name

FORKS = 1000
# A child that waits for a lost lock never ends.
ENDS_WITHIN_S = 60
STORM = str(SCRIPTS / "storm_of_forks.py")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("forks", [20, *long(FORKS)])
def test_forks_while_another_thread_records_lose_no_step(forks: int, tmp_path: Path) -> None:
    """Children continue training alone, and all of the parent's steps are recorded."""
    began_s, number = time.monotonic(), forks if forks < FORKS else share(FORKS)
    done = run_warm(
        [sys.executable, STORM, str(tmp_path), str(number)],
        tmp_path,
        timeout_s=1700,
        PYTHONPATH=str(ROOT),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ends"] == {"well": number}
    made = RunDirectory(Path(found["run_dir"]))
    finish(made, node_name())

    assert report(made)["ranks"][0]["steps"] == found["steps"]
    if forks == FORKS:
        note(
            "forks while a thread marks",
            number,
            FORKS,
            "0 hung, 0 of the parent's steps lost, 0 threads in a child",
            time.monotonic() - began_s,
        )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("forks", [10, *long(FORKS)])
def test_new_workers_in_each_epoch_lose_no_step(forks: int, tmp_path: Path) -> None:
    """Each epoch starts two workers.

    Every batch arrives, and every step is recorded with all its spans.
    """
    torch.set_num_threads(1)
    model, began_s, number = (
        nn.Linear(4, 2),
        time.monotonic(),
        forks if forks < FORKS else share(FORKS),
    )
    optimizer, epochs, batches = torch.optim.SGD(model.parameters(), lr=0.1), number // 2, 0
    loader = DataLoader(
        TensorDataset(torch.ones(4, 4)),
        2,
        num_workers=2,
        multiprocessing_context="fork",
        timeout=ENDS_WITHIN_S,
    )
    with perf.watch(
        model, optimizer, dir=str(tmp_path), sidecar=False, report="off", ring_records=1 << 16
    ) as watch:
        for _ in range(epochs):
            for (batch,) in loader:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                batches += 1
    assert watch.run_dir is not None
    made = RunDirectory(watch.run_dir)
    finish(made, node_name())
    value = report(made)

    assert batches == 2 * epochs
    assert (value["ranks"][0]["steps"], value["quality"]["lost"]) == (batches, 0)
    if forks == FORKS:
        note(
            "forks of DataLoader",
            2 * epochs,
            FORKS,
            f"0 of {batches:,} steps lost",
            time.monotonic() - began_s,
        )
