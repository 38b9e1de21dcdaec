"""Walk over the modules and parameters of a model, which are compared by identity only.

Methods of torch such as named_modules() store modules in a set. They raise for a class that defines
`__eq__` without `__hash__`, such as a dataclass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module, Parameter


def named_modules(root: Module) -> Iterator[tuple[str, Module]]:
    """Yield the module and all modules inside it with their names, each once, outermost first."""
    seen: set[int] = set()
    waiting = [("", root)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        if module._modules:
            prefix = f"{name}." if name else ""
            inside = [(prefix + child, each) for child, each in named_children(module)]
            waiting += reversed(inside)


def modules(root: Module) -> Iterator[Module]:
    """Yield the module and all modules inside it, each once, outermost first."""
    seen: set[int] = set()
    waiting: list[Module | None] = [root]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting += reversed(module._modules.values())


def named_children(module: Module) -> list[tuple[str, Module]]:
    """Return the direct children, each once."""
    found: dict[int, tuple[str, Module]] = {}
    for name, child in module._modules.items():
        if child is not None:
            found.setdefault(id(child), (name, child))
    return list(found.values())


def parameters(root: Module) -> list[Parameter]:
    """Return all parameters inside a module, each once."""
    every = (each for module in modules(root) for each in module._parameters.values())
    return list({id(each): each for each in every if each is not None}.values())
