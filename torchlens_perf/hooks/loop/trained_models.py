"""The models that optimizers train: found among all living objects, and named where there are several."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from torchlens_perf.hooks.loop.model_names import names_of
from torchlens_perf.hooks.loop.passed_optimizers import parameters_of
from torchlens_perf.hooks.loop.selection import NamedModel
from torchlens_perf.recorder import torch_private

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

_MAX_LOOKS = 8  # at all living objects, in one watch


class TrainedModels:
    """Which models the optimizers that step train. Holds none of them."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Module], str]] = []
        self._looks = 0

    def of(self, optimizer: Optimizer) -> list[NamedModel]:
        """The outermost modules that hold parameters of this optimizer, in the order in which they were made.

        Looks at every living object where it is a new one: 0.2 s for 290,000 of them, so not for every step.
        """
        found = self._trained_by(optimizer)
        if not found and self._looks < _MAX_LOOKS:
            self._looks += 1
            self._add_models(optimizer)
            found = self._trained_by(optimizer)
        return found

    def _trained_by(self, optimizer: Optimizer) -> list[NamedModel]:
        stepped = {id(parameter) for parameter in parameters_of(optimizer)}
        alive = [NamedModel(module, name) for reference, name in self._known if (module := reference()) is not None]
        return [each for each in alive if any(id(parameter) in stepped for parameter in _parameters(each.module))]

    def _add_models(self, optimizer: Optimizer) -> None:
        """All models that any optimizer trains, so that each has a name of its own from the first one on."""
        known = {id(module) for reference, _ in self._known if (module := reference()) is not None}
        trained = {id(p) for each in (optimizer, *living_optimizers()) for p in parameters_of(each)}
        new = [
            module
            for module in top_modules()
            if id(module) not in known and any(id(parameter) in trained for parameter in _parameters(module))
        ]
        several = len(new) + len(self._known) > 1
        names = names_of(new, taken=[name for _, name in self._known]) if several else [""] * len(new)
        self._known += [(weakref.ref(module), name) for module, name in zip(new, names, strict=True)]


def living(kind: type) -> list[Any]:
    """All living objects of this class, and of what is derived from it, in the order in which they were made."""
    # By type, not isinstance: asking a lazy proxy object for its class may run the user's code.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def living_optimizers() -> list[Optimizer]:
    """torch's, and what is derived from them. Wrappers that show another one's groups are left out."""
    from torch.optim import Optimizer

    # Without groups, its constructor still runs, or has failed.
    return [each for each in living(Optimizer) if "param_groups" in each.__dict__]


def top_modules() -> list[Module]:
    """All living modules that no other one holds, in the order in which they were made."""
    from torch.nn import Module

    # A module whose constructor is still running, or has failed, has no children yet.
    modules = [each for each in living(Module) if "_modules" in each.__dict__]
    children = {id(child) for module in modules for child in list(module.__dict__["_modules"].values())}
    return [module for module in modules if id(module) not in children]


def _parameters(module: Module) -> list[Any]:
    """The module's parameters; none of a module that another thread is building."""
    try:
        return list(module.parameters())
    except RuntimeError:  # a dictionary changed its size
        return []


def models_with_gradients() -> list[NamedModel]:
    """The outermost modules that a backward pass has reached: where no optimizer says what is trained.

    Not while another thread may run a backward pass: it writes what is read here.
    """
    with torch_private.out_of_sight()():
        models = [each for each in top_modules() if any(p.grad is not None for p in _parameters(each))]
    names = names_of(models) if len(models) > 1 else [""] * len(models)
    return [NamedModel(model, name) for model, name in zip(models, names, strict=True)]
