"""Matching of optimizers that step with those passed to watch(), which may be wrappers.

Wrappers come from frameworks or the user. They contain the optimizer (Accelerate, Fabric), an
optimizer of other tensors (DeepSpeed, ZeRO), or several optimizers. torch calls its hooks with the
innermost optimizer. It matches a passed object that contains it or that has the same parameters.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

_MAX_DEPTH = 4
_MAX_OBJECTS = 1000


class PassedOptimizers:
    """The optimizers passed to watch(), in order.

    They are referenced weakly, so that the user may delete them inside the watch.
    """

    def __init__(self, optimizers: Sequence[Any] = ()) -> None:
        self._passed = [reference_to(each) for each in optimizers]

    def __len__(self) -> int:
        return len(self._passed)

    def position(self, optimizer: Any) -> int | None:
        """Return the position of the passed optimizer that is or contains this one, or None.

        Takes a few microseconds.
        """
        stepped = _parameter_ids([optimizer])
        shares = None
        for position, reference in enumerate(self._passed):
            passed = reference()
            if passed is None:
                continue
            parts = list(parts_of(passed))
            if any(part is optimizer for part in parts):
                return position
            if shares is None and stepped & _parameter_ids(parts):
                shares = position
        return shares

    def alive(self) -> list[Any]:
        """Return the optimizers that the user has not deleted."""
        return [optimizer for each in self._passed if (optimizer := each()) is not None]

    def without_hooks(self) -> list[Any]:
        """Return the optimizers for which torch calls no hooks.

        These neither derive from torch's class nor contain such an optimizer. An object whose step
        is a function of the object, not of its class, is left out: it usually wraps an optimizer.
        """
        unseen = (
            each for each in self.alive() if not any(_has_hooks(part) for part in parts_of(each))
        )
        return [each for each in unseen if callable(getattr(type(each), "step", None))]

    def class_names(self) -> str:
        """Return the class names for messages, such as "AdamW" or "AdamW and SGD"."""
        return (
            " and ".join(type(each).__name__ for each in self.alive())
            or "the optimizer passed to watch()"
        )


def parts_of(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizer and all objects with a step() method that it contains, each once."""
    seen: set[int] = set()
    level = [optimizer]
    for _ in range(_MAX_DEPTH + 1):
        deeper = []
        for each in level:
            if id(each) in seen or len(seen) >= _MAX_OBJECTS:
                continue
            seen.add(id(each))
            yield each
            deeper += [
                inner for inner in _held_by(each) if callable(getattr(type(inner), "step", None))
            ]
        level = deeper


def _held_by(owner: Any) -> Iterator[Any]:
    """Yield the values of an object's attributes and slots, and elements of its lists and dicts.

    Properties are not evaluated.
    """
    values = list(getattr(owner, "__dict__", {}).values())
    for kind in type(owner).__mro__:
        for member in vars(kind).values():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # An empty slot raises it.
                    values.append(member.__get__(owner))
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        elif isinstance(value, dict):
            yield from list(value.values())
        else:
            yield value


def _has_hooks(optimizer: Any) -> bool:
    from torch.optim import Optimizer

    return isinstance(optimizer, Optimizer) and bool(getattr(type(optimizer).step, "hooked", False))


def _parameter_ids(optimizers: Iterable[Any]) -> set[int]:
    return {id(parameter) for each in optimizers for parameter in parameters_of(each)}


def parameters_of(optimizer: Optimizer | Any) -> list[Any]:
    """Return the tensors in an optimizer's param_groups.

    The list is empty if there are no groups or if they have another form than torch's.
    """
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return []


def reference_to(optimizer: Any) -> Callable[[], Any]:
    """Return a weak reference, or a strong one if the class does not support weak references."""
    try:
        return weakref.ref(optimizer)
    except TypeError:  # The class has slots and no __weakref__.
        return lambda: optimizer
