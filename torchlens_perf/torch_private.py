"""Every private name of PyTorch that we stand on, each with a probe and what happens without it.

Nothing else in the package names them, but for the hook that uses the one in question. `torchlens-perf doctor` prints
this table for the torch at hand; a hook whose probe fails raises HookUnavailable and is left out, and the report says
what was therefore not measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens_perf.errors import HookUnavailable

if TYPE_CHECKING:
    import torch

OLDEST_TORCH = (2, 11)


class PrivateName(NamedTuple):
    """A private name: how to tell that it works, and what is lost without it."""

    name: str
    works: Callable[[], bool]
    without: str


def torch_version(text: str) -> tuple[int, int]:
    """(major, minor) of a version text such as "2.13.0+cpu"."""
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


@functools.cache
def works(name: str) -> bool:
    """Whether this private name does what we need. Probed once a process; an error in the probe is a no."""
    try:
        return _by_name[name].works()
    except Exception:
        return False


def require(name: str) -> None:
    """Raises HookUnavailable if `name` does not work."""
    if not works(name):
        raise HookUnavailable(f"torch lacks {name}: {_by_name[name].without}")


def _module_slot() -> bool:
    from torch import nn

    probe, calls = nn.Identity(), list[int]()

    def slot(value: int) -> int:
        calls.append(value)
        return int(nn.Identity._call_impl(probe, value))

    probe.__dict__["_compiled_call_impl"] = slot
    return bool(probe(5) == 5 and calls == [5] and "_compiled_call_impl" not in probe.__getstate__())


def _engine() -> bool:
    import torch.autograd

    return callable(torch.autograd._engine_run_backward)


def _queue_callback() -> bool:
    # Not tried out: a backward pass here would start the engine's threads before the user's own first one does.
    from torch.autograd import Variable

    return callable(Variable._execution_engine.queue_callback)


def _data_iterator() -> bool:
    from torch.utils.data import dataloader

    return callable(dataloader._BaseDataLoaderIter.__next__)


def _dispatcher_tap() -> bool:
    import torch

    key = torch._C.DispatchKey.BackendSelect
    torch._C._dispatch_keyset_full_after(key)
    return callable(torch._C._dispatch_has_kernel_for_dispatch_key) and hasattr(torch.ops.c10d, "allreduce_")


def _work_wait() -> bool:
    from torch._C._distributed_c10d import Work

    original = Work.wait
    setattr(Work, "wait", original)  # noqa: B010 -- whether the pybind class lets itself be patched
    return callable(original)


def _tracing_context() -> bool:
    from torch._guards import TracingContext

    return TracingContext.try_get() is None


def _skip_code() -> bool:
    from torch._dynamo.decorators import skip_code

    return callable(skip_code)


PRIVATE_NAMES = (
    PrivateName(
        "torch.nn.Module._compiled_call_impl",
        _module_slot,
        "modules are timed by public hooks, at 20 times the cost",
    ),
    PrivateName("torch.autograd._engine_run_backward", _engine, "the backward pass is not timed"),
    PrivateName(
        "torch.autograd.Variable._execution_engine.queue_callback",
        _queue_callback,
        "waiting at the end of the backward pass counts as backward, and slow ranks cannot be told from waiting ones",
    ),
    PrivateName("torch.utils.data.dataloader._BaseDataLoaderIter", _data_iterator, "waiting for data is not timed"),
    PrivateName("torch.ops.c10d at BackendSelect", _dispatcher_tap, "collectives are not recorded"),
    PrivateName("torch._C._distributed_c10d.Work.wait", _work_wait, "time blocked in collectives is not measured"),
    PrivateName("torch._guards.TracingContext", _tracing_context, "backward passes of the compiler count as the job's"),
    PrivateName("torch._dynamo.decorators.skip_code", _skip_code, "modules are not timed where hooks are needed"),
)
_by_name = {entry.name: entry for entry in PRIVATE_NAMES}


def queue_callback(callback: Callable[[], None]) -> None:
    """Runs `callback` when the backward pass in progress has computed all gradients."""
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(callback)


def compiler_is_tracing() -> bool:
    """Whether torch.compile is building a graph on this thread."""
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


def rest_of_dispatch() -> torch._C.DispatchKeySet:
    """The dispatch keys below BackendSelect: where a tap there sends its call on to."""
    import torch

    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def has_tap(operator: str) -> bool:
    """Whether somebody else has put a kernel at BackendSelect for this operator: the last one would win."""
    import torch

    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, "BackendSelect"))


def skip_in_compiled_code(function: Any) -> None:
    """Makes Dynamo leave this Python function alone, without a graph break where it is called."""
    from torch._dynamo.decorators import skip_code

    skip_code(function.__code__)
