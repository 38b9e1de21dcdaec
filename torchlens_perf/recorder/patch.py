"""Replace an attribute of another package's class or module, and restore it later."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torchlens_perf.output import logger
from torchlens_perf.recorder import torch_private

_MISSING = object()

_FUNCTIONS = (FunctionType, BuiltinFunctionType)


@dataclasses.dataclass(eq=False)
class _Patch:
    owner: Any
    name: str
    replacement: Any
    original: Any
    inherited: bool
    ended: bool = False

    def restore(self) -> bool:
        """Restore the earlier value. Return False if another tool has wrapped the replacement.

        Further calls do nothing.
        """
        current = vars(self.owner).get(self.name, _MISSING)
        if current is not self.replacement:
            return current is (_MISSING if self.inherited else self.original)
        if self.inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)
        return True


_patches: dict[tuple[int, str], list[_Patch]] = {}
"""Patches by owner id and attribute name, oldest first."""


@contextmanager
def patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Set `owner.name` to `replacement` inside the context, and restore the earlier value
    afterwards.

    The replacement gets the name, signature and documentation of what it replaces. Pickle then finds
    it by name. If another module defines a function, the function is also replaced there.

    Patches of one attribute may end in any order: the value is restored after newer patches have
    ended. If another tool has wrapped the replacement, the wrapper stays, because its removal would
    undo the tool's work. The replacement then only forwards calls, because its recorder is closed.
    """
    inherited = name not in vars(owner)
    # vars() keeps a staticmethod object as it is.
    original = getattr(owner, name) if inherited else vars(owner)[name]
    if isinstance(original, staticmethod):
        replacement = staticmethod(_imitate(original.__func__, replacement))
    elif isinstance(original, (*_FUNCTIONS, type)):
        replacement = _imitate(original, replacement)
        if inherited:
            replacement.__module__ = owner.__module__
            replacement.__qualname__ = f"{owner.__qualname__}.{name}"
    with ExitStack() as places:
        for place in (owner, *_find_defining_module(owner, name, original)):
            patch = _Patch(place, name, replacement, original, inherited)
            places.enter_context(_put_in_place(patch))
        yield


def _imitate(function: Any, replacement: Any) -> Any:
    """Return the replacement, or a function that calls it, with the attributes of `function`."""
    if not isinstance(replacement, FunctionType):
        replacement = create_python_front(replacement)
    return functools.update_wrapper(replacement, function)


def create_python_front(native: Any) -> Any:
    """Return a Python function that calls a function written in C, whose name cannot be changed."""

    def call_native(*args: Any, **kwargs: Any) -> Any:
        return native(*args, **kwargs)

    return torch_private.break_graph_at(call_native)


def _find_defining_module(owner: Any, name: str, function: Any) -> list[ModuleType]:
    """Return the module that defines a function of another module, or an empty list."""
    home = sys.modules.get(getattr(function, "__module__", None) or "")
    if home is None or home is owner or not isinstance(owner, ModuleType):
        return []
    return [home] if isinstance(function, _FUNCTIONS) and vars(home).get(name) is function else []


@contextmanager
def _put_in_place(patch: _Patch) -> Iterator[None]:
    key = id(patch.owner), patch.name
    try:
        _patches.setdefault(key, []).append(patch)
        setattr(patch.owner, patch.name, patch.replacement)
        yield
    finally:
        try:
            _end(patch, key)
        # Restore the value even if Ctrl-C or another interruption arrives in the first call.
        finally:
            _end(patch, key)


def _end(patch: _Patch, key: tuple[int, str]) -> None:
    patch.ended = True
    stack = _patches.get(key, [])
    while stack and stack[-1].ended and stack[-1].restore():
        stack.pop()
    if stack and stack[-1] is patch:
        logger.debug(
            "torchlens_perf: %s.%s was wrapped by another tool and is left as it is",
            patch.owner,
            patch.name,
        )
        stack.pop()
    if not stack:
        _patches.pop(key, None)
