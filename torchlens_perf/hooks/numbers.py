"""Check numbers in one step of several: gradients, and parameters that all ranks should share.

Each check hashes a part of one parameter of DistributedDataParallel. The number of the step chooses
the part, so all ranks check the same part without a collective. A rank whose checks would exceed
their share of its time makes fewer. Only tensors in the memory of the CPU are read, because reading
others would wait for the device.
"""

from __future__ import annotations

import math
import struct
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.hooks import module_tree
from torchlens_perf.hooks.loop.passed_optimizers import parameters_of
from torchlens_perf.hooks.training_settings import find_ddp
from torchlens_perf.recorder import torch_private
from torchlens_perf.run.ring import GRADIENT_NORM, LOSS, Kind

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from torchlens_perf.hooks.loop.training_loop import TrainingLoop
    from torchlens_perf.recorder.session import Session

_SHARE = 0.005
"""Largest share of the rank's time that checks take."""
_FIXED_COST_NS, _BYTES_PER_NS = 50_000, 0.5
"""Cost that is assumed for a check. The real costs of earlier checks count too."""
_PART_BYTES, _MAX_STRIDE = 1 << 18, 1 << 10
_MAX_NAMES = 512
_NOT_READ = "numbers in the memory of a device are not checked, only those in the memory of the CPU"
_NUMBERS = int(Kind.NUMBERS)


class NumbersHook:
    """Hook that checks gradients and replicated parameters at the ends of steps."""

    name = "checks of numbers"

    def __init__(self, loop: TrainingLoop, every: int) -> None:
        """every: one step of this many is checked."""
        self._loop = loop
        self._every = every

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        torch_private.require("torch._C._DisableTorchDispatch")
        checker = _Checker(session, self._loop, self._every)
        with session.running_each_step(self.name, checker.check_if_due):
            yield


