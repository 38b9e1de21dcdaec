"""Match optimizers that step with the optimizers passed to watch(), which may be wrappers.

Wrappers of frameworks or users contain the optimizer (Accelerate, Fabric), an optimizer of other
tensors (DeepSpeed, ZeRO), or several optimizers. torch calls its hooks with the innermost
optimizer. A passed object matches if it contains this optimizer or has the same parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torchlens_perf.hooks.batch_size import iterate_slots
from torchlens_perf.interruption import ours, suppress
from torchlens_perf.recorder import torch_private

if TYPE_CHECKING:
    from torch.optim import Optimizer

_MAX_DEPTH = 4
_MAX_OBJECTS = 1000


class PassedOptimizers:
    """The optimizers passed to watch(), in order.

    References are weak, because the user may delete an optimizer inside the watch.
    """

    def __init__(self, optimizers: Sequence[Any] = ()) -> None:
        self._passed = [create_reference(each) for each in optimizers]

    def __len__(self) -> int:
        return len(self._passed)

    def find_position(self, optimizer: Any) -> int | None:
        """Return the position of the passed optimizer that is or contains this one, or None.

        The call takes a few microseconds.
        """
        stepped = collect_parameter_ids([optimizer])
        shares = None
        for position, reference in enumerate(self._passed):
            passed = reference()
            if passed is None:
                continue
            parts = list(iterate_parts(passed))
            if any(part is optimizer for part in parts):
                return position
            if shares is None and stepped & collect_parameter_ids(parts):
                shares = position
        return shares

    def list_alive(self) -> list[Any]:
        """Return the optimizers that the user has not deleted."""
        return [optimizer for each in self._passed if (optimizer := each()) is not None]

    def find_without_hooks(self) -> list[Any]:
        """Return the optimizers for which torch calls no hooks.

        These optimizers neither derive from torch's class nor contain such an optimizer. An object
        whose step() is not defined in its class is left out, because it usually wraps an optimizer.
        """
        from torch.optim import Optimizer

        return [
            each
            for each in self.list_alive()
            if callable(getattr(type(each), "step", None))
            and not any(
                isinstance(part, Optimizer) and getattr(type(part).step, "hooked", False)
                for part in iterate_parts(each)
            )
        ]


def iterate_parts(optimizer: Any) -> Iterator[Any]:
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
                inner
                for inner in _iterate_attribute_values(each)
                if callable(getattr(type(inner), "step", None))
            ]
        level = deeper


def _iterate_attribute_values(owner: Any) -> Iterator[Any]:
    """Yield values of an object's attributes and slots, and elements of its lists and dicts.

    Properties are not evaluated.
    """
    for value in (*getattr(owner, "__dict__", {}).values(), *iterate_slots(owner)):
        if isinstance(value, (list, tuple)):
            yield from value
        elif isinstance(value, dict):
            yield from list(value.values())
        else:
            yield value


def collect_parameter_ids(optimizers: Iterable[Any]) -> set[int]:
    """Return the ids of all parameters of these optimizers. None stands for a deleted one."""
    return {id(parameter) for each in optimizers for parameter in parameters_of(each)}


def parameters_of(optimizer: Optimizer | Any) -> list[Any]:
    """Return the tensors in an optimizer's param_groups.

    The list is empty if there are no groups, or if the groups differ from torch's format.
    """
    with suppress(AttributeError, KeyError, TypeError):
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return []


NO_GRADIENT = (0, 0, 0)


def find_trained_parameter(optimizer: Any) -> tuple[int, int] | None:
    """Return the place in `param_groups` of the first parameter that is trained: group, position.

    A place is kept instead of a weak reference, because torch.utils.swap_tensors() refuses tensors
    that have weak references.
    """
    with suppress(AttributeError, KeyError, TypeError):
        for number, group in enumerate(optimizer.param_groups):
            for position, each in enumerate(group["params"]):
                if getattr(each, "requires_grad", False):
                    return number, position
    return None


def read_gradient_version(parameter: Any) -> tuple[int, int, int]:
    """Return the id and version counters of a parameter's gradient, or NO_GRADIENT.

    FSDP2 adds to the local shard of a gradient, which does not change the version of the gradient
    itself. The result therefore contains both versions.
    """
    gradient = None if parameter is None else parameter.grad
    if gradient is None:
        return NO_GRADIENT
    return id(gradient), gradient._version, torch_private.get_local_shard(gradient)._version


def create_reference(optimizer: Any) -> Callable[[], Any]:
    """Return a weak reference, or a strong one if the class does not support weak references."""
    try:
        return weakref.ref(optimizer)
    except ours(TypeError):  # The class has slots and no __weakref__.
        return lambda: optimizer
