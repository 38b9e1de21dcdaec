"""Find the models that are trained among the outermost modules that the loop calls."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torchlens_perf.hooks import module_tree
from torchlens_perf.interruption import ours
from torchlens_perf.recorder import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module


class CalledModules:
    """Weak references to the outermost modules that the loop has called.

    torch calls no hook for this: the native recorder sees each call of a module anyway
    (hooks/module.py), and shows each outermost module once.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[Module]] = []

    def add(self, module: Module) -> None:
        self._references = [each for each in self._references if each() is not None]
        self._references.append(weakref.ref(module))

    def list_alive(self) -> list[Module]:
        return [module for each in self._references if (module := each()) is not None]

    def find_models(self, is_trained: Callable[[Any], bool]) -> list[Module]:
        """Return the modules with trained parameters, in the order of their first calls.

        A module inside another one is left out. is_trained: called with a parameter.
        """
        with torch_private.get_no_torch_function_context()():
            trained = [
                each for each in self.list_alive() if any(map(is_trained, _list_parameters(each)))
            ]
        inside = {
            id(part) for each in trained for part in module_tree.modules(each) if part is not each
        }
        return [each for each in trained if id(each) not in inside]


def _list_parameters(module: Module) -> list[Any]:
    """Return the module's parameters, or an empty list while another thread builds the module."""
    try:
        return list(module_tree.parameters(module))
    except ours(RuntimeError):  # A dictionary changed its size during the iteration.
        return []


def has_optimizer_class() -> bool:
    """Return True if the process has created an optimizer, which may be deleted again.

    torch replaces step() of an optimizer's class when the first optimizer of the class is created.
    """
    from torch.optim import Optimizer

    kinds = [Optimizer]
    while kinds:
        kind = kinds.pop()
        if getattr(vars(kind).get("step"), "hooked", False):
            return True
        kinds += type.__subclasses__(kind)
    return False
