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
            waiting += [(prefix + child, each) for child, each in named_children(module)][::-1]


def modules(root: Module) -> Iterator[Module]:
    return (module for _, module in named_modules(root))


def named_children(module: Module) -> list[tuple[str, Module]]:
    """Return the direct children, each once."""
    found: dict[int, tuple[str, Module]] = {}
    for name, child in module._modules.items():
        if child is not None:
            found.setdefault(id(child), (name, child))
    return list(found.values())


def named_parameters(root: Module) -> Iterator[tuple[str, Parameter]]:
    """Yield all parameters inside a module with their names, each once."""
    seen: set[int] = set()
    for prefix, module in named_modules(root):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}.{name}".lstrip("."), parameter


def parameters(root: Module) -> Iterator[Parameter]:
    return (parameter for _, parameter in named_parameters(root))
