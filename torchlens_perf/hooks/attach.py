"""Create the hooks of a watch with the objects that they share, and attach them in order."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchlens_perf.hooks.backward import BackwardHook
from torchlens_perf.hooks.budget import BudgetHook
from torchlens_perf.hooks.capture import CaptureHook
from torchlens_perf.hooks.collectives.hook import CollectiveHook
from torchlens_perf.hooks.data import DataHook
from torchlens_perf.hooks.device_hooks import create_device_hooks
from torchlens_perf.hooks.loader_workers import LoaderWorkersHook
from torchlens_perf.hooks.loop.optimizer import OptimizerHook
from torchlens_perf.hooks.loop.passed_optimizers import PassedOptimizers
from torchlens_perf.hooks.loop.selection import (
    MAX_MODULES,
    describe_unmatched_patterns,
    device_type_of,
    select_modules,
)
from torchlens_perf.hooks.loop.training_loop import TrainingLoop
from torchlens_perf.hooks.memory import MemoryHook
from torchlens_perf.hooks.module import ModuleCallRouter, ModuleHook
from torchlens_perf.hooks.nvtx import NvtxHook
from torchlens_perf.hooks.operators import OperatorHook
from torchlens_perf.hooks.recompute import RecomputeHook
from torchlens_perf.hooks.section import SectionHook
from torchlens_perf.hooks.stack import FaulthandlerHook, TracerPermissionHook
from torchlens_perf.hooks.tags import TagHook
from torchlens_perf.hooks.training_settings import TrainingSettingsHook
from torchlens_perf.output import logger
from torchlens_perf.recorder.devices import find_accelerator

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from torchlens_perf.config import Config
    from torchlens_perf.hooks.loop.selection import NamedModel, WatchedModule
    from torchlens_perf.recorder.session import Hook, Session


def attach_hooks(
    session: Session,
    optimizers: Sequence[Optimizer],
    models: Sequence[NamedModel] | None,
    *,
    in_the_middle: bool = False,
    after_step_of: Optimizer | None = None,
) -> TrainingLoop:
    """Attach all hooks of a watch and start recording. Closing the session detaches the hooks.

    optimizers: the optimizers passed to watch().
    models: the models to time, or None to find them when an optimizer steps.
    in_the_middle: True if the loop has already made its first step.
    after_step_of: the optimizer of that step, or None for a loop without an optimizer.
    """
    loop = TrainingLoop(
        session, PassedOptimizers(optimizers), lambda found: watched.time_modules(found)
    )
    recompute = RecomputeHook()
    backward = BackwardHook(loop, recompute)
    calls = ModuleCallRouter(loop.on_new_module)
    watched = _WatchedModels(session, backward, calls)
    hooks = create_hooks(session.config, loop, backward, recompute, calls)
    # All modules that define hooks must have been imported before this call.
    session.prepare()
    session.attach(hooks)
    if models is not None:
        loop.use_given_models(models)
    if in_the_middle and after_step_of is None:
        loop.start_without_optimizer()
        session.note(
            "recording began after the second backward pass: earlier steps are not measured"
        )
    elif after_step_of is not None:
        loop.start_after_step_of(after_step_of)
        session.note(
            "recording began after the first optimizer step, which is therefore not measured"
        )
    session.step.begin(loop)
    return loop


def create_hooks(
    config: Config,
    loop: TrainingLoop,
    backward: BackwardHook,
    recompute: RecomputeHook,
    calls: ModuleCallRouter,
) -> list[Hook]:
    """Return the hooks of a watch in the order of attachment. To add a hook, add a line here."""
    settings, workers = TrainingSettingsHook(loop), LoaderWorkersHook()
    wanted: list[tuple[bool, Hook]] = [
        (config.nvtx, NvtxHook()),
        (True, SectionHook()),
        (True, OptimizerHook(loop)),
        (True, DataHook(settings.note_loader, workers)),
        (True, workers),
        (True, settings),
        (True, calls),
        (True, backward),
        (True, recompute),
        (config.collectives, CollectiveHook()),
        (True, OperatorHook()),
        (config.memory != "off", MemoryHook(history=config.memory == "history")),
        (config.budget > 0, BudgetHook(config.budget)),
        (True, TagHook()),
        (config.sidecar, TracerPermissionHook()),
        (config._faulthandler, FaulthandlerHook()),
        (config.capture != "off", CaptureHook()),
    ]
    # Device hooks are attached last and thus detached first: they must read the device times of
    # other hooks' marks while these hooks can still record them.
    return [*(hook for want, hook in wanted if want), *create_device_hooks(config)]


class _WatchedModels:
    """Weak references to the models whose modules are timed."""

    def __init__(self, session: Session, backward: BackwardHook, calls: ModuleCallRouter) -> None:
        self._session = session
        self._hook = ModuleHook(session, backward, calls)
        self._attached = False
        # By module id. A dead reference shows that the id may now belong to another module.
        self._known: dict[int, weakref.ref[Module]] = {}

    def time_modules(self, models: Sequence[NamedModel]) -> None:
        selections = [
            select_modules(model, self._session.config, MAX_MODULES // len(models))
            for model in models
        ]
        for message in describe_unmatched_patterns(selections):
            logger.warning("torchlens_perf: %s", message)
            self._session.note(message)
        for model, selection in zip(models, selections, strict=True):
            modules = [each for each in selection.modules if not self._is_watched(each.module)]
            self._known = {key: each for key, each in self._known.items() if each() is not None}
            self._known.update((id(each.module), weakref.ref(each.module)) for each in modules)
            device = device_type_of(model.module)
            if device == "cpu" and find_accelerator():
                # Leave the device unknown: the model may still be moved, or FSDP may offload its
                # parameters to the CPU. The device's clock shows later where the model runs.
                device = ""
            self._session.metadata.add_modules(
                {each.name: each.is_root for each in modules},
                device=device,
                all_levels=selection.all_levels,
                unopened=selection.unopened,
            )
            self._time_modules(modules)

    def _time_modules(self, modules: Sequence[WatchedModule]) -> None:
        hooks = self._session.hooks
        with hooks.lock:
            if not hooks.detached:
                if not self._attached:
                    self._attached = True
                    hooks.attach(self._hook.name, lambda: self._hook.attach(self._session))
                self._hook.time_modules(modules)

    def _is_watched(self, module: Module) -> bool:
        known = self._known.get(id(module))
        return known is not None and known() is module
