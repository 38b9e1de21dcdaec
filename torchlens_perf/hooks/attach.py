"""The hooks of a watch, their order of attachment, and the objects that they share."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchlens_perf.hooks.backward import BackwardHook
from torchlens_perf.hooks.capture import CaptureHook
from torchlens_perf.hooks.collective import CollectiveHook
from torchlens_perf.hooks.data import DataHook
from torchlens_perf.hooks.loop.optimizer import OptimizerHook
from torchlens_perf.hooks.loop.passed_optimizers import PassedOptimizers
from torchlens_perf.hooks.loop.selection import MAX_MODULES, device_of, select, unmatched_patterns
from torchlens_perf.hooks.loop.training_loop import TrainingLoop
from torchlens_perf.hooks.module import ModuleCalls, ModuleHook
from torchlens_perf.hooks.nvtx import NvtxHook
from torchlens_perf.hooks.on_device.choice import device_hooks
from torchlens_perf.hooks.on_device.memory import MemoryHook
from torchlens_perf.hooks.recompute import RecomputeHook
from torchlens_perf.hooks.section import SectionHook
from torchlens_perf.hooks.stack import ReaderHook, StackHook
from torchlens_perf.hooks.tags import TagHook
from torchlens_perf.output import logger
from torchlens_perf.recorder.devices import accelerator

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from torchlens_perf.config import Config
    from torchlens_perf.hooks.loop.selection import NamedModel
    from torchlens_perf.recorder.session import Hook, Session


def start(
    session: Session,
    optimizers: Sequence[Optimizer],
    models: Sequence[NamedModel] | None,
    *,
    in_the_middle: bool = False,
    after_step_of: Optimizer | None = None,
) -> TrainingLoop:
    """Attach all hooks of a watch and begin to record marks. Closing the session detaches them.

    optimizers: the optimizers passed to watch().
    models: the models to time, or None to find them when an optimizer steps.
    in_the_middle: True if the loop has already made its first step.
    after_step_of: the optimizer of that step, or None for a loop without an optimizer.
    """
    loop = TrainingLoop(session, PassedOptimizers(optimizers), lambda found: watched.watch(found))
    recompute = RecomputeHook()
    backward = BackwardHook(loop, recompute)
    calls = ModuleCalls()
    watched = _WatchedModels(session, backward, calls)
    hooks = default_hooks(session.config, loop, backward, recompute, calls)
    # Must come after the imports of all modules that define hooks.
    session.prepare()
    session.attach(hooks)
    if models is not None:
        loop.models_given(models)
    if in_the_middle and after_step_of is None:
        loop.begins_without_optimizer()
        session.note(
            "recording began after the second backward pass: earlier steps are not measured"
        )
    elif after_step_of is not None:
        loop.begins_after_step_of(after_step_of)
        session.note(
            "recording began after the first optimizer step, which is therefore not measured"
        )
    session.step.begin(loop)
    return loop


def default_hooks(
    config: Config,
    loop: TrainingLoop,
    backward: BackwardHook,
    recompute: RecomputeHook,
    calls: ModuleCalls,
) -> list[Hook]:
    """Return the hooks of a watch in the order of attachment. A new hook is one more line here."""
    wanted: list[tuple[bool, Hook]] = [
        (config.nvtx, NvtxHook()),
        (True, SectionHook()),
        (True, OptimizerHook(loop)),
        (True, DataHook()),
        (True, calls),
        (True, backward),
        (True, recompute),
        (config.collectives, CollectiveHook()),
        (config.memory != "off", MemoryHook(history=config.memory == "history")),
        (True, TagHook()),
        (config.sidecar, ReaderHook()),
        (config._faulthandler, StackHook()),
        (config.capture != "off", CaptureHook()),
    ]
    # Device hooks are attached last and thus detached first. At the end they read device times of
    # marks that other hooks made, and these times must still be recorded.
    return [*(hook for want, hook in wanted if want), *device_hooks(config)]


class _WatchedModels:
    """The models whose modules are timed, by weak reference."""

    def __init__(self, session: Session, backward: BackwardHook, calls: ModuleCalls) -> None:
        self._session = session
        self._backward = backward
        self._calls = calls
        # By id. A later module may get the id of a deleted one, so the reference is checked too.
        self._known: dict[int, weakref.ref[Module]] = {}

    def watch(self, models: Sequence[NamedModel]) -> None:
        selections = [
            select(model, self._session.config, MAX_MODULES // len(models)) for model in models
        ]
        for message in unmatched_patterns(selections):
            logger.warning("torchlens_perf: %s", message)
            self._session.note(message)
        for model, selection in zip(models, selections, strict=True):
            modules = [each for each in selection.modules if not self._watches(each.module)]
            self._known.update((id(each.module), weakref.ref(each.module)) for each in modules)
            device = device_of(model.module)
            if device == "cpu" and accelerator():
                # The model may still be moved, or FSDP offloads its parameters to the CPU. The
                # device's clock shows later where it runs.
                device = ""
            self._session.metadata.add_modules(
                {each.name: each.is_root for each in modules},
                device=device,
                all_levels=selection.all_levels,
                unopened=selection.unopened,
            )
            self._session.attach([ModuleHook(modules, self._backward, self._calls)])

    def _watches(self, module: Module) -> bool:
        known = self._known.get(id(module))
        return known is not None and known() is module
