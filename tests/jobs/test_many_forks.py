"""Forks while a watch records: every child ends, with no thread of ours, and the parent loses nothing."""

from __future__ import annotations

import os
import threading
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
from tests.support.processes import report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.place.node import node_name
from torchlens_perf.watch import running

FORKS = 1000
ENDS_WITHIN_S = 60  # what waits for a lock that nobody holds does not end at all


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with perf.section("part"):
        model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def in_child(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What a child of a job may do. The exit code.

    Of its threads only Python's are counted: libraries that other tests have loaded here, as grpc, begin some of theirs
    in each child.
    """
    if running() is not None:
        return 1
    if threading.active_count() != 1:
        return 2
    step(model, optimizer)
    return 0 if threading.active_count() == 1 else 4


def ended(child: int) -> int:
    """Its exit code; None of a child that does not end."""
    deadline_s = time.monotonic() + ENDS_WITHIN_S
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline_s, "a child hangs"
        time.sleep(0.0005)
    return os.waitstatus_to_exitcode(found[1])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("forks", [20, *long(FORKS)])
def test_storm_of_forks(forks: int, tmp_path: Path) -> None:
    """While another thread marks without pause. Children train on; the parent's steps are all there."""
    torch.set_num_threads(1)
    model, began_s, number = nn.Linear(4, 2), time.monotonic(), forks if forks < FORKS else share(FORKS)
    optimizer, stop = torch.optim.SGD(model.parameters(), lr=0.1), threading.Event()

    def mark() -> None:
        while not stop.is_set():
            with perf.section("busy"):
                time.sleep(0)

    with perf.watch(model, optimizer, dir=str(tmp_path), sidecar=False, report=False) as watch:
        thread = threading.Thread(target=mark)
        thread.start()
        try:
            for _ in range(number):
                child = os.fork()
                if child == 0:
                    code = 3
                    try:
                        code = in_child(model, optimizer)
                    finally:
                        os._exit(code)
                assert ended(child) == 0
        finally:
            stop.set()
            thread.join()
        for _ in range(10):
            step(model, optimizer)
    assert watch.run_dir is not None
    made = RunDirectory(watch.run_dir)
    finish(made, node_name())

    assert report(made)["ranks"][0]["steps"] == 10
    if forks == FORKS:
        note(
            "forks beside a thread that marks",
            number,
            FORKS,
            "0 hung, 0 of the parent's steps lost, 0 threads of ours in a child",
            time.monotonic() - began_s,
        )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("forks", [10, *long(FORKS)])
def test_workers_of_many_epochs(forks: int, tmp_path: Path) -> None:
    """Two new workers an epoch: every batch arrives, and every step is recorded with all of its spans."""
    torch.set_num_threads(1)
    model, began_s, number = nn.Linear(4, 2), time.monotonic(), forks if forks < FORKS else share(FORKS)
    optimizer, epochs, batches = torch.optim.SGD(model.parameters(), lr=0.1), number // 2, 0
    loader = DataLoader(
        TensorDataset(torch.ones(4, 4)), 2, num_workers=2, multiprocessing_context="fork", timeout=ENDS_WITHIN_S
    )
    with perf.watch(model, optimizer, dir=str(tmp_path), sidecar=False, report=False, ring_records=1 << 16) as watch:
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
        note("forks of DataLoader", 2 * epochs, FORKS, f"0 of {batches:,} steps lost", time.monotonic() - began_s)
