"""Replace an attribute of another package's class or module, and restore it later."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchlens_perf.output import logger


@dataclasses.dataclass(eq=False)
class _Patch:
    owner: Any
    name: str
    replacement: Any
    original: Any
    inherited: bool
    ended: bool = False

    def is_in_place(self) -> bool:
        return vars(self.owner).get(self.name) is self.replacement

    def restore(self) -> None:
        if self.inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


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
        setattr(owner, name, replacement)
        stack.append(patch)
        yield
    finally:
        patch.ended = True
        while stack and stack[-1].ended and stack[-1].is_in_place():
            stack.pop().restore()
        if stack and stack[-1] is patch:
            logger.debug(
                "torchlens_perf: %s.%s was wrapped by another tool and is left as it is",
                owner,
                name,
            )
            stack.pop()
        if not stack:
            _patches.pop(key, None)
