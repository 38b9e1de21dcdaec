"""Everything in the process that a watch could have changed."""

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
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch._C._distributed_c10d import Work
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchlens_perf.errors import swallowed
from torchlens_perf.hooks.collectives.hook import (
    is_tapped_by_another_tool,
    list_collective_operators,
)
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


def changed_since(before: dict[str, Any]) -> set[str]:
    """Return the names of what differs from `before`.

    Only new threads count, because a thread of an earlier test may end meanwhile.
    """
    now = state()
    now["threads"] = [*before["threads"], *set(now["threads"]) - set(before["threads"])]
    return {name for name, value in now.items() if before[name] != value}


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
