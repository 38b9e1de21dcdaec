"""Whether an optimizer that steps is one that was passed to watch(): seen through whatever wraps it.

Frameworks hand out wrappers: around the optimizer (Accelerate, Fabric), around one that steps other tensors (DeepSpeed,
ZeRO), or a class of the user's around several. torch calls its hooks with the optimizer inside. The two are the same
where one holds the other, or where both step the same parameters.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

_MAX_DEPTH = 4  # wrappers around wrappers
_MAX_OBJECTS = 1000


class PassedOptimizers:
    """What watch(optimizer=...) got, in its order. Holds none of it: the user may delete it inside the watch."""

    def __init__(self, optimizers: Sequence[Any] = ()) -> None:
        self._passed = [reference_to(each) for each in optimizers]

    def __len__(self) -> int:
        return len(self._passed)

    def position(self, optimizer: Any) -> int | None:
        """Which of those passed this optimizer is, or belongs to; None: none of them. Takes some microseconds."""
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
        """Those that the user has not deleted."""
        return [optimizer for each in self._passed if (optimizer := each()) is not None]

    def without_hooks(self) -> list[Any]:
        """Those that torch calls no hooks for: neither torch's own, nor around one of torch's.

        One whose step() is no method of its class is left out: it is a function, mostly around another optimizer.
        """
        unseen = (each for each in self.alive() if not any(_has_hooks(part) for part in parts_of(each)))
        return [each for each in unseen if callable(getattr(type(each), "step", None))]

    def class_names(self) -> str:
        """For messages: "AdamW", or "AdamW and SGD"."""
        return " and ".join(type(each).__name__ for each in self.alive()) or "the optimizer passed to watch()"


def parts_of(optimizer: Any) -> Iterator[Any]:
    """The optimizer, and all that it holds and that can step, each once."""
    seen: set[int] = set()
    level = [optimizer]
    for _ in range(_MAX_DEPTH + 1):
        deeper = []
        for each in level:
            if id(each) in seen or len(seen) >= _MAX_OBJECTS:
                continue
            seen.add(id(each))
            yield each
            deeper += [inner for inner in _held_by(each) if callable(getattr(type(inner), "step", None))]
        level = deeper


def _held_by(owner: Any) -> Iterator[Any]:
    """The values of its attributes and slots, and what lies in lists and dictionaries among them. Runs no property."""
    values = list(getattr(owner, "__dict__", {}).values())
    for kind in type(owner).__mro__:
        for member in vars(kind).values():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # an empty slot
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
    """The tensors in its param_groups; none where it has no such groups, or others than torch's."""
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return []


def reference_to(optimizer: Any) -> Callable[[], Any]:
    """A weak reference, where its class allows for one."""
    try:
        return weakref.ref(optimizer)
    except TypeError:  # of a class with slots
        return lambda: optimizer
