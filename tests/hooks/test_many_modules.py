"""Costs of a watch of many modules: of its start, and of the steps after a sampled step."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
from torch import nn

import torchlens_perf as perf

# An ordinary start makes 61 calls for each module. It made 200 calls when each module had closures of
# its own.
MAX_CALLS = 95
# The first step whose backward pass is sampled is step 8.
STEPS_BEFORE, STEPS_WITH_SAMPLE = 7, 3


def chain(modules: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), *(nn.ReLU() for _ in range(modules)))


def count_calls_of_start(folder: Path, modules: int) -> int:
    """Return how many functions are called, in Python and C, from entering a watch until it runs."""
    watch = perf.watch(chain(modules), dir=folder, modules="all", sidecar=False, report="off")
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        watch.__enter__()
    finally:
        sys.setprofile(None)
    watch.stop()
    return calls


def test_start_makes_few_calls_for_each_module(tmp_path: Path) -> None:
    count_calls_of_start(tmp_path, 1)  # The first start imports modules.
    few, many = (count_calls_of_start(tmp_path, modules) for modules in (200, 1200))

    assert (many - few) / 1000 < MAX_CALLS


def test_sampled_step_leaves_no_object_for_each_module(tmp_path: Path) -> None:
    """Objects that stay would lie between the memory of tensors, which slows down all later steps."""
    modules = 1000
    model = chain(modules)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(steps: int) -> int:
        for _ in range(steps):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        return len(gc.get_objects())

    with perf.watch(model, optimizer, dir=tmp_path, modules="all", sidecar=False, report="off"):
        before = train(STEPS_BEFORE)
        left = train(STEPS_WITH_SAMPLE) - before

    assert left < modules / 4
