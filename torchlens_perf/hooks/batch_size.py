"""Measure how much data a batch has, whatever its type is.

No code of the user runs: a batch may decode its data when an item is read, and reading from an
iterator would take batches away from the loop. Objects are searched through the dictionary and the
slots that store their attributes. Their properties, `__getattr__`, `__getitem__` and `__iter__` are
not used.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from types import MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

from torchlens_perf.interruption import ours, suppress
from torchlens_perf.recorder import torch_private

_LEVELS, _MAX_SEARCHED, _MAX_PARTS = 6, 128, 64
_WITHOUT_PARTS = frozenset({str, bytes, int, float, complex, bool, type(None), type})
_SEQUENCES = (tuple, list, deque)


class BatchSize(NamedTuple):
    """Size of the first tensor or NumPy array of a batch. Its number of elements grows with batch
    size and sequence length.

    are_tokens: True for integers of the shape [batch, length], such as token ids.
    """

    elements: int
    samples: int
    are_tokens: bool

    @classmethod
    def of_batch(cls, batch: object) -> BatchSize | None:
        """Return the size of a batch, or None without a tensor or an array."""
        array = find_batch_array(batch)
        if array is None:
            return None
        with torch_private.get_no_torch_function_context()():
            return cls._of_tensor(array) if _is_tensor(array) else cls._of_array(array)

    @classmethod
    def _of_tensor(cls, tensor: Any) -> BatchSize:
        from torch import Tensor

        dimensions = Tensor.dim(tensor)
        # A nested tensor has a first size, but neither a length nor a shape.
        samples = int(Tensor.size(tensor, 0)) if dimensions else 0
        are_tokens = dimensions == 2 and not Tensor.is_floating_point(tensor)
        return cls(int(Tensor.numel(tensor)), samples, are_tokens)

    @classmethod
    def _of_array(cls, array: Any) -> BatchSize:
        import numpy as np

        array = np.ndarray.view(array, np.ndarray)
        are_tokens = array.ndim == 2 and array.dtype.kind in "biu"
        return cls(array.size, len(array) if array.ndim else 0, are_tokens)


def find_batch_array(batch: object) -> Any:
    """Return the first tensor or NumPy array of a batch, or None without one.

    Parts are searched in their order, depth first, except that "input_ids" comes first in a
    mapping. In any other object, its own tensors come before those of its other attributes.
    """
    waiting = [(batch, 0)]
    for _ in range(_MAX_SEARCHED):
        if not waiting:
            break
        part, level = waiting.pop()
        if _is_array(part):
            return part
        if level < _LEVELS:
            parts = reversed(_list_parts(part))
            waiting += ((each, level + 1) for each in parts if type(each) not in _WITHOUT_PARTS)
    return None


def _is_tensor(part: object) -> bool:
    from torch import Tensor

    return issubclass(type(part), Tensor)


def _is_array(part: object) -> bool:
    numpy = sys.modules.get("numpy")
    return _is_tensor(part) or (numpy is not None and issubclass(type(part), numpy.ndarray))


def _list_parts(part: Any) -> list[Any]:
    """Return the first parts of a container or an object."""
    for kind in _SEQUENCES:
        if issubclass(type(part), kind):
            return _take(kind.__iter__(part))
    if issubclass(type(part), dict):
        return _list_values(part)
    from torch import nn

    if issubclass(type(part), (ModuleType, nn.Module)):
        return []
    fields = [*_list_values(_read_attributes(part)), *_take(iterate_slots(part))]
    return sorted(fields, key=lambda each: not _is_array(each))


def _take(parts: Iterable[Any]) -> list[Any]:
    """Return the first parts. No other thread can change a built-in container meanwhile."""
    return list(islice(parts, _MAX_PARTS))


def _list_values(mapping: Any) -> list[Any]:
    # dict.get() would compare the key with keys of the user's types.
    items = _take(dict.items(mapping))
    return [
        *(value for key, value in items if type(key) is str and key == "input_ids"),
        *(value for _, value in items),
    ]


def _read_attributes(part: object) -> dict[str, Any]:
    try:
        attributes = object.__getattribute__(part, "__dict__")
    except ours(AttributeError):
        return {}
    return attributes if type(attributes) is dict else {}


def iterate_slots(part: object) -> Iterator[Any]:
    """Yield the values in an object's slots."""
    for kind in type(part).__mro__:
        if "__slots__" in kind.__dict__:
            for slot in tuple(kind.__dict__.values()):
                if type(slot) is MemberDescriptorType:
                    with suppress(AttributeError):  # nothing is assigned to the slot
                        yield slot.__get__(part)
