"""Tests that a watch leaves no patch, hook, thread, file, handler or object in the process."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchlens_perf as perf
from tests.support.process_state import changed_since, state
from tests.support.recording import EVERYTHING, recorded


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in DataLoader(TensorDataset(torch.randn(4, 4)), 2):
        with perf.section("all of it"):
            model(batch).sum().backward()
            optimizer.step()


def test_process_state_is_unchanged_after_a_watch(tmp_path: Path) -> None:
    """Torch's classes and registries, threads, files, handlers and settings are the same before and
    after.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    with recorded(tmp_path, model, **EVERYTHING):
        # The first use of a watch imports and registers objects that stay.
        train(model)
    train(model)
    torch.manual_seed(0)
    before = state()
    with recorded(tmp_path, model, **EVERYTHING):
        generator = torch.get_rng_state()
        train(model)
        torch.set_rng_state(generator)
        inside = state()
    after = changed_since(before)

    assert sorted(name for name in before if before[name] != inside[name]) == [
        "autograd", "collector", "errors", "files", "iterator class", "loader class",
        "module calls", "optimizer class", "scaler class", "step hooks",
        "work class",
    ]  # fmt: skip
    assert after == set()


def test_process_state_is_unchanged_when_the_loop_raises(tmp_path: Path) -> None:
    """The user's exception passes through the watch."""
    model = nn.Sequential(nn.Linear(4, 4))
    error = KeyboardInterrupt()
    before = state()

    def interrupted() -> None:
        with recorded(tmp_path, model, **EVERYTHING):
            model(torch.ones(2, 4)).sum().backward()
            with perf.section("interrupted"):
                raise error

    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted()

    assert caught.value is error
    assert changed_since(before) == set()


def test_session_and_recorder_are_freed_with_the_watch(tmp_path: Path) -> None:
    """The model still exists."""
    model = nn.Sequential(nn.Linear(4, 4))
    with recorded(tmp_path, model, **EVERYTHING) as recording:
        train(model)
        session = weakref.ref(recording.watch._session)
    gc.collect()

    assert session() is None


def test_number_of_objects_does_not_grow_with_watches(tmp_path: Path) -> None:
    """A process has as many objects after many watches as after a few."""
    model = nn.Sequential(nn.Linear(4, 4))

    def watch_again(times: int) -> int:
        for number in range(times):
            with recorded(tmp_path / str(number), model, ring_records=1024, **EVERYTHING):
                train(model)
        gc.collect()
        return len(gc.get_objects())

    few = watch_again(3)
    many = watch_again(12)

    assert many - few < 20
