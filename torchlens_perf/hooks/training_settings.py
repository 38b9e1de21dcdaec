"""Read the settings of the training process that actions on verdicts depend on, once.

The settings are read at the end of the second step, which is a warm-up step, and published after the
third one. No object of the script is kept alive, and nothing is read about the script's data.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.hooks import module_tree
from torchlens_perf.hooks.loop.passed_optimizers import parameters_of, read_gradient_version
from torchlens_perf.interruption import suppress
from torchlens_perf.recorder import torch_private
from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.run.training_settings import (
    DdpSettings,
    LoaderSettings,
    OptimizerSettings,
    TrainingSettings,
)

if TYPE_CHECKING:
    from torch.nn import Module

    from torchlens_perf.hooks.loop.training_loop import TrainingLoop
    from torchlens_perf.recorder.session import Session

_READ_AFTER = 2
_MAX_GRADIENTS = 8


class TrainingSettingsHook:
    """Hook that reads the settings at the ends of two steps, and then does nothing."""

    name = "training settings"

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self._steps = 0
        self._iterator: weakref.ref[Any] | None = None
        self._gradients: list[tuple[int, int, int]] = []
        self._found = TrainingSettings()

    def note_loader(self, iterator: Any) -> bool:
        """Keep a weak reference to a DataLoader's iterator. Return False once it is not needed.

        Of several loaders, the last one that is used before the settings are read counts.
        """
        self._iterator = weakref.ref(iterator)
        return self._steps < _READ_AFTER

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        def on_step_end() -> None:
            self._steps += 1
            if self._steps < _READ_AFTER:
                return
            with torch_private.get_no_torch_function_context()(), session.thread.gradients:
                reads_gradients = session.thread.reads_gradients
                if self._steps == _READ_AFTER:
                    self._found = self._read(reads_gradients=reads_gradients)
                    return
                zeroes = self._keeps_gradients() if reads_gradients else None
            session.step_callbacks.remove(on_step_end)
            session.facts.training = dataclasses.replace(self._found, zeroes_gradients=zeroes)
            session.publish()

        with session.running_each_step("reading the training settings", on_step_end):
            yield

    def _read(self, *, reads_gradients: bool) -> TrainingSettings:
        loop = self._loop
        models, optimizer = loop.models, next(iter(loop.optimizers), None)
        modules = [module for model in models for module in module_tree.modules(model)]
        ddp = find_ddp([*modules, *loop.called.list_alive()])
        if reads_gradients and optimizer is not None:
            self._gradients = _read_gradients(optimizer)
        cpus = sorted(os.sched_getaffinity(0))
        return TrainingSettings(
            loader=_read_loader(self._iterator() if self._iterator is not None else None),
            optimizer=_read_optimizer(optimizer) if optimizer is not None else None,
            ddp=_read_ddp(ddp) if ddp is not None and reads_gradients else None,
            compiled=any(map(torch_private.is_module_compiled, modules)) if models else None,
            cuda_graphs=_replay_cuda_graphs(modules),
            cpus=format_ranges(cpus),
            cpu_count=len(cpus),
            free_memory_bytes=_read_free_memory(),
        )

    def _keeps_gradients(self) -> bool | None:
        """Return True if the gradients of the second step are still those of the third one."""
        optimizer = next(iter(self._loop.optimizers), None)
        if not self._gradients or optimizer is None:
            return None
        now = _read_gradients(optimizer)
        # A new gradient may have the address of an old one, but its versions begin at 0.
        return len(now) == len(self._gradients) and all(
            new[0] == old[0] and new[1:] > old[1:]
            for old, new in zip(self._gradients, now, strict=True)
        )


def _read_gradients(optimizer: Any) -> list[tuple[int, int, int]]:
    parameters = itertools.islice(parameters_of(optimizer), _MAX_GRADIENTS)
    return [read_gradient_version(each) for each in parameters if each.grad is not None]


@guard("settings of torch.compile")
def _replay_cuda_graphs(modules: Sequence[Module]) -> bool | None:
    compiled = filter(torch_private.is_module_compiled, modules)
    known = [torch_private.read_compiler_config(each) for each in compiled]
    if not known or None in known:
        return None
    return any(bool(config and config.get("triton.cudagraphs")) for config in known)


@guard("settings of a DataLoader")
def _read_loader(iterator: Any) -> LoaderSettings | None:
    if iterator is None:
        return None
    from torch.utils.data import IterableDataset

    return LoaderSettings(
        workers=int(iterator._num_workers),
        pin_memory=bool(iterator._pin_memory),
        is_iterable=isinstance(iterator._dataset, IterableDataset),
        persistent_workers=bool(iterator._persistent_workers),
    )


@guard("settings of an optimizer")
def _read_optimizer(optimizer: Any) -> OptimizerSettings | None:
    parameters = parameters_of(optimizer)
    if not parameters:
        return None
    from torch import optim

    kind = type(optimizer)
    is_torch = getattr(optim, kind.__name__, None) is kind
    # Optimizers of other packages may use these names for values of other types.
    group = optimizer.param_groups[0]
    flags = {name: group[name] for name in ("foreach", "fused") if type(group.get(name)) is bool}
    return OptimizerSettings(
        kind.__name__ if is_torch else f"{kind.__module__}.{kind.__qualname__}",
        len(parameters),
        parameters[0].device.type,
        can_fuse=not group.get("differentiable")
        and all(each.is_floating_point() for each in parameters),
        **flags,
    )


def find_ddp(modules: Sequence[Module]) -> Any:
    """Return the DistributedDataParallel, which may be around the watched models.

    Return None if there are several: it is not known which of them communicates how much.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    from torch.nn.parallel import DistributedDataParallel

    wrappers = {id(each): each for each in modules if isinstance(each, DistributedDataParallel)}
    known = [each for each in wrappers.values() if "bucket_bytes_cap" in vars(each)]
    return known[0] if len(known) == 1 else None


@guard("settings of DistributedDataParallel")
def _read_ddp(ddp: Any) -> DdpSettings | None:
    trained = [each for each in module_tree.parameters(ddp) if each.requires_grad]
    gradients = [each.grad for each in trained if each.grad is not None]
    return DdpSettings(
        bucket_bytes=int(ddp.bucket_bytes_cap),
        find_unused_parameters=bool(ddp.find_unused_parameters),
        static_graph=bool(ddp.static_graph),
        gradient_as_bucket_view=bool(ddp.gradient_as_bucket_view),
        gradient_bytes=sum(each.numel() * each.element_size() for each in gradients),
        unused=len(trained) - len(gradients),
    )


def _read_free_memory() -> int | None:
    with suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None
