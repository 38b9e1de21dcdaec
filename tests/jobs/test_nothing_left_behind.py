"""Tests that a watch leaves no patch, hook, thread, file, handler or object in the process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch._C._distributed_c10d import Work
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import torchlens_perf as perf
from tests.support.recorders import IDS
from tests.support.recording import EVERYTHING, recorded
from torchlens_perf.errors import swallowed
from torchlens_perf.hooks.collective import is_tapped_by_another_tool, list_collective_operators
from torchlens_perf.recorder.torch_private import WAIT_TENSOR

TYPE_VECTORCALL_OFFSET = 7 * ctypes.sizeof(ctypes.c_void_p)
"""Offset of tp_vectorcall_offset in a type object."""


def state() -> dict[str, Any]:
    """Return everything that a profiler could have changed."""
    return {
        "module class": dict(vars(nn.Module)),
        "module calls": vectorcall(nn.Module.__call__),
        "optimizer class": dict(vars(torch.optim.Optimizer)),
        "scaler class": dict(vars(torch.amp.GradScaler)),
        "loader class": dict(vars(DataLoader)),
        "iterator class": dict(vars(_BaseDataLoaderIter)),
        "work class": dict(vars(Work)),
        "tensor class": dict(vars(torch.Tensor)),
        "autograd": dict(vars(torch.autograd)),
        "distributed": dict(vars(torch.distributed)),
        "step hooks": (
            list(torch_optimizer._global_optimizer_pre_hooks.values()),
            list(torch_optimizer._global_optimizer_post_hooks.values()),
        ),
        "module hooks": [
            dict(getattr(nn.modules.module, name))
            for name in vars(nn.modules.module)
            if name.startswith("_global_") and name.endswith("hooks")
        ],
        # Our kernel of the native tap stays registered and passes calls on. native/tap.cpp explains
        # the reason.
        "taps": [
            name
            for name in [*list_collective_operators(), WAIT_TENSOR]
            if is_tapped_by_another_tool(name)
        ],
        "dynamo": repr(torch._dynamo.config.get_config_copy()),
        "threads": threading.enumerate(),
        "files": open_files(),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "tracing": (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
        "collector": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "logging": (
            list(logging.root.handlers),
            logging.root.level,
            list(logging.getLogger("torchlens_perf").handlers),
        ),
        "warnings": list(warnings.filters),
        "importing": (list(sys.meta_path), list(sys.path_hooks), list(sys.path)),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "grad": (torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.get_num_threads()),
        "random": torch.get_rng_state().tolist(),
        "errors": swallowed.on_error,
    }


def vectorcall(function: Callable[..., Any]) -> int | None:
    """Return the address of the C function that calls a Python function."""
    offset = ctypes.c_ssize_t.from_address(id(type(function)) + TYPE_VECTORCALL_OFFSET).value
    return ctypes.c_void_p.from_address(id(function) + offset).value


def open_files() -> list[str]:
    """Return the open files, except the directory that is listed for this purpose."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return sorted(found)


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
    after = state()

    assert sorted(name for name in before if before[name] != inside[name]) == [
        "autograd", "collector", "errors", "files", "iterator class", "loader class",
        "module calls" if IDS[0] == "native" else "module class", "optimizer class", "scaler class", "step hooks",
        "work class",
    ]  # fmt: skip
    assert {name for name in before if before[name] != after[name]} == set()


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
    assert {name for name, value in state().items() if before[name] != value} == set()


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
