"""Replace an attribute of another package's class or module, and restore it later."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchlens_perf.output import logger

_MISSING = object()


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

    Patches of one attribute may end in any order: the value is restored after newer patches have
    ended. If another tool has wrapped the replacement, the wrapper stays, because its removal would
    undo the tool's work. The replacement then only forwards calls, because its recorder is closed.
    """
    inherited = name not in vars(owner)
    # vars() keeps a staticmethod object as it is.
    original = getattr(owner, name) if inherited else vars(owner)[name]
    patch = _Patch(owner, name, replacement, original, inherited)
    key = id(owner), name
    stack = _patches.setdefault(key, [])
    try:
        stack.append(patch)
        setattr(owner, name, replacement)
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
