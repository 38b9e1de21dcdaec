"""Replacing an attribute of somebody else's class or module, and putting it back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("torchlens_perf")


@contextmanager
def patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """`owner.name` is `replacement` inside, and what it was before afterwards.

    If another tool has wrapped ours meanwhile, its wrapper stays in place: taking it away would undo its work. Ours
    then passes calls on, because its recorder is closed.
    """
    inherited = name not in vars(owner)
    original = getattr(owner, name) if inherited else vars(owner)[name]  # which may be a staticmethod
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if vars(owner).get(name) is not replacement:
            logger.debug("torchlens_perf: %s.%s was wrapped by another tool and is left as it is", owner, name)
        elif inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
