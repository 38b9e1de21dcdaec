"""Find the models that optimizers train by a search of all objects of the process."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from torchlens_perf.hooks import module_tree
from torchlens_perf.hooks.loop.model_names import name_models
from torchlens_perf.hooks.loop.passed_optimizers import parameters_of
from torchlens_perf.hooks.loop.selection import NamedModel
from torchlens_perf.interruption import ours
from torchlens_perf.recorder import torch_private

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

# Maximum number of searches in one watch.
_MAX_SEARCHES = 8


class TrainedModels:
    """Finds the models that optimizers train, and keeps weak references to them."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Module], str]] = []
        self._searches = 0

    def find_models_of(self, optimizer: Optimizer) -> list[NamedModel]:
        """Return the outermost modules with parameters of this optimizer, in order of creation.

        All objects of the process are searched if no known model matches. The search takes 0.2 s
        for 290,000 objects, too long for every step.
        """
        found = self._known_models_of(optimizer)
        if not found and self._searches < _MAX_SEARCHES:
            self._searches += 1
            self._add_models(optimizer)
            found = self._known_models_of(optimizer)
        return found

    def _known_models_of(self, optimizer: Optimizer) -> list[NamedModel]:
        stepped = {id(parameter) for parameter in parameters_of(optimizer)}
        alive = [
            NamedModel(module, name)
            for reference, name in self._known
            if (module := reference()) is not None
        ]
        return [
            each
            for each in alive
            if any(id(parameter) in stepped for parameter in _list_parameters(each.module))
        ]

    def _add_models(self, optimizer: Optimizer) -> None:
        """Add the models of all optimizers at once, which gives each a distinct name."""
        known = {id(module) for reference, _ in self._known if (module := reference()) is not None}
        trained = {
            id(p) for each in (optimizer, *find_living_optimizers()) for p in parameters_of(each)
        }
        new = [
            module
            for module in find_top_modules()
            if id(module) not in known
            and any(id(parameter) in trained for parameter in _list_parameters(module))
        ]
        several = len(new) + len(self._known) > 1
        names = (
            name_models(new, taken=[name for _, name in self._known])
            if several
            else [""] * len(new)
        )
        self._known += [
            (weakref.ref(module), name) for module, name in zip(new, names, strict=True)
        ]


def find_objects_of_type(kind: type) -> list[Any]:
    """Return all objects of this class and its subclasses, in order of creation."""
    # Do not use isinstance(), which reads `__class__` and may run code of a lazy proxy.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def find_living_optimizers() -> list[Optimizer]:
    """Return all torch optimizers, except wrappers around another optimizer."""
    from torch.optim import Optimizer

    # An optimizer without groups is still being constructed, or its constructor has failed.
    return [each for each in find_objects_of_type(Optimizer) if "param_groups" in each.__dict__]


def find_top_modules() -> list[Module]:
    """Return all modules that are not part of another module, in order of creation."""
    from torch.nn import Module

    # A module whose constructor is still running, or has failed, has no children yet.
    modules = [each for each in find_objects_of_type(Module) if "_modules" in each.__dict__]
    children = {
        id(child) for module in modules for child in list(module.__dict__["_modules"].values())
    }
    return [module for module in modules if id(module) not in children]


def _list_parameters(module: Module) -> list[Any]:
    """Return the module's parameters, or an empty list while another thread builds the module."""
    try:
        return list(module_tree.parameters(module))
    except ours(RuntimeError):  # A dictionary changed its size during the iteration.
        return []


def find_models_with_gradients() -> list[NamedModel]:
    """Return the outermost modules with gradients, for loops without an optimizer.

    Must not run during a backward pass of another thread, which writes the gradients.
    """
    with torch_private.get_no_torch_function_context()():
        models = [
            each
            for each in find_top_modules()
            if any(p.grad is not None for p in _list_parameters(each))
        ]
    names = name_models(models) if len(models) > 1 else [""] * len(models)
    return [NamedModel(model, name) for model, name in zip(models, names, strict=True)]