class _Checker:
    """Checks of one rank, within their share of the time."""

    def __init__(self, session: Session, loop: TrainingLoop, every: int) -> None:
        self._session = session
        self._loop = loop
        self._every = every
        self._checked = 0
        # A power of two, so the checks of a rank that makes fewer are also checks of other ranks.
        self._stride = 1
        self._began_ns = session.recorder.now_ns()
        self._spent_ns = 0
        self._replicas: list[tuple[int, str]] | None = None
        """Name ids and paths of parameters that all ranks of a group should share."""
        self._replicated: weakref.ref[Module] | None = None
        self._group = 0

    def check_if_due(self) -> None:
        step = self._session.step.training_steps
        if step % (self._every * self._stride) or step == self._checked:
            return
        self._checked = step
        thread, now_ns = self._session.thread, self._session.recorder.now_ns
        begin_ns = now_ns()
        with (
            torch_private.get_no_torch_function_context()(),
            torch_private.get_no_torch_dispatch_context(),
            thread.gradients,
        ):
            if thread.reads_gradients:
                self._hash_parameter(step // self._every)
                self._spent_ns, begin_ns = self._spent_ns + now_ns() - begin_ns, now_ns()
                self._record_gradient_norm()
        self._spent_ns += now_ns() - begin_ns
        if self._stride > 1 and 4 * self._spent_ns < _SHARE * (now_ns() - self._began_ns):
            self._stride //= 2

    def _hash_parameter(self, check: int) -> None:
        import torch

        if self._replicas is None:
            self._find_replicas()
        if not self._replicas:
            return
        # All parameters are chosen, also in every second check, of which long runs keep only some.
        chosen = zlib.crc32(check.to_bytes(8, "little"))
        name_id, path = self._replicas[chosen % len(self._replicas)]
        parameter = None if self._replicated is None else _find_parameter(self._replicated(), path)
        if parameter is None or not _is_readable(parameter):
            return
        count = _PART_BYTES // parameter.element_size()
        parts = -(-parameter.numel() // count)
        first = chosen // len(self._replicas) % parts * count
        begin_ns = self._begin(min(_PART_BYTES, parameter.numel() * parameter.element_size()))
        if begin_ns is None:
            return
        # The copy is aligned to 64 bits.
        data = parameter.detach().view(-1)[first : first + count].clone().view(torch.uint8)
        whole = len(data) // 8 * 8
        # The sum of 64-bit words changes with each bit. It wraps around.
        found = int(data[:whole].view(torch.int64).sum()) ^ int(data[whole:].sum())
        self._record(name_id, begin_ns, found, (check & 0x7FFFFFFF) << 32 | self._group)

    def _record_gradient_norm(self) -> None:
        import torch

        gradients = [
            parameter.grad
            for optimizer in self._loop.optimizers
            for parameter in parameters_of(optimizer)
            if parameter.grad is not None
        ]
        if not gradients:
            return
        if not all(map(_is_readable, gradients)):
            self._session.note(_NOT_READ)
            return
        begin_ns = self._begin(sum(each.numel() * each.element_size() for each in gradients))
        if begin_ns is None:
            return
        with torch.no_grad():
            norm = math.hypot(*(float(torch.linalg.vector_norm(each)) for each in gradients))
        name_id = self._session.intern(GRADIENT_NORM)
        self._record(name_id, begin_ns, _float_bits(norm), 0)

    def _find_replicas(self) -> None:
        self._replicas = []
        modules = [module for model in self._loop.models for module in module_tree.modules(model)]
        ddp = find_ddp([*modules, *self._loop.called_models])
        if ddp is None:
            return
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(ddp.process_group)
        self._group = zlib.crc32(repr(sorted(ranks)).encode())
        named = list(module_tree.named_parameters(ddp.module))
        if not all(_is_readable(parameter) for _, parameter in named):
            self._session.note(_NOT_READ)
        size = -(-len(named) // _MAX_NAMES)
        self._replicated = weakref.ref(ddp.module)
        for place, (path, _) in enumerate(named):
            name = named[place // size * size][0] + (f" to {size - 1} later" if size > 1 else "")
            self._replicas.append((self._session.intern(name), path))

    def _begin(self, size: int) -> int | None:
        """Return the time if a check of so many bytes fits into its share of the time."""
        now_ns = self._session.recorder.now_ns()
        cost_ns = _FIXED_COST_NS + size / _BYTES_PER_NS
        if self._spent_ns + cost_ns <= _SHARE * (now_ns - self._began_ns):
            return now_ns
        self._stride = min(2 * self._stride, _MAX_STRIDE)
        return None

    def _record(self, name_id: int, begin_ns: int, value0: int, value1: int) -> None:
        recorder = self._session.recorder
        took_ns = recorder.now_ns() - begin_ns
        recorder.record_span(_NUMBERS, name_id, begin_ns, took_ns, 0, value0, value1)


def _find_parameter(module: Module | None, path: str) -> Tensor | None:
    """Return a parameter by its name in named_parameters(), or None if it is no longer there.

    A weak reference would let torch.utils.swap_tensors() refuse the parameter.
    """
    *names, last = path.split(".")
    for name in names:
        module = None if module is None else module._modules.get(name)
    return None if module is None else module._parameters.get(last)


@guard("recording a loss")
def record_loss(session: Session, loss: Any) -> None:
    """Record the loss of the step in progress, unless it is in a device's memory."""
    if not isinstance(loss, (int, float)):
        loss = loss.detach()
        if loss.device.type != "cpu":
            session.note(_NOT_READ)
            return
    recorder = session.recorder
    name_id = session.intern(LOSS)
    recorder.record_span(_NUMBERS, name_id, recorder.now_ns(), 0, 0, _float_bits(float(loss)), 0)


def _is_readable(tensor: Any) -> bool:
    """Return True for a contiguous tensor in the memory of the CPU, which is no subclass."""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )


def _float_bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
